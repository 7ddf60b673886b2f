"""Packed weights of linears on float tensors and on row codes: made once, found again."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from x86quant import extension
from x86quant.errors import ExtensionError, X86QuantWarning
from x86quant.kernels import dynamic_kernels
from x86quant.kernels.saturation import weight_facts
from x86quant.plain_ops import PLAIN
from x86quant.routing.in_force import routing_in_force
from x86quant.routing.routes import Choice, Routes
from x86quant.spec import OpSpec
from x86quant.weight_form import bits_of, features_of, has_groups

Stamp = tuple[tuple[int, int], ...]


def choose_linear_dynamic(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> Routes:
    """The kernels for a ``weight`` of 8 or 4 bits."""
    spec = _spec(weight, weight_scale, bias, activation)
    routes = routing_in_force(dynamic_kernels()).route(spec)
    # Its packs look at rows alone, so no kernel of theirs may have a situation it cannot run in.
    assert not routes.detours, routes.detours
    return routes


def native_in_sequences(
    weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> Choice | None:
    """How a native sequence multiplies by ``weight``: one call takes all of its steps.

    None where that may not be: the native kernel cannot, or an override names another one.
    """
    routing = routing_in_force(dynamic_kernels())
    spec = _spec(weight, weight_scale, bias, None)
    kernel = routing.kernels["native"]
    if kernel.missing_features(routing.cpu) or kernel.not_supported_reasons(spec, routing.cpu):
        return None
    chosen = [choice for _, choice in routing.route(spec).ranges]
    if any(choice.rule == "override" and choice.kernel != "native" for choice in chosen):
        return None
    reason = "the whole sequence is one native call"
    return Choice(spec, "native", "sequence", reason)


def _spec(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> OpSpec:
    groups = has_groups(weight_scale)
    return OpSpec(
        "linear",
        features_of(weight),
        weight.shape[0],
        bias=bias is not None,
        dynamic=True,
        post_op=activation or "none",
        caller="graph",
        weights=None if groups else weight_facts(weight),
        bits=bits_of(weight) if groups else None,
        weight_group=features_of(weight) // weight_scale.shape[1] if groups else None,
    )


def pack_linear_dynamic(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> Any | None:
    """Pack the operands of ``linear_dynamic``; None where the extension is missing."""
    if not extension_loads():
        return None
    operands = (weight, weight_scale, bias, activation)
    routes = choose_linear_dynamic(*operands)
    return packed_for(*operands, routes.row_limits, routes.kernels, routes.to_json())


def packed_for(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    row_limits: Sequence[int],
    kernels: Sequence[str],
    record: str,
) -> Any:
    """The operands of ``linear_dynamic``, packed for each of ``kernels``.

    Args:
        row_limits: up to how many rows each of them runs; -1: any number.
        record: what the pack answers when it is asked how it was routed.
    """
    operands = (weight, weight_scale, bias)
    native = extension.native()
    runs: list[Any] = []
    limits: list[int] = []
    for limit, name in zip(row_limits, kernels, strict=True):
        run = _plain(operands, activation) if name == "reference" else name
        run = "native" if name == NATIVE_BLOCKS else run  # one pack: it knows when
        if runs and runs[-1] == run:
            limits[-1] = limit
        else:
            runs.append(run)
            limits.append(limit)
    unpack = _unpacking(row_limits, kernels)
    return native.pack_linear_dynamic(*operands, activation, unpack, limits, runs, record)


#: The kernel that is another way to read what the kernel "native" packs.
NATIVE_BLOCKS = "native_blocks"
#: More rows than any call has.
_NO_ROWS = (1 << 31) - 1


def _unpacking(row_limits: Sequence[int], kernels: Sequence[str]) -> list[int]:
    """From how many rows on blocks are unpacked, and from how many on no more (0: of any number).

    One stretch of rows: what lies between two of them is part of it.
    """
    those = [i for i, name in enumerate(kernels) if name == NATIVE_BLOCKS]
    if not those:
        return [_NO_ROWS, 0]
    begin = row_limits[those[0] - 1] + 1 if those[0] else 1
    end = row_limits[those[-1]] + 1
    return [begin, max(end, 0)]


def row_routes(weights: Weights, activation: str | None) -> Routes | None:
    """How products of row codes by ``weights`` run; None of those of 8 bits without groups.

    Other kernels than ours read no row codes: where a rule names one, ours runs.
    """
    weight, scale, bias = weights
    if not has_groups(scale):
        return None
    kernels = {name: k for name, k in dynamic_kernels().items() if k.engine == "native"}
    return routing_in_force(kernels).route(_spec(weight, scale, bias, activation))


def _unpacked_rows(weights: Weights, activation: str | None) -> list[int]:
    routes = row_routes(weights, activation)
    return [0, 0] if routes is None else _unpacking(routes.row_limits, routes.kernels)


def _plain(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], activation: str | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The kernel "reference": the definition of the op, with operands of its own."""
    own = [None if x is None else x.detach().clone() for x in operands]
    return lambda x: PLAIN["linear_dynamic"](x, *own, activation or None)


@functools.cache
def extension_loads() -> bool:
    """Whether there are compiled kernels; says once what it means if there are none."""
    try:
        extension.load()
    except ExtensionError as error:
        warnings.warn(
            f"int8 linears run by the plain ops, slowly: {error}", X86QuantWarning, stacklevel=2
        )
        return False
    return True


def stamp(*tensors: torch.Tensor | None) -> Stamp:
    """Changes when any of ``tensors`` is replaced or written to.

    Writes to tensors made in inference mode are not tracked by torch, and not seen here.
    """
    return tuple(
        (t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors if t is not None
    )


def track_writes(tensors: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors made in inference mode: writes to those leave no trace."""
    with torch.inference_mode(False):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.is_inference():
                tensors[name] = tensor.clone()


@dataclass(frozen=True)
class _Cached:
    pack: Any
    stamp: Stamp
    storages: tuple[StorageWeakRef, ...]

    @property
    def alive(self) -> bool:
        return not any(storage.expired() for storage in self.storages)  # type: ignore[no-untyped-call]


_CACHE: dict[tuple[Any, ...], _Cached] = {}
_SWEEP_FROM = 64
_sweep_at = _SWEEP_FROM


def cached_pack(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> Any | None:
    """The pack of these operands, made when they are first seen."""
    operands = (weight, weight_scale, bias)
    return remembered(
        "linear_dynamic",
        operands,
        activation,
        lambda: pack_linear_dynamic(*operands, activation),
    )


def remembered(
    kind: str,
    operands: tuple[torch.Tensor | None, ...],
    activation: str | None,
    make: Callable[[], Any],
) -> Any:
    """What ``make`` made of ``operands`` when they were first seen, or last changed.

    It lives until their memory is freed, or rather until the first sweep after that.
    """
    tensors = [t for t in operands if t is not None]
    addresses = tuple(t.data_ptr() for t in tensors)
    given = tuple(None if t is None else (t.shape, t.stride()) for t in operands)
    key = (addresses, kind, given, activation)
    now = stamp(*tensors)
    found = _CACHE.get(key)
    if found is None or found.stamp != now or not found.alive:
        storages = tuple(
            StorageWeakRef(t.untyped_storage())  # type: ignore[no-untyped-call]
            for t in tensors
        )
        found = _Cached(make(), now, storages)
        _CACHE[key] = found
        _sweep()
    return found.pack


def forget_packs(tensors: Iterable[torch.Tensor]) -> None:
    """Let weights among ``tensors`` be packed again, by the rules that are in force then."""
    addresses = {tensor.data_ptr() for tensor in tensors}
    for key in list(_CACHE):
        if not addresses.isdisjoint(key[0]):
            _CACHE.pop(key, None)


def _sweep() -> None:
    """Drop packs of freed weights, whenever the cache has doubled."""
    global _sweep_at
    if len(_CACHE) < _sweep_at:
        return
    for key, cached in list(_CACHE.items()):
        if not cached.alive:
            _CACHE.pop(key, None)
    _sweep_at = max(_SWEEP_FROM, 2 * len(_CACHE))


#: Of a linear: int8 weight [N, K], a scale an output feature, bias.
Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
#: For each product of a pack what a pack of the same weights has returned among its ``blobs``.
Known = Sequence[torch.Tensor | None]


def row_linear(weights: Weights, activation: str | None, known: Known = (None,)) -> Any | None:
    """The packed ``weights``; None where there are none, or nothing compiled to read them."""
    if weights[0].numel() == 0 or not extension_loads():
        return None
    unpack = _unpacked_rows(weights, activation)
    return remembered(
        f"row_linear {unpack}",
        weights,
        activation,
        lambda: extension.native().pack_row_linear(*weights, activation, unpack, *known),
    )


def gated_rows(
    gate: Weights, up: Weights, activation: str, known: Known = (None, None)
) -> Any | None:
    """The packed weights of both products of a gated layer; None as for ``row_linear``."""
    if gate[0].numel() == 0 or not extension_loads():
        return None
    unpack = _unpacked_rows(up, activation)
    return remembered(
        f"gated_rows {unpack}",
        (*gate, *up),
        activation,
        lambda: extension.native().pack_gated_rows(*gate, *up, activation, unpack, *known),
    )

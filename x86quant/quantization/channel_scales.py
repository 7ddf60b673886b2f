"""Input channels that matter more get finer codes of 4 bits: activation-aware scales (AWQ).

Of codes with a scale for each group of input channels, all channels of a group have one step. Here
channel ``c`` of what linears are given is divided by ``s[c]`` where it is made, and their columns
are multiplied by it: the function stays the same, and what rounding a large channel's weights does
to the results becomes smaller, at the cost of small ones. ``s = r^alpha``, where ``r`` are the
channels' sizes on sample rows and ``alpha`` is the one by which the results come closest.

Where a channel is made its scale is folded in, at no cost in the int8 model: the weight of a norm,
or the output features of a linear behind which nothing else computes with single numbers (``up`` of
a gated block, the values of an attention). That this is exact is tried out, by scaling. What
follows of an activation that is not linear is left alone.

Half of the rows choose, the others judge: scales are kept where the linears with error feedback are
closer on rows that nobody looked at.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import feed, flat_floats, no_fast_path
from x86quant.dynamic.convert import has_hooks
from x86quant.dynamic.group_weights import group_of, quantize_groups
from x86quant.ops.groups import real_weight
from x86quant.quantization.error_feedback import Squares, importance, rounded_with_feedback, squares
from x86quant.quantization.kit.smoothing import find_consumers

_ALPHAS = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
#: Output features that are looked at, of all linears behind one channel.
_OUTPUTS = 512
#: Below this share of the error it is worth the change.
_WORTH = 0.98
_TRIED_BY = (0.5, 2.0)  # what scales are drawn from that try whether a place is exact
_CLOSE = 1e-4


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where the channels of ``linears`` are made.

    Attributes:
        producer: a norm with a weight, or a linear.
        linears: what reads its result, or something each channel of which is a multiple of it.
        repeat: how many heads of what they read are of one head of the producer.
        head: features of such a head.
    """

    producer: str
    linears: tuple[str, ...]
    repeat: int = 1
    head: int = 1

    def spread(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales of the linears' channels, of those of the producer."""
        return scales.reshape(-1, self.head).repeat_interleave(self.repeat, 0).flatten()

    def gathered(self, sizes: torch.Tensor) -> torch.Tensor:
        """Sizes of the producer's channels, of those of the linears."""
        return sizes.reshape(-1, self.repeat, self.head).mean(1).flatten()


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled:
    """What was divided where channels are made, by channel, and what was left of the error."""

    place: Place
    scales: torch.Tensor
    alpha: float
    error: float

    def __str__(self) -> str:
        names = ", ".join(self.place.linears)
        return (
            f"{self.place.producer} -> {names}: alpha {self.alpha}, "
            f"squared error × {self.error:.3g}"
        )


def scale_channels(
    model: nn.Module, names: Sequence[str], sample: Sequence[Call], bits: int
) -> tuple[Scaled, ...]:
    """Scale the channels of those linears called ``names`` that gain by it, in place.

    Args:
        model: a float model in evaluation mode, which is run on ``sample``.
        names: linears that will have codes of ``bits``.
        sample: typical calls.
        bits: of a code.
    """
    found = []
    places = [x for x in places_in(model, sample[0]) if set(x.linears) & set(names)]
    firsts = {place.linears[0]: place for place in places}
    for name, seen in squares(model, list(firsts), sample):
        scaled = _best(model, firsts[name], names, seen, bits)
        if scaled is not None:
            found.append(scaled)
    for one in found:
        apply(model, one)
    return tuple(found)


def apply(model: nn.Module, scaled: Scaled) -> None:
    """Divide the channels of one place in ``model``, and multiply by as much, in place."""
    _scale(model, scaled.place, scaled.scales)


def _scale(model: nn.Module, place: Place, scales: torch.Tensor) -> None:
    producer: Any = model.get_submodule(place.producer)
    with torch.no_grad():
        weight = producer.weight
        weight /= scales[:, None] if weight.dim() == 2 else scales
        if getattr(producer, "bias", None) is not None:
            producer.bias /= scales
        for name in place.linears:
            model.get_parameter(f"{name}.weight").mul_(place.spread(scales))


# --- where ---


def places_in(model: nn.Module, call: Call) -> list[Place]:
    """Where channels of linears in ``model`` are made, as far as that is exact."""
    shared = _shared(model)
    found = []
    for norm, readers in find_consumers(model, call, _is_norm).items():
        place = Place(norm, readers)
        known = all(_is_plain(model.get_submodule(name)) for name in readers)
        if known and not shared & {norm, *readers} and _norm_is_exact(model, place):
            found.append(place)
    read = {name for place in found for name in place.linears}
    for levels in (1, 2):  # linears in one part, and those of an attention in two parts of one
        pairs = _pairs(model, shared, read, levels)
        calls = _first_calls(model, list(pairs), call)
        for parent, places in pairs.items():
            for place in places:
                if parent not in calls or read & {*place.linears}:
                    continue
                if _pair_is_exact(model, place, parent, calls[parent]):
                    found.append(place)
                    read.update(place.linears)
    return found


def _pairs(
    model: nn.Module, shared: set[str], read: set[str], levels: int
) -> dict[str, list[Place]]:
    """Linears so many levels below one part, of which one may make the channels of the other."""
    by_part: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        path = name.split(".")
        if len(path) >= levels and name not in shared and _is_plain(module):
            by_part.setdefault(".".join(path[:-levels]), []).append(name)
    found = {}
    for part, linears in by_part.items():
        inside = [model.get_submodule(part), *model.get_submodule(part).children()]
        sizes = (vars(x).get("head_dim") for x in inside)
        head = next((x for x in sizes if isinstance(x, int)), 0)
        places = [
            place
            for last in linears
            if last not in read
            for first in linears
            if first != last and (place := _between(model, first, last, head)) is not None
        ]
        if places:
            found[part] = places
    return found


def _between(model: nn.Module, first: str, last: str, head: int) -> Place | None:
    made, taken = (model.get_submodule(x) for x in (first, last))
    repeat, left = divmod(int(taken.in_features), int(made.out_features))  # type: ignore[arg-type]
    if left or repeat < 1:
        return None
    if repeat == 1:
        return Place(first, (last,))
    if head < 1 or int(made.out_features) % head:  # type: ignore[arg-type]
        return None
    return Place(first, (last,), repeat, head)


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not has_hooks(module)


def _shared(model: nn.Module) -> set[str]:
    """The layers whose tensors are those of other layers, too."""
    owners: dict[int, set[str]] = {}
    for name, x in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(x), set()).add(name.rpartition(".")[0])
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _first_calls(model: nn.Module, paths: Sequence[str], call: Call) -> dict[str, Call]:
    """The arguments of the first call of each part of ``model`` within ``call``."""
    found: dict[str, Call] = {}

    def keeper(path: str) -> Callable[[Call], None]:
        def keep(given: Call) -> None:
            if path not in found:
                found[path] = copy.deepcopy(given)  # what holds a cache is about to change it

        return keep

    feed(model, [call], {path: keeper(path) for path in paths})
    return found


def _norm_is_exact(model: nn.Module, place: Place) -> bool:
    """Whether the result of a norm is divided as its weight is."""
    norm = model.get_submodule(place.producer)
    width = len(norm.get_parameter("weight"))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, width, generator=draw, dtype=torch.float32)
    scales = _drawn(width)
    with torch.no_grad():
        before = norm(x)
        with _tried(model, place, scales):
            after = norm(x)
    return bool(torch.allclose(after * scales, before, rtol=_CLOSE, atol=_CLOSE))


def _pair_is_exact(model: nn.Module, place: Place, parent: str, call: Call) -> bool:
    """Whether what ``parent`` returns stays the same when a pair of its linears is scaled."""
    module = model.get_submodule(parent)
    outputs = len(model.get_parameter(f"{place.producer}.weight"))
    try:
        with torch.no_grad(), no_fast_path():
            before = flat_floats(_called(module, call))
            with _tried(model, place, _drawn(outputs)):
                after = flat_floats(_called(module, call))
    except Exception:  # the user's own code, called out of its place
        return False
    size = float(before.abs().max()) if len(before) else 0.0
    return before.shape == after.shape and bool(((after - before).abs() <= _CLOSE * size).all())


def _called(module: nn.Module, call: Call) -> Any:
    own = copy.deepcopy(call)
    return module(*own.args, **own.kwargs)


def _drawn(count: int) -> torch.Tensor:
    low, high = _TRIED_BY
    draw = torch.Generator().manual_seed(0)
    return low + (high - low) * torch.rand(count, generator=draw, dtype=torch.float32)


@contextlib.contextmanager
def _tried(model: nn.Module, place: Place, scales: torch.Tensor) -> Iterator[None]:
    """A block in which the channels of ``place`` are scaled."""
    layers = [model.get_submodule(name) for name in (place.producer, *place.linears)]
    kept = [
        (x, x.detach().clone())
        for layer in layers
        for x in layer._parameters.values()
        if x is not None
    ]
    try:
        _scale(model, place, scales)
        yield
    finally:
        with torch.no_grad():
            for x, before in kept:
                x.copy_(before)


def _is_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    own = {name for name, x in module._parameters.items() if x is not None}
    return (
        "Norm" in type(module).__name__
        and weight is not None
        and weight.dim() == 1
        and own <= {"weight", "bias"}
        and not module._modules
        and not isinstance(module, nn.modules.batchnorm._BatchNorm)
    )


# --- by how much ---


def _best(
    model: nn.Module, place: Place, names: Sequence[str], seen: Squares, bits: int
) -> Scaled | None:
    """The scales of ``place`` by which linears come closest; None if they are not worth it."""
    weights = [
        model.get_parameter(f"{name}.weight").detach().float()
        for name in place.linears
        if name in names
    ]
    weight = torch.cat(weights)
    weight = weight[:: max(1, len(weight) // _OUTPUTS)]
    group = group_of(weight.shape[1])
    if group is None or seen.rows < 2:
        return None
    sizes = place.gathered(seen.chosen_by.diagonal().clamp(min=0).sqrt())
    live = sizes > 0
    if int(live.sum()) < 2:
        return None
    logs = torch.where(live, sizes.clamp(min=1e-30).log(), torch.zeros_like(sizes))
    logs = torch.where(live, logs - logs[live].mean(), logs)

    def error(scales: torch.Tensor) -> float:
        wide = place.spread(scales)
        counts = importance(seen.chosen_by.diagonal() / wide.square())
        real = real_weight(*quantize_groups(weight * wide, bits, group, counts)) / wide
        return seen.error_of(real - weight, judging=False)

    tried = {alpha: error((alpha * logs).exp()) for alpha in (0.0, *_ALPHAS)}
    alpha = min(tried, key=tried.__getitem__)
    if alpha == 0:
        return None
    scales = (alpha * logs).exp()
    before, after = (
        _error_with_feedback(weight, place.spread(x), seen, bits, group)
        for x in (torch.ones_like(scales), scales)
    )
    if not after < _WORTH * before:
        return None
    return Scaled(place, scales, alpha, after / before)


def _error_with_feedback(
    weight: torch.Tensor, wide: torch.Tensor, seen: Squares, bits: int, group: int
) -> float:
    """The squared error of results, on the rows that judge, where channels are scaled so."""
    products = seen.chosen_by / wide[:, None] / wide
    operands = rounded_with_feedback(weight * wide, products, bits, group)
    return seen.error_of(real_weight(*operands) / wide - weight, judging=True)

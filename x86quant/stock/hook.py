"""Routing behind ``torch.backends.quantized.engine = "x86"``.

``enable()`` overrides the stock prepack ops. Under the engine "x86" they return packs made by
``x86quant.packing``; under any other engine they call the stock kernels, untouched. Nothing is
overridden at run time but four fused ops that stock torch only runs, or crashes, on packs of
one class.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from x86quant import extension
from x86quant.errors import InvalidInputError
from x86quant.packing.embedding_tables import pack_embedding
from x86quant.packing.routed import ConvGeometry, Saturation, pack_conv, pack_linear

_KEY = "QuantizedCPU"
# Ops that take a quantized tensor. Given a float one, stock torch answers with a list of
# dispatch keys; here they answer with a remedy.
_QUANTIZED_INPUT_OPS = (
    "linear",
    "linear_relu",
    *(
        f"conv{dims}d{relu}{new}"
        for dims, new in ((1, ""), (2, ".new"), (3, ".new"))
        for relu in ("", "_relu")
    ),
    *(f"conv_transpose{dims}d" for dims in (1, 2, 3)),
)
_lock = threading.RLock()
_routing: _Routing | None = None


class _Routing:
    """The overrides while they are in force."""

    def __init__(self, saturation: Saturation) -> None:
        self.saturation = saturation
        make: Any = torch.library.Library  # which has no types
        self.library = make("quantized", "IMPL")
        with warnings.catch_warnings():
            # Overriding is the point.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
            for op, override in _overrides(self).items():
                self.library.impl(op, override, _KEY)
            for op in _QUANTIZED_INPUT_OPS:
                self.library.impl(op, _refuse_float_input(op), "CPU")


class Enabled:
    """What ``enable()`` returns: use it with ``with`` to put back what was before."""

    def __init__(self, before: Saturation | None) -> None:
        self._before = before

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            disable()
        else:
            _set(self._before)


def enable(*, saturation: Saturation = "exact") -> Enabled:
    """Route every prepack of the stock workflows under the engine "x86".

    Models packed before stay as they are; ``x86quant.reroute(model)`` routes them.

    Args:
        saturation: what to do with a layer on which the fast kernels could overflow 16 bits
            (mostly CPUs without VNNI). ``"exact"`` takes an exact kernel, ``"7bit"`` takes the
            fast one with activations clamped to 127; calibrate such a model with
            ``get_default_qconfig_mapping(activation_bits=7)``.

    Returns:
        An object that, used as a context manager, restores the former state on leaving.
    """
    if saturation not in ("exact", "7bit"):
        raise InvalidInputError(f"saturation is {saturation!r}; use 'exact' or '7bit'.")
    extension.need_stock()
    with _lock:
        before = _routing.saturation if _routing else None
        _set(saturation)
    return Enabled(before)


def disable() -> None:
    """Give the prepack ops back to stock torch. Packs already made keep working."""
    _set(None)


def is_enabled() -> bool:
    """Whether prepacks under the engine "x86" are routed."""
    return _routing is not None


def saturation_policy() -> Saturation:
    """The policy given to ``enable``; "exact" when routing is off."""
    routing = _routing
    return routing.saturation if routing else "exact"


def _set(saturation: Saturation | None) -> None:
    global _routing
    with _lock:
        if _routing is not None and _routing.saturation == saturation:
            return
        if _routing is not None:
            _routing.library._destroy()
            _routing = None
        if saturation is not None:
            _routing = _Routing(saturation)


def _refuse_float_input(op: str) -> Callable[..., Any]:
    def refuse(x: torch.Tensor, pack: Any, *_: Any) -> Any:
        raise InvalidInputError(
            f"quantized::{op} got a {x.dtype} tensor of shape {tuple(x.shape)}; it takes a "
            "quantized one. Quantize it with torch.quantize_per_tensor(x, scale, zero_point, "
            "torch.quint8), or wrap the eager model in QuantStub/DeQuantStub before convert()."
        )

    return refuse


def _under_x86() -> bool:
    engine: str = torch.ops.x86quant.user_engine()
    return engine == "x86"


def _stock(op: str) -> Callable[..., Any]:
    """The kernel stock torch registered, callable while it is overridden."""
    kernel = torch.library.get_kernel(f"quantized::{op}", _KEY)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.QuantizedCPU)
    return lambda *args: kernel.call_boxed(keys, *args)


def _overrides(routing: _Routing) -> dict[str, Callable[..., Any]]:
    overrides: dict[str, Callable[..., Any]] = {"linear_prepack": _linear_override(routing)}
    for op in ("conv1d_prepack", "conv2d_prepack", "conv3d_prepack", "conv_prepack"):
        overrides[op] = _conv_override(routing, op)
    for dims in (1, 2, 3):
        op = f"conv_transpose{dims}d_prepack"
        overrides[op] = _conv_transpose_override(routing, op)
    overrides["embedding_bag_prepack"] = _embedding_override()
    overrides["conv2d_add"] = _conv_add_override("conv2d_add", relu=False)
    overrides["conv2d_add_relu"] = _conv_add_override("conv2d_add_relu", relu=True)
    overrides["linear_leaky_relu"] = _linear_activation_override("leaky_relu")
    overrides["linear_tanh"] = _linear_activation_override("tanh")
    return overrides


def _linear_override(routing: _Routing) -> Callable[..., Any]:
    stock = _stock("linear_prepack")

    def linear_prepack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if not _under_x86():
            return stock(weight, bias)
        return pack_linear(weight, bias, saturation=routing.saturation)

    return linear_prepack


def _embedding_override() -> Callable[..., Any]:
    stock = _stock("embedding_bag_prepack")

    def embedding_bag_prepack(weight: torch.Tensor) -> Any:
        return pack_embedding(weight) if _under_x86() else stock(weight)

    return embedding_bag_prepack


def _conv_override(routing: _Routing, op: str) -> Callable[..., Any]:
    stock = _stock(op)

    def conv_prepack(
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Any:
        if not _under_x86():
            return stock(weight, bias, stride, padding, dilation, groups)
        geometry = ConvGeometry(
            tuple(stride), tuple(padding), tuple(dilation), groups, False, (0,) * len(stride)
        )
        return pack_conv(weight, bias, geometry, saturation=routing.saturation)

    return conv_prepack


def _conv_transpose_override(routing: _Routing, op: str) -> Callable[..., Any]:
    stock = _stock(op)

    def conv_transpose_prepack(
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        output_padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Any:
        if not _under_x86():
            return stock(weight, bias, stride, padding, output_padding, dilation, groups)
        geometry = ConvGeometry(
            tuple(stride), tuple(padding), tuple(dilation), groups, True, tuple(output_padding)
        )
        return pack_conv(weight, bias, geometry, saturation=routing.saturation)

    return conv_transpose_prepack


# The stock versions of these cast any pack to oneDNN's class under the engine "onednn", which
# crashes the process on other packs, and refuse to run under "x86". A stock pack under
# "onednn" is left to them only if it is oneDNN's.


def _conv_add_override(op: str, *, relu: bool) -> Callable[..., Any]:
    stock = _stock(op)

    def conv2d_add(
        qx: torch.Tensor, accumulator: torch.Tensor, pack: Any, scale: float, zero_point: int
    ) -> torch.Tensor:
        if _is_onednn(torch.ops.x86quant.conv2d_record(pack)):
            result: torch.Tensor = stock(qx, accumulator, pack, scale, zero_point)
            return result
        return torch.ops.x86quant.conv2d_add(  # type: ignore[no-any-return]
            qx, accumulator, pack, scale, zero_point, relu
        )

    return conv2d_add


def _linear_activation_override(activation: str) -> Callable[..., Any]:
    stock = _stock(f"linear_{activation}")

    def linear_activation(
        qx: torch.Tensor, pack: Any, scale: float, zero_point: int, slope: float = 0.0
    ) -> torch.Tensor:
        if _is_onednn(torch.ops.x86quant.linear_record(pack)):
            more = (slope,) if activation == "leaky_relu" else ()
            result: torch.Tensor = stock(qx, pack, scale, zero_point, *more)
            return result
        return torch.ops.x86quant.linear_activation(  # type: ignore[no-any-return]
            qx, pack, scale, zero_point, activation, slope
        )

    return linear_activation


def _is_onednn(record: str) -> bool:
    return record.startswith("stock:") and "Onednn" in record

"""Whether a traced graph answers as the model does that it was traced from, also at other sizes.

A tracer may freeze what depends on sizes or values, drop a write in place, or miss a hook. So it is
not trusted: the graph is run beside the model, on calibration data and on batches and sizes made
from it, and it must give the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from x86quant.dynamic.convert import has_hooks
from x86quant.errors import UnsupportedError
from x86quant.quantization.batches import Call
from x86quant.quantization.wording import first_line

#: Float rounding: decomposed ops may add up in another order.
_TOLERANCE = 1e-4
#: How the last dimensions of images and sequences are resized.
_FACTORS = (0.5, 1.5, 2.0)


def why_untraceable(model: nn.Module, call: Call) -> str | None:
    """Why no graph can stand for ``model``, whatever traces it; None if one may.

    A graph has no hooks, keeps no state between calls, and draws no random numbers.
    """
    for path, module in model.named_modules():
        if has_hooks(module):
            return f"{path or 'the model'} has hooks, which a graph would not call"
    before = _state(model)
    first = run(model, call)
    if _state(model) != before:
        return "it changes its own attributes or buffers at each call"
    if not same(first, run(model, call)):
        return "two calls on the same inputs differ: it draws random numbers or keeps state"
    return None


def check_faithful(model: nn.Module, graph: nn.Module, calls: Sequence[Call]) -> None:
    """Compare ``graph`` with ``model`` on ``calls``, and on other sizes that the model takes.

    Raises:
        UnsupportedError: they differ; says where.
    """
    for call in calls:
        _compare(graph, call, run(model, call))
    for call in _resized(calls[0]):
        try:
            expected = run(model, call)
        # Sizes made up here, which the model's own code may refuse in any way.
        except Exception:
            continue
        _compare(graph, call, expected)


def _compare(graph: nn.Module, call: Call, expected: Any) -> None:
    try:
        actual = run(graph, call)
    except Exception as error:
        raise UnsupportedError(
            f"on inputs of shape {call} the traced model fails, the model does not "
            f"({first_line(error)})"
        ) from error
    if not same(expected, actual):
        raise UnsupportedError(
            f"on inputs of shape {call} the traced model gives other results than the model"
        )


def run(model: nn.Module, call: Call) -> Any:
    """What ``model`` returns for copies of the arguments: a model may write to its inputs."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    with torch.no_grad():
        result = Call(
            tuple(pytree.tree_map(copied, value) for value in call.args),
            {key: pytree.tree_map(copied, value) for key, value in call.kwargs.items()},
        )(model)
        return pytree.tree_map(copied, result)


def same(a: Any, b: Any) -> bool:
    """Whether two results agree in structure, types and shapes, and to float rounding in values."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and _same_tensors(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a is b or bool(a == b))


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return False
    if not bool(finite.any()):
        return True
    a, b = a[finite], b[finite]
    return float((a - b).abs().max()) <= _TOLERANCE * float(a.abs().max()) + 1e-6


def _state(model: nn.Module) -> list[Any]:
    """What changes when a call of ``model`` writes to a buffer or sets an attribute."""
    found: list[Any] = []
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not tensor.is_inference():
                found.append((id(tensor), tensor._version))
        for name, value in vars(module).items():
            if not name.startswith("_"):
                found.append((name, id(value)))
    return found


def _resized(call: Call) -> Iterator[Call]:
    """The same data in other batch sizes, and images and sequences of other sizes."""
    tensors = call.tensors
    batches = {x.shape[0] if x.dim() else None for x in tensors}
    if len(batches) == 1 and None not in batches:
        for rows in (1, 2, len(tensors[0]) + 1):
            yield _mapped(call, lambda x, rows=rows: _to_size(x, 0, rows))
    if any(x.dim() >= 3 for x in tensors):
        for factor in _FACTORS:
            yield _mapped(call, lambda x, factor=factor: _scaled(x, factor))
    elif any(x.dim() == 2 and not x.is_floating_point() for x in tensors):  # token ids
        for factor in _FACTORS:
            yield _mapped(call, lambda x, factor=factor: _to_size(x, 1, round(x.shape[1] * factor)))


def _mapped(call: Call, change: Any) -> Call:
    def changed(value: Any) -> Any:
        return change(value) if isinstance(value, torch.Tensor) and value.dim() else value

    return Call(tuple(map(changed, call.args)), {key: changed(x) for key, x in call.kwargs.items()})


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``x`` with its places, all dimensions but batch and channels, made more or fewer."""
    if x.dim() < 3:
        return x
    # [batch, channels, places…]; three dimensions may also be [batch, length, features].
    for axis in range(2, x.dim()):
        x = _to_size(x, axis, max(1, round(x.shape[axis] * factor)))
    return x


def _to_size(x: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """``x`` cut or repeated to ``size`` along ``axis``."""
    if not x.shape[axis]:
        return x
    index = torch.arange(size, device=x.device) % x.shape[axis]
    return x.index_select(axis, index)

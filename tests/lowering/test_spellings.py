"""Every function, method and module that the lowering knows, in every legal spelling.

Parameters and their order come from torch's own signatures and schemas; a spelling is legal if
eager torch takes it. Each is written between a quantized input and a quantized result, read by
``from_fx``, and must give what torch gives; a share of them also runs natively.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from x86quant.compiled import compile
from x86quant.lowering import lower, normalize

Call = tuple[tuple[Any, ...], dict[str, Any]]

#: Values to try for a parameter, by its name; a parameter that is not here keeps its default.
VALUES: dict[str, list[Any]] = {
    "alpha": [1, 0.5, 2],
    "align_corners": [None, True],
    "approximate": ["tanh"],
    "beta": [2.0],
    "ceil_mode": [True],
    "count_include_pad": [False],
    "dilation": [1, (1,)],
    "dim": [1, -1, 0, (1,), [1, 2], (-1, -2)],
    "dtype": [torch.float64],
    "inplace": [True],
    "keepdim": [True],
    "kernel_size": [2, (2,), (2, 2)],
    "lambd": [0.3],
    "max": [0.5, 1, float("inf"), -0.5],
    "max_val": [0.7],
    "min": [0.0, -0.5, 0, -float("inf")],
    "min_val": [-0.2],
    "mode": ["bilinear", "linear", "nearest-exact", "reflect", "replicate"],
    "negative_slope": [0.2],
    "num_groups": [1, 2],
    "normalized_shape": [(6,), [6, 6], (8,)],
    "output_size": [1, 2, (1,), (2, None), (3, 3), [3, 2, 2]],
    "pad": [(1, 2), [0, 1, 2, 0], (1, -1)],
    "padding": [1, (1,), 0, "same", "valid"],
    "return_indices": [True],
    "rounding_mode": ["floor"],
    "scale_factor": [2, 2.0, (2.0,), (1.5, 2)],
    "size": [5, (5,), (4, 7)],
    "stride": [1, (2,), None],
    "threshold": [3.0],
    "training": [False],
    "value": [0.0, 0.6],
    "train": [False],
    "p": [0.5],
}
#: Spellings tried of one function and shape: a convolution has hundreds.
AT_MOST = 6
SHAPES = ((2, 4, 6, 6), (2, 4, 6), (3, 8), (2, 3, 4, 4, 4), (1, 2, 1, 2, 6, 6))
#: Scale, zero point and type of every quantized tensor.
QUANTIZED = (0.03, 120, torch.quint8)
ALIASES = {"dim": "axis", "keepdim": "keepdims", "input": "x", "other": "x2"}


def signatures(target: Any) -> Iterator[list[tuple[str, bool, bool]]]:
    """Name, whether required, whether keyword only, of each parameter of each overload."""
    if isinstance(target, torch._ops.OpOverload):
        schemas = [target._schema]
    elif inspect.isfunction(target) and target.__module__.startswith("torch.nn"):
        parameters = inspect.signature(target).parameters.values()
        names = [
            (p.name, p.default is p.empty, p.kind is p.KEYWORD_ONLY)
            for p in parameters
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if names:
            yield names
            return
    if not isinstance(target, torch._ops.OpOverload):
        name = getattr(target, "__name__", "").removeprefix("_")
        packet = getattr(torch.ops.aten, name, None)
        if target in vars(operator).values() or packet is None:
            yield [("input", True, False)]
            yield [("input", True, False), ("other", True, False)]
            return
        schemas = [getattr(packet, o)._schema for o in packet.overloads() if "out" not in o]
    for schema in schemas:
        yield [
            ({"self": "input"}.get(a.name, a.name), not a.has_default_value(), a.kwarg_only)
            for a in schema.arguments
        ]


def spellings(target: Any, tensors: dict[str, list[Any]]) -> Iterator[Call]:
    """Calls of ``target``: by position, by keyword, by numpy's names."""
    for parameters in signatures(target):
        required = [p for p in parameters if p[1]]
        wanted = [required] + [
            [*required, p] for p in parameters if not p[1] and (p[0] in VALUES or p[0] in tensors)
        ]
        for chosen in wanted:
            options = [tensors.get(name, VALUES.get(name, [])) for name, _, _ in chosen]
            for values in itertools.product(*options):
                named = dict(zip((name for name, _, _ in chosen), values, strict=True))
                yield from _forms(parameters, named)


def _forms(parameters: list[tuple[str, bool, bool]], named: dict[str, Any]) -> Iterator[Call]:
    leading = list(itertools.takewhile(lambda p: p[0] in named and not p[2], parameters))
    positional = [named[name] for name, _, _ in leading]
    rest = {k: v for k, v in named.items() if k not in {name for name, _, _ in leading}}
    yield tuple(positional), rest
    yield tuple(positional[:1]), {k: v for k, v in named.items() if k != parameters[0][0]}
    yield (), named
    yield (), {ALIASES.get(name, name): value for name, value in named.items()}


class Marker:
    """Stands for a tensor in a spelling."""

    def __init__(self, name: str) -> None:
        self.name = name


def model(op: str, target: Any, call: Call, tensors: dict[str, torch.Tensor]) -> GraphModule:
    """``quantize -> dequantize -> the call -> quantize -> dequantize``."""
    root, graph = nn.Module(), Graph()
    x = graph.placeholder("given")
    real = graph.call_method("dequantize", (_quantize(graph, x),))
    nodes: dict[str, Any] = {"x": real}
    for name, tensor in tensors.items():
        if name != "x":
            root.register_buffer(name, tensor)
            nodes[name] = graph.get_attr(name)

    def filled(value: Any) -> Any:
        if isinstance(value, Marker):
            return nodes[value.name]
        if isinstance(value, list | tuple):
            return type(value)(map(filled, value))
        return value

    args = tuple(map(filled, call[0]))
    y = graph.create_node(op, target, args, {k: filled(v) for k, v in call[1].items()})
    result = graph.call_method("dequantize", (_quantize(graph, y),))
    graph.output(result)
    return GraphModule(root, graph).eval()


def _quantize(graph: Graph, x: Any) -> Any:
    return graph.call_function(torch.quantize_per_tensor, (x, *QUANTIZED))


def functions() -> list[tuple[str, Any]]:
    found = [("call_function", f) for f in normalize._FUNCTIONS]
    found += [("call_method", name) for name in normalize.METHODS]
    # What stands for nothing in the graph has no meaning to compare.
    return [case for case in found if case[1] is not normalize.IDENTITY]


def _name(case: tuple[str, Any]) -> str:
    target = case[1]
    return str(target if isinstance(target, str) else getattr(target, "__name__", target))


X = Marker("x")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("case", functions(), ids=_name)
def test_every_spelling_means_what_torch_says(case: tuple[str, Any]) -> None:
    op, target = case
    called = getattr(torch.Tensor, target) if op == "call_method" else target
    described = target
    if op == "call_method":
        described = getattr(torch, target, None) or getattr(torch.ops.aten, target).default
    ran = 0
    for number, (shape, positive) in enumerate(itertools.product(SHAPES, (False, True))):
        torch.manual_seed(0)
        tensors = _tensors(shape)
        if positive:
            tensors["x"] = tensors["x"].abs() + 0.5
        # What the graph computes with: a division by a code of zero is one by zero.
        tensors["x"] = torch.quantize_per_tensor(tensors["x"], *QUANTIZED).dequantize()
        marked: dict[str, list[Any]] = {
            "input": [X],
            "other": [X, Marker("vector"), 2, -0.5, True],
            "exponent": [2, 3, 0.5, -1.5, X],
            "tensors": [[X, X], (X, Marker("same"))],
            "weight": [Marker("weight"), Marker("transposed")],
            "bias": [Marker("bias")],
            "running_mean": [Marker("bias")],
            "running_var": [Marker("positive")],
        }
        calls = [c for c in spellings(described, marked) if c[0] or op != "call_method"]
        random.Random(number).shuffle(calls)  # others for each shape
        for call in calls[:AT_MOST]:
            ran += _check(op, target, called, call, tensors, native=ran % 12 == 0)
    assert ran, "no spelling of it is legal"


def _tensors(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    channels = shape[1]
    layers = 2 < len(shape) < 6
    kernel = (4, channels, *[3] * (len(shape) - 2)) if layers else (4, shape[-1])
    transposed = (channels, 4, *[3] * (len(shape) - 2)) if layers else (shape[-1], 4)
    return {
        "x": torch.randn(shape),
        "same": torch.randn(shape),
        "vector": torch.randn(shape[-1]),
        "weight": torch.randn(kernel) * 0.2 if len(shape) < 6 else torch.rand(1),
        "transposed": torch.randn(transposed) * 0.2,
        "bias": torch.randn(4),
        "positive": torch.rand(4) + 0.5,
    }


def _check(
    op: str, target: Any, called: Callable[..., Any], call: Call, tensors: dict[str, Any],
    native: bool,
) -> bool:  # fmt: skip
    """Whether eager torch takes the call; if it does, so must the lowering, and mean the same."""

    def eager(value: Any) -> Any:
        if isinstance(value, Marker):
            return tensors[value.name].clone()
        if isinstance(value, list | tuple):
            return type(value)(map(eager, value))
        return value

    def result() -> Any:
        return called(*map(eager, call[0]), **{k: eager(v) for k, v in call[1].items()})

    try:
        found, *again = (result() for _ in range(8))
    except (TypeError, RuntimeError, ValueError, IndexError, NotImplementedError):
        return False
    if not isinstance(found, torch.Tensor) or found.dtype != torch.float32:
        return False
    if not torch.isfinite(found).all() or not all(torch.equal(found, x) for x in again):
        return False  # a code has no NaN; and dropout in training is another each time
    gm = model(op, target, call, tensors)
    x = tensors["x"]
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        try:
            expected = gm(x)
        except RuntimeError:
            return False  # not in this memory format, says torch
        runs = compile(gm, (x,)) if native else lower(gm, (x,), passes=()).canonical
        actual = runs(x)
    assert actual.shape == expected.shape, (call, gm.graph)
    # A step of rounding apart at most; NaN is the lowest code.
    assert float((actual - expected).abs().max()) <= 0.0301, (call, gm.graph)
    return True

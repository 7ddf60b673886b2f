"""Graphs that write in place, made functional: they give the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule

from x86quant.errors import UnsupportedError
from x86quant.lowering.mutation import InPlaceTracer, OnCopy, without_mutations


def traced(model: nn.Module) -> GraphModule:
    return GraphModule(model, InPlaceTracer().trace(model))


class Function(nn.Module):
    """A function as a model, with a layer before it and a ReLU that works in place."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("state", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def clamp_statement(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y.clamp_(-0.1, 0.1)
    return m.linear(y)


def relu_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    F.relu(y, inplace=True)
    return y


def relu_in_place_by_position(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    F.relu(y, True)
    return y


def relu_module(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    m.relu(y)
    return y + 1


def relu_function(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    torch.relu_(y)
    return y


def masked_fill(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y.masked_fill_(y > 0.2, -1.0)
    return m.linear(y)


def chained(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y.mul_(2.0).add_(0.3)
    return y


def slice_of(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y[:, :4].mul_(0.0)
    return y


def other_name(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    z = y
    y += 1
    return z * y


def shifted(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y[:, :4].copy_(y[:, 4:])
    return y


def set_item(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y[:, 1] = x[:, 0]
    y[y > 0.5] = 0.5
    return y


def zero_and_fill(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, z = m.linear(x), m.linear(x) * 2
    y.zero_()
    z.fill_(3.0)
    return y + 1, z


def view_before(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    view = y.view(-1, 2, 4)
    y.add_(1.0)
    return view * 2


def written_through_view(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    other = y.t()
    y.view(-1, 2, 4)[:, 0].relu_()
    return other @ y


def chunk_written(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    a, b = y.chunk(2, 1)
    a.sigmoid_()
    return torch.cat([b, a], 1) + y


def base_written_after_chunk(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    a, b = y.chunk(2, 1)
    y.mul_(3.0)
    return a - b


def tuple_item(m: Any, x: torch.Tensor) -> torch.Tensor:
    found = torch.sort(m.linear(x), 1)
    found[0].mul_(2.0)
    return found[0] + found[1]


def to_out(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    torch.add(x, y, out=y)
    return y


def detached(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y.detach().clamp_(min=0)
    return y


def behind_data(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y.data.clamp_(min=0)
    return y


def accumulated(m: Any, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(3, 8)
    for _ in range(3):
        total += m.linear(x)
    total[:, 0] = 1
    return total


def sizes(m: Any, x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    n += 1
    return m.linear(x) * n


def input_written(m: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(2.0)
    return m.linear(x)


def used_before(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    before = y * 1.0
    y.neg_()
    return before + 2 * y


def alpha(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y.add_(x, alpha=2)
    y.sub_(x).div_(2).pow_(2).index_add_(1, torch.tensor([0, 1]), x[:, :2])
    return y


def diagonal(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)[:3, :3].contiguous()
    y.diagonal().fill_(0.0)
    return y


def integer(m: Any, x: torch.Tensor) -> torch.Tensor:
    index = (x > 0).long()
    index += 1
    index.clamp_(max=1)
    return index


def turned(m: Any, x: torch.Tensor) -> Any:
    y = m.linear(x)
    other = y[:, :3]
    y.t_()
    return y + 1, other, y.unsqueeze_(0), y


def unsqueezed_then_written(m: Any, x: torch.Tensor) -> Any:
    y = m.linear(x)
    part = y[1]
    same = y.clamp_(min=0.0)
    same.unsqueeze_(1)
    y.mul_(2.0)
    part.add_(1.0)
    return y, part, same.squeeze_(1) - 1, y


def out_of_another_shape(m: Any, x: torch.Tensor) -> Any:
    y = m.linear(x)
    z = y.relu_()
    w = z + 1
    torch.sum(w, 0, out=y)
    z.mul_(0.5)
    return y, w, z - w


def out_that_grows(m: Any, x: torch.Tensor) -> Any:
    y = m.linear(x)[:1].clone()
    torch.mul(x, x, out=y)
    return y.neg_() + x


WRITES = [
    clamp_statement, relu_in_place, relu_in_place_by_position, relu_module, relu_function,
    masked_fill, chained, slice_of, other_name, shifted, set_item, zero_and_fill, view_before,
    written_through_view, chunk_written, base_written_after_chunk, tuple_item, to_out, detached,
    behind_data, accumulated, sizes, input_written, used_before, alpha, diagonal,
    integer, turned, unsqueezed_then_written, out_of_another_shape, out_that_grows,
]  # fmt: skip


def is_functional(gm: GraphModule) -> bool:
    names = [
        str(getattr(n.target, "__name__", n.target)) for n in gm.graph.nodes if n.op != "get_attr"
    ]
    return not any(
        (name.endswith("_") and not name.endswith("__")) or name in ("setitem", "iadd")
        for name in names
    ) and not any(n.kwargs.get("inplace") or "out" in n.kwargs for n in gm.graph.nodes)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("function", WRITES, ids=lambda f: f.__name__)
def test_a_functional_graph_gives_what_the_model_does(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Function(function).eval()
    gm = without_mutations(traced(model), (torch.randn(3, 8),))
    assert is_functional(gm), gm.graph
    for seed in (1, 2):
        torch.manual_seed(seed)
        x = torch.randn(3, 8)
        with torch.no_grad():
            expected, given = model(x.clone()), x.clone()
            torch.testing.assert_close(gm(given), expected, rtol=0, atol=0)
        assert torch.equal(given, x), "inputs are left alone"


def test_plain_forms_are_used_where_there_are_any() -> None:
    for function in (clamp_statement, relu_module, chained, to_out, zero_and_fill, masked_fill):
        gm = without_mutations(traced(Function(function)), (torch.randn(3, 8),))
        assert not [m for m in gm.modules() if isinstance(m, OnCopy)], function.__name__


def test_the_model_and_its_graph_stay_as_they_are() -> None:
    model = Function(relu_module).eval()
    gm = traced(model)
    code = gm.code
    new = without_mutations(gm, (torch.randn(3, 8),))
    assert new is not gm
    assert gm.code == code
    assert model.relu.inplace
    assert gm.relu.inplace


def test_a_graph_without_writes_is_handed_back() -> None:
    gm = traced(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    assert without_mutations(gm, (torch.randn(3, 8),)) is gm


def test_other_shapes_work_too() -> None:
    for function in (slice_of, set_item, view_before, chunk_written):
        model = Function(function).eval()
        gm = without_mutations(traced(model), (torch.randn(3, 8),))
        x = torch.randn(5, 8)
        with torch.no_grad():
            torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def counter(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state.add_(1.0)
    return x + m.state


def memory(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state[:4].copy_(x[0, :4])
    return x + m.state


def state_written(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state.copy_(x[0])
    return x + m.state


def shape_set(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y.set_(x)
    return y


def shape_of_a_view(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    other = y[:1]
    torch.sum(x, 0, out=y)
    return y + other


def shape_in_a_tuple(m: Any, x: torch.Tensor) -> torch.Tensor:
    parts = m.linear(x).chunk(2, 1)
    parts[0].unsqueeze_(0)
    return parts[0] + parts[1]


def shape_of_state(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state.unsqueeze_(0)
    return x + m.state


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (counter, "its own parameters or buffers"),
        (memory, "its own '_view_of_state"),
        (state_written, "its own 'state'"),
        (shape_set, "changes the shape"),
        (shape_of_a_view, "memory getitem reads too"),
        (shape_in_a_tuple, "memory chunk reads too"),
        (shape_of_state, "its own"),
    ],
)
def test_what_has_no_functional_form_is_refused(function: Callable[..., Any], reason: str) -> None:
    model = Function(function)
    with pytest.raises(UnsupportedError, match=reason):
        without_mutations(traced(model), (torch.randn(3, 8),))


def test_a_batch_norm_in_training_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).train()
    with pytest.raises(UnsupportedError, match="parameters or buffers"):
        without_mutations(traced(model), (torch.randn(3, 8),))

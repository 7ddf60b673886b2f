"""Group and instance norms on codes: what the kernel gives is what the plain reference gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import x86quant
from tests.torch_threads import threads_of
from x86quant.calling.call import Call
from x86quant.lowering.graph_tools import is_op, op_name
from x86quant.quantization.static import part_search
from x86quant.quantization.tracing.tracing import Way, by_export, by_fx, trace

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def net(dims: int, channels: int, norm: nn.Module, then: nn.Module) -> nn.Module:
    """A norm between two convolutions."""
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    conv = CONVS[dims - 1]
    return nn.Sequential(conv(3, channels, 1), norm, then, conv(channels, 4, 1)).eval()


def ops(module: x86quant.CompiledModule) -> list[str]:
    """What the graph calls of ours."""
    return [op_name(node) for node in module.graph_module.graph.nodes if is_op(node)]


def quantized(model: nn.Module, shape: tuple[int, ...]) -> Any:
    """An int8 model of this model."""
    batches = [torch.randn(*shape) for _ in range(6)]
    return x86quant.quantize(model, batches, speed_check=False, progress=False)


@pytest.mark.parametrize(
    ("shape", "norm", "then"),
    [
        ((2, 3, 40), nn.GroupNorm(4, 24), nn.ReLU()),
        ((2, 3, 9, 11), nn.GroupNorm(1, 24), nn.SiLU()),
        ((1, 3, 9, 11), nn.GroupNorm(24, 24, affine=False), nn.Identity()),
        ((3, 3, 9, 11), nn.InstanceNorm2d(24, affine=True), nn.ReLU6()),
        ((1, 3, 4, 5, 6), nn.GroupNorm(3, 24, eps=0.1), nn.LeakyReLU(0.1)),
        ((1, 3, 40), nn.InstanceNorm1d(24), nn.ReLU()),
    ],
)
def test_a_norm_is_one_op_with_what_follows(
    shape: tuple[int, ...], norm: nn.Module, then: nn.Module
) -> None:
    torch.manual_seed(0)
    model = net(len(shape) - 2, 24, norm, then)
    module = quantized(model, shape)
    assert ops(module) == ["quantize", "conv", "group_norm", "conv_real"]
    assert not module.float_nodes
    assert "1" in module.quantization.int8_layers
    larger = (shape[0] + 1, 3, *(size + 3 for size in shape[2:]))
    for x in (torch.randn(*shape), torch.randn(*larger)):
        want, got = model(x), module(x)
        assert (want - got).square().mean() < 0.01 * want.square().mean()
        assert (got - module.graph_module(x)).abs().max() <= 0.05 * got.abs().max()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_kernel_gives_what_the_reference_gives(data: st.DataObject) -> None:
    """Any sizes: rows longer than a float32 adds up exactly, channels that fill no vector."""
    draw = data.draw
    groups = draw(st.integers(1, 5))
    channels = groups * draw(st.integers(1, 30))
    sizes = [draw(st.integers(1, 6)) for _ in range(draw(st.integers(0, 2)))]
    sizes.append(draw(st.sampled_from([1, 2, 17, 255, 256, 257, 600])))
    torch.manual_seed(draw(st.integers(0, 1000)))
    shape = (draw(st.integers(1, 3)), channels, *sizes)
    x = torch.full(shape, 255, dtype=torch.uint8)
    if varied := draw(st.integers(0, 4)):
        x = torch.randint(0, 256, shape, dtype=torch.uint8)
    affine = draw(st.booleans())
    given = {
        "groups": groups,
        "weight": torch.randn(channels) if affine else None,
        "bias": torch.randn(channels) if affine else None,
        "eps": draw(st.sampled_from([1e-5, 0.1])),
        "x_scale": 0.05,
        "x_zp": 3,
        "out_scale": 0.03,
        "out_zp": 120,
        "lo": draw(st.sampled_from([0, 120])),
        "hi": 255,
        "lut": torch.randperm(256).to(torch.uint8) if draw(st.booleans()) else None,
    }
    op = torch.ops.x86quant.group_norm.default
    got = run(op, given, x)
    if given["lut"] is not None:  # what is one step off is anywhere behind the table
        back = torch.empty(256, dtype=torch.uint8)
        back[given["lut"].long()] = torch.arange(256, dtype=torch.uint8)
        got = back[got.long()]
    steps = (op(x, **{**given, "lut": None}).int() - got.int()).abs()
    assert steps.max() <= 1
    if varied:  # where all codes are alike, all that is left of them is rounding
        assert (steps > 0).sum() <= max(3, 0.03 * steps.numel())


def run(op: Any, given: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """What the native form of a call of ``op`` gives."""
    graph, root = torch.fx.Graph(), nn.Module()
    codes = graph.placeholder("x")
    codes.meta |= {"shape": tuple(x.shape), "input_dtype": x.dtype}
    kwargs: dict[str, Any] = {"x": codes}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            root.register_buffer(name, value)
            kwargs[name] = graph.get_attr(name)
        else:
            kwargs[name] = value
    graph.output(graph.call_function(op, (), kwargs))
    module = x86quant.CompiledModule(torch.fx.GraphModule(root, graph))
    result: torch.Tensor = module(x)
    assert module.segments
    return result


def test_threads_give_the_same() -> None:
    torch.manual_seed(0)
    module = quantized(net(2, 64, nn.GroupNorm(8, 64), nn.ReLU()), (1, 3, 64, 64))
    for batch in (1, 5):
        x = torch.randn(batch, 3, 64, 64)
        with threads_of(1):
            alone = module(x)
        with threads_of(2):
            assert torch.equal(module(x), alone)


@pytest.mark.parametrize("way", [by_fx, by_export])
@pytest.mark.parametrize("affine", [False, True])
def test_instance_norms_are_group_norms_however_they_were_traced(
    way: Way, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_search, "WAYS", {"the way": way})
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=affine), nn.LeakyReLU(), nn.Conv2d(8, 4, 3)
    ).eval()
    data = [torch.randn(2, 3, 12, 12) for _ in range(3)]
    found = x86quant.quantize(model, data, speed_check=False, progress=False)
    compiled = found if isinstance(found, x86quant.CompiledModule) else found.compiled
    assert not [node for node in compiled.float_nodes if "instance" in node.op]
    exact = model(data[0])
    assert (found(data[0]) - exact).square().mean() < 0.01 * exact.square().mean()


@pytest.mark.parametrize("way", [by_fx, by_export])
def test_group_norms_and_softmax_are_traced_either_way(way: Way) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.softmax(self.norm(self.conv(x)), 1, dtype=torch.float64)
            return torch.ops.aten.elu(y, 1.5, 2.0, 0.5)

    model, x = Model().eval(), torch.randn(2, 3, 12, 12)
    traced = trace(model, Call((x,)), way)
    (result,) = traced.graph_module(x)
    assert result.dtype is torch.float64
    torch.testing.assert_close(result, model(x))

"""Layers that stay in float give what torch gives, whatever they look at and whatever follows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import x86quant
from tests import sanitized
from tests.torch_threads import threads_of
from x86quant.compiled.module import CompiledModule
from x86quant.lowering.graph_tools import add_constant, emit, is_op


def _layers(seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    """An int8 convolution, one to be kept in float, and mostly another int8 one."""
    draw = random.Random(seed)
    dims = draw.choice([1, 2, 2, 3])
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    channels = draw.choice([1, 3, 8, 17, 40])
    depthwise = draw.random() < 0.4
    kernel = [draw.choice([1, 1, 2, 3, 5]) for _ in range(dims)]
    if draw.random() < 0.2:
        kernel = [1] * dims
    stride = [draw.choice([1, 1, 2]) for _ in range(dims)]
    dilation = [draw.choice([1, 1, 2]) for _ in range(dims)]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    padding = [draw.randint(0, r // 2) for r in reach]
    outputs = channels if depthwise else draw.choice([1, 16, 24, 70])
    torch.manual_seed(seed)
    layers: list[nn.Module] = [
        conv(3, channels, 1),
        conv(channels, outputs, kernel, stride, padding, dilation,
             groups=channels if depthwise else 1, bias=draw.random() < 0.8),
        draw.choice([nn.Identity, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Tanh])(),
    ]  # fmt: skip
    if draw.random() < 0.7:
        layers.append(conv(outputs, 2, 1))
    sizes = [r + draw.choice([0, 3, 13]) for r in reach]
    sizes[-1] += draw.choice([0, 70])  # lines that are multiplied where they lie
    return nn.Sequential(*layers).eval(), torch.randn(draw.choice([1, 3]), 3, *sizes)


def _float_steps(part: CompiledModule) -> int:
    return sum(is_op(n, "float_conv", "float_conv_codes") for n in part.graph_module.graph.nodes)


@pytest.mark.filterwarnings("ignore")
def test_any_layer() -> None:
    seen = 0
    networks = 20 if sanitized.RUNNING else 60  # each takes seconds there
    for seed in range(networks):
        model, x = _layers(seed)
        made = x86quant.quantize(
            model, [(x,)], progress=False, speed_check=False, effort="fast", float_layers=["1"]
        )
        for part in (m for m in made.modules() if isinstance(m, CompiledModule)):
            seen += _float_steps(part)
            with torch.no_grad(), threads_of(1 + seed % 2):
                (wanted,) = torch.utils._pytree.tree_leaves(part.graph_module(x))
                found = made(x)
            # A code may round the other way where two sums differ in their last bit.
            close = torch.isclose(found, wanted, rtol=1e-4, atol=1e-4)
            assert close.float().mean() > 0.98, seed
            assert (found - wanted).abs().max() <= 0.05 * wanted.abs().max() + 1e-4, seed
    assert seen >= networks * 3 // 4


class _Spelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.kept, self.last = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 24, 1),
            nn.Conv2d(24, 4, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.kept(torch.relu(self.first(x)))
        x = x * (x + 3).clamp(0, 6) / 6 * 1.25 + 0.5
        return self.last(x)


def _kept(model: nn.Module, x: torch.Tensor) -> CompiledModule:
    made = x86quant.quantize(model.eval(), [(x,)], progress=False, speed_check=False, effort="fast",
                             float_layers=["kept"])  # fmt: skip
    assert isinstance(made, CompiledModule)
    return made


@pytest.mark.parametrize("threads", [1, 2])
def test_a_hard_swish_in_any_spelling_is_computed_with_it(threads: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 33, 35)
    made = _kept(_Spelled(), x)
    (node,) = made.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.x86quant.float_conv_codes.default
    )
    assert node.kwargs["functions"] == [
        "add", "least", "most", "times_x", "mul", "mul", "add"
    ]  # fmt: skip
    assert [f.layer for f in made.float_nodes] == ["kept"]
    with torch.no_grad(), threads_of(threads):
        (wanted,) = torch.utils._pytree.tree_leaves(made.graph_module(x))
        torch.testing.assert_close(made(x), wanted, rtol=0.02, atol=0.02)
    proof = x86quant.compute_ops(made, (x,))
    assert [one.layer for one in proof.int8] == ["first", "last"]
    assert [one.layer for one in proof.floats] == ["kept"]


class _Twice(nn.Module):
    """What others read is not computed away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kept = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.kept(self.first(x))
        y = torch.sigmoid(x)
        return y * x, x.cos() + y


def test_what_others_read_stays() -> None:
    torch.manual_seed(0)
    model, x = _Twice(), torch.randn(2, 3, 12, 13)
    made = _kept(model, x)
    with torch.no_grad():
        for found, wanted in zip(made(x), made.graph_module(x), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_saved_one_runs_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 33, 35)
    made = _kept(_Spelled(), x)
    path = tmp_path / "model.x86q"
    x86quant.save(made, path)
    with torch.no_grad():
        assert torch.equal(x86quant.load(path)(x), made(x))


def test_windows_that_lie_in_padding_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 20, 3, padding=(4, 1))).eval()
    x = torch.randn(2, 3, 5, 40)
    made = x86quant.quantize(model, [(x,)], progress=False, speed_check=False, effort="fast",
                             float_layers=["1"])  # fmt: skip
    assert isinstance(made, CompiledModule)
    assert _float_steps(made) == 1
    with torch.no_grad():
        (wanted,) = torch.utils._pytree.tree_leaves(made.graph_module(x))
        torch.testing.assert_close(made(x), wanted, rtol=1e-5, atol=1e-5)


def test_profile_and_report_say_that_it_is_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 33, 35)
    made = _kept(_Spelled(), x)
    steps = x86quant.profile(made, (x,), runs=1).steps
    assert [one.step.kind for one in steps if one.step.in_float] == ["conv (float)"]
    report = x86quant.report(made, tmp_path / "page.html", (x,), runs=1)
    assert [layer.layer for layer in report.layers if layer.in_float] == ["kept"]
    assert "1 of them float ops" in str(report)


@pytest.mark.filterwarnings("error::x86quant.errors.X86QuantWarning")
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("depthwise", [False, True])
def test_codes_that_are_joined_along_any_dimension(rank: int, depthwise: bool) -> None:
    """Written where they belong, or copied there."""
    torch.manual_seed(0)
    window: Any = {"stride": [1] * rank, "padding": [1] * rank, "dilation": [1] * rank}
    for dim in range(rank + 2):
        graph, root = Graph(), nn.Module()
        x, parts = graph.placeholder("x"), []
        for name in ("first", "second"):
            weight = torch.randn(16, 1 if depthwise else 16, *[3] * rank)
            parts.append(emit(
                graph, "float_conv_codes", x=x, weight=add_constant(root, graph, name, weight),
                bias=None, **window, groups=16 if depthwise else 1, functions=[], numbers=[],
                out_scale=0.1, out_zp=100,
            ))  # fmt: skip
        same = {"x_scales": [0.1] * 2, "x_zps": [100] * 2, "out_scale": 0.1, "out_zp": 100}
        graph.output((emit(graph, "cat", xs=parts, dim=dim, **same),))
        made = CompiledModule(GraphModule(root, graph))
        given = torch.randn(2, 16, *[6, 7, 30][-rank:])
        (wanted,), (found,) = made.graph_module(given), made(given)
        apart = (wanted.int() - found.int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 0.01

"""Every kernel of compiled models against the plain ops, on every shape it says it takes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule

import x86quant
from tests import isa
from tests.lowering.test_lowering import Convolutions
from tests.op_checks import OpCheck, check_ops
from tests.runtime.compiled_models import compiled
from x86quant.hardware.cpu import cpu
from x86quant.kernels import graph_kernels
from x86quant.lowering.graph_tools import attribute

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")

KERNELS = [name for name in graph_kernels() if name != "native"]  # native has tests of its own

SHAPES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1×1": (nn.Conv2d(16, 70, 1), (2, 16, 9, 7)),
    "1×1 s2": (nn.Conv2d(64, 64, 1, 2), (1, 64, 12, 9)),
    "3×3": (nn.Conv2d(8, 20, 3, padding=1), (2, 8, 9, 75)),
    "5×3 s2": (nn.Conv2d(12, 16, (5, 3), 2, (2, 0)), (1, 12, 11, 13)),
    "dilated": (nn.Conv2d(16, 16, 3, padding=2, dilation=2), (1, 16, 12, 12)),
    "no bias": (nn.Conv2d(8, 8, 3, bias=False), (1, 8, 6, 6)),
    "depthwise": (nn.Conv2d(32, 32, 3, padding=1, groups=32), (1, 32, 9, 9)),
    "depthwise 5×5": (nn.Conv2d(24, 24, 5, padding=2, groups=24), (1, 24, 9, 9)),
    "grouped": (nn.Conv2d(32, 32, 3, padding=1, groups=4), (1, 32, 9, 9)),
    "odd channels": (nn.Conv2d(3, 17, 7, 2, 3), (1, 3, 20, 20)),
    "3d": (nn.Conv3d(8, 8, 3, padding=1), (1, 8, 4, 6, 6)),
    "1d": (nn.Conv1d(8, 24, 5, padding=2), (2, 8, 30)),
    "linear": (nn.Linear(64, 37), (19, 64)),
    "one row": (nn.Linear(128, 64), (1, 128)),
}

ENDS: dict[str, list[nn.Module]] = {
    "plain": [],
    "relu": [nn.ReLU()],
    "relu6": [nn.ReLU6()],
    "table": [nn.Hardswish()],
}


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.relu(self.conv(x) + x)
        return y


class Joined(nn.Module):
    """Reads and writes parts of a concatenation: pixels that are not side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 12, 3, padding=1)
        self.again, self.last = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(20, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x), self.right(x)
        y: torch.Tensor = self.last(torch.cat([left, right], 1))
        return torch.cat([y, self.again(left)], 1)


def supported(kernel: str) -> None:
    missing = graph_kernels()[kernel].missing_features(cpu())
    if missing:
        pytest.skip(f"{kernel} needs {', '.join(missing)}")


def checks(kernel: str, model: nn.Module, shape: tuple[int, ...]) -> list[OpCheck]:
    """Of the layers, all held to ``kernel``.

    Weights that could saturate it are halved: its results count, not its refusal.
    """
    module = compiled(model, *shape).graph_module
    inputs = (torch.randn(shape) * 1.5,)
    try:
        found = held_to(kernel, module, inputs)
    except x86quant.UnsupportedError as error:
        if "nobody has seen" in str(error) and cpu().withheld:
            pytest.skip(f"{kernel} takes other ways on a CPU that is capped, which no one has seen")
        if "can saturate" not in str(error):
            raise
        halve_weights(module)
        found = held_to(kernel, module, inputs)
    layers = [check for check in found if check.op in ("conv", "linear")]
    assert {check.kernel for check in layers} == {kernel}
    return layers


def held_to(kernel: str, module: GraphModule, inputs: tuple[torch.Tensor, ...]) -> list[OpCheck]:
    with x86quant.override(kernel, caller="graph"):
        return check_ops(module, inputs)


def halve_weights(module: GraphModule) -> None:
    for node in module.graph.nodes:
        if "weight_scales" in node.kwargs:
            weight = attribute(module, str(node.kwargs["weight"].target))
            weight.copy_(weight // 2)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_graph_kernel_of_a_layer(kernel: str, shape: str, end: str) -> None:
    supported(kernel)
    layer, size = SHAPES[shape]
    (check,) = checks(kernel, Convolutions(layer, *ENDS[end]), size)
    assert check.steps <= 1, check


@pytest.mark.parametrize("kernel", KERNELS)
def test_graph_kernel_of_a_sum(kernel: str) -> None:
    supported(kernel)
    if kernel in ("fbgemm", "onednn"):
        with pytest.raises(x86quant.UnsupportedError, match="a sum behind the layer is not supp"):
            checks(kernel, Sum(), (2, 16, 9, 9))
        return
    (check,) = checks(kernel, Sum(), (2, 16, 9, 9))
    assert check.steps <= 1, check


@pytest.mark.parametrize("kernel", KERNELS)
def test_graph_kernel_of_slopes(kernel: str) -> None:
    supported(kernel)
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.PReLU(16), nn.Conv2d(16, 4, 1)).eval()
    x = torch.randn(2, 16, 9, 9)
    module = x86quant.quantize(model, [x], speed_check=False, progress=False).graph_module
    with pytest.raises(x86quant.UnsupportedError, match="slopes of channels behind the layer are"):
        held_to(kernel, module, (x,))


@pytest.mark.parametrize("kernel", KERNELS)
def test_graph_kernel_within_concatenations(kernel: str) -> None:
    supported(kernel)
    layers = checks(kernel, Joined(), (2, 8, 9, 9))
    assert [str(check) for check in layers if check.steps > 1] == []
    graph = compiled(Joined(), 2, 8, 9, 9).graph_module
    halve_weights(graph)
    x = torch.randn(2, 8, 9, 9)
    with x86quant.override(kernel, caller="graph"):
        module = x86quant.CompiledModule(graph, (), ())
        actual = module(x)
    assert float((actual - graph(x)).abs().mean()) < 0.01


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_graph_kernel_on_random_shapes(kernel: str, data: st.DataObject) -> None:
    supported(kernel)
    pick = data.draw
    groups = pick(st.sampled_from([1, 1, 1, 2, 8]))
    inputs, outputs = (groups * 4 * pick(st.integers(1, 20)) for _ in range(2))
    k = (pick(st.integers(1, 5)), pick(st.integers(1, 5)))
    conv = nn.Conv2d(
        inputs, outputs, k, pick(st.integers(1, 3)), (pick(st.integers(0, k[0] - 1)),
        pick(st.integers(0, k[1] - 1))), pick(st.integers(1, 2)), groups,
    )  # fmt: skip
    size = (pick(st.integers(1, 3)), inputs, pick(st.integers(9, 15)), pick(st.integers(9, 80)))
    try:
        (check,) = checks(kernel, Convolutions(conv), size)
    except x86quant.UnsupportedError as error:
        if f"{kernel}: erratum" not in str(error):
            raise
        reject()
    assert check.steps <= 1, check


@pytest.mark.parametrize("level", isa.LEVELS)
def test_graph_kernels_on_every_instruction_set(level: str) -> None:
    isa.skip_unless_lower(level)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command += ["-k", "graph_kernel_of or within"]
    done = subprocess.run(
        command, env=isa.environment(level), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("kernel", KERNELS)
def test_graph_kernel_of_a_weight_scale_of_zero(kernel: str) -> None:
    supported(kernel)
    conv = nn.Conv2d(16, 16, 1)
    with torch.no_grad():
        conv.weight[3] = 0
    module = compiled(Convolutions(conv), 1, 16, 4, 4).graph_module
    halve_weights(module)
    (node,) = (n for n in module.graph.nodes if "weight_scales" in n.kwargs)
    attribute(module, str(node.kwargs["weight_scales"].target))[3] = 0
    found = held_to(kernel, module, (torch.randn(1, 16, 4, 4),))
    assert [check for check in found if check.steps > 1] == []

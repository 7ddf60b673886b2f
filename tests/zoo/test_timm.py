"""Models of timm, whose code spells norms, weights, branches and masks in its own ways."""

from __future__ import annotations

import functools

import pytest
import torch

import x86quant
from x86quant.bench.subjects import subject
from x86quant.compiled.block_graphs import blocks_of
from x86quant.errors import InvalidInputError
from x86quant.torchvision_import import import_torchvision

import_torchvision()  # timm imports it
timm = pytest.importorskip("timm")

SIZE = 64
NETWORKS = ("tf_mobilenetv3_small_minimal_100", "skresnet18", "resnest14d")


@functools.cache
def images(size: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(n)) for n in range(3)
    )


def db(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(20 * torch.log10(exact.norm() / (found - exact).norm()))


@pytest.mark.parametrize("name", NETWORKS)
def test_convolutions_are_int8_from_end_to_end(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=10).eval()
    found = x86quant.quantize(model, images(SIZE), effort="fast", speed_check=False)
    compiled = found if isinstance(found, x86quant.CompiledModule) else found.compiled
    # Attention of a few numbers is all that may be left.
    left = {node.op.partition(".")[0] for node in compiled.float_nodes}
    assert left <= {"softmax", "reshape", "view", "transpose", "chunk", "select", "getitem"}
    assert not found.quantization.float_layers
    assert min(found.quantization.sqnr_db) > 15


def test_shifted_windows_are_attentions_of_rows_for_any_number_of_images() -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", pretrained=False, depths=(2,), embed_dim=96,
        num_heads=(3,), img_size=56, num_classes=10,
    ).eval()  # fmt: skip
    found = x86quant.quantize(model, images(56), fuse_blocks=True, speed_check=False)
    graphs = [one for m in found.modules() if (one := blocks_of(m)) is not None]
    assert graphs
    for count in (1, 2, 3):
        x = images(56)[0][:1].repeat(count, 1, 1, 1)
        with torch.no_grad():
            assert db(found(x), model(x)) > 20
    ops = [
        str(node.target)
        for one in graphs
        for graph in one.graphs
        for node in graph.compiled.graph_module.graph.nodes
    ]
    assert sum("attention_rows" in op for op in ops) == 2
    assert not any("softmax" in op for op in ops)


def test_they_are_measured_by_name() -> None:
    assert subject("timm:lcnet_050").shapes == "1×3×224×224"
    assert subject("timm:lcnet_050").model()(images(SIZE)[0]).shape == (2, 1000)
    with pytest.raises(InvalidInputError, match=r"did you mean .*timm:lcnet_050"):
        subject("timm:lcnet_05")

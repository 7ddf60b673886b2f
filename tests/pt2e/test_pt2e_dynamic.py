"""PT2E with ranges chosen at run time becomes dynamic int8 linears."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import x86quant

pytest.importorskip("torchao")


def noise(exact: torch.Tensor, found: torch.Tensor) -> float:
    return float(10 * torch.log10(exact.square().mean() / (exact - found).square().mean()))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_is_dynamic(tmp_path: Path) -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32, bias=False)).eval()
    x = torch.randn(8, 64)
    quantizer = X86InductorQuantizer().set_global(
        get_default_x86_inductor_quantization_config(is_dynamic=True)
    )
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    converted = convert_pt2e(prepared)
    ours = x86quant.compile(converted, (x,))
    assert not ours.float_nodes
    assert noise(converted(x), ours(x)) > 35
    assert noise(model(x), ours(x)) > 40
    x86quant.save(ours, tmp_path / "net.x86q")
    assert torch.equal(x86quant.load(tmp_path / "net.x86q")(x), ours(x))

"""Int8 models of every kind under ``torch.compile``: one graph, the same values, compiled once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.errors import InvalidInputError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(8, 4)).eval()


def fused(model: nn.Module, x: torch.Tensor) -> nn.Module:
    options: dict[str, Any] = {"speed_check": False, "mode": "dynamic", "fuse_blocks": True}
    return x86quant.quantize(model, [x, x + 0.1], **options)


ROWS, IMAGE = torch.linspace(-2, 2, 2 * 5 * 64).sin().reshape(2, 5, 64), torch.rand(2, 3, 8, 8)

FORMS = {
    "to_dynamic": lambda: (x86quant.to_dynamic(encoder()), ROWS),
    "4 bits": lambda: (x86quant.to_dynamic(encoder(), weight_bits=4), ROWS),
    "weights only": lambda: (x86quant.to_dynamic(encoder(), weight_only=True), ROWS),
    "static": lambda: (x86quant.quantize(convolutions(), [IMAGE], speed_check=False), IMAGE),
    "fused": lambda: (fused(encoder(), ROWS), ROWS),
    "a part": lambda: (nn.Sequential(fused(encoder(), ROWS), nn.Tanh()), ROWS),
}


@torch.no_grad()
@pytest.mark.parametrize("backend", ["inductor", "x86quant"])
@pytest.mark.parametrize("form", FORMS)
def test_one_graph_with_the_same_values(form: str, backend: str) -> None:
    model, x = FORMS[form]()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            exact, found = model(x), compiled(x)
            assert found.stride() == exact.stride()
            # What Inductor computes in between may fall to the next code.
            off = (exact - found).square().mean() / exact.square().mean()
            assert float(off) < (1e-4 if backend == "inductor" else 1e-9)


@torch.no_grad()
def test_fused_graphs_stay_native() -> None:
    model, x = FORMS["fused"]()
    seen: list[str] = []

    def backend(gm: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm

    torch.compile(model, backend=backend, fullgraph=True)(x)
    assert sum("run_compiled" in name for name in seen) >= 1
    assert not [name for name in seen if "linear" in name or "attention" in name]


@torch.no_grad()
def test_changes_behind_a_fused_graph_are_refused() -> None:
    model, x = FORMS["fused"]()
    compiled = torch.compile(model, backend="x86quant", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    twin = copy.deepcopy(model)
    assert torch.equal(torch.compile(twin, backend="x86quant")(x), model(x))
    model.layers[0].linear1.weight_scale.mul_(2)
    with (
        pytest.warns(x86quant.X86QuantWarning, match="was changed after it was quantized"),
        pytest.raises(InvalidInputError, match=r"was changed after torch\.compile"),
    ):
        compiled(x)
    torch._dynamo.reset()
    assert torch.allclose(compiled(x), model(x), atol=1e-5)
    assert not torch.allclose(compiled(x), twin(x), atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("form", ["to_dynamic", "static"])
def test_exported_programs_have_the_values(form: str) -> None:
    model, x = FORMS[form]()
    exported = torch.export.export(model, (x,)).module()
    off = (exported(x) - model(x)).square().mean() / model(x).square().mean()
    assert float(off) < 1e-9


@torch.no_grad()
def test_a_model_with_fused_blocks_says_that_it_cannot_be_exported() -> None:
    model, x = FORMS["fused"]()
    with pytest.raises(AttributeError, match="fused blocks cannot be exported: export what"):
        torch.export.export(model, (x,))


@torch.no_grad()
def test_packages_of_aot_inductor_have_the_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = x86quant.to_dynamic(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)).eval())
    x = torch.randn(3, 16)
    path = torch._inductor.aoti_compile_and_package(
        torch.export.export(model, (x,)), package_path=str(tmp_path / "net.pt2")
    )
    assert torch.allclose(torch._inductor.aoti_load_package(path)(x), model(x), atol=1e-5)

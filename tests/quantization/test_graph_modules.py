"""Models that are graphs already: what torch.fx traced and what torch.export exported."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import x86quant
from tests.quantization.any_model import sqnr
from x86quant.calling.call import Call
from x86quant.compiled import CompiledModule
from x86quant.compiled.baked import Aside
from x86quant.errors import InvalidInputError
from x86quant.module_copy import alike
from x86quant.quantization.tracing.tracing import by_export, trace
from x86quant.torchvision_import import import_torchvision

NET = nn.Sequential(
    nn.Conv2d(3, 16, 3),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Dropout(),
    nn.Conv2d(16, 16, 3, stride=2, groups=4),
    nn.ReLU6(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 10),
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return NET.eval()


def images(batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 3, 16, 16)


def exported(free: bool = True) -> Any:
    shapes = ({0: Dim.DYNAMIC},) if free else None
    return torch.export.export(net(), (images(),), dynamic_shapes=shapes)


ARRIVALS = {
    "fx": lambda: torch.fx.symbolic_trace(net()),
    "program": exported,
    "module": lambda: exported().module(),
    "module without checks": lambda: exported().module(check_guards=False),
}


def quantized(model: Any, **options: Any) -> Any:
    batches = [images() for _ in range(4)]
    return x86quant.quantize(model, batches, speed_check=False, progress=False, **options)


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_a_graph_is_quantized_as_the_module_that_it_was_made_of(
    arrival: str, tmp_path: Path
) -> None:
    result = quantized(ARRIVALS[arrival]())
    assert set(result.quantization.traced_by) == {""}, "one graph"
    assert len(result.quantization.int8_layers) == 4
    x = images(7)
    expected = net()(x)
    assert sqnr(expected, result(x)) > 25
    path = tmp_path / "graph.x86q"
    x86quant.save(result, path)
    assert torch.equal(x86quant.load(path)(x), result(x))


def test_layers_of_a_program_have_their_names() -> None:
    layers = quantized(exported(), float_layers=["8"]).quantization.int8_layers
    assert {"0", "4"} < {*layers}
    assert "8" not in layers


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_program_of_fixed_sizes_stays_one(mode: Any) -> None:
    result = quantized(exported(free=False).module(), mode=mode)
    x = images()
    assert sqnr(net()(x), result(x)) > 25
    with pytest.raises(InvalidInputError, match=r"size|dimension"):
        result(images(7))


class Tied(nn.Module):
    """Calls one layer twice, and takes a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.a = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.a(torch.relu(self.a(self.words(ids))))
        return {"out": self.norm(x) * scale}


def test_a_program_with_keywords_and_nested_results() -> None:
    model = Tied().eval()

    def call() -> dict[str, torch.Tensor]:
        return {"ids": torch.randint(20, (4, 6)), "scale": torch.rand(4, 1, 1) + 1}

    program = torch.export.export(
        model, (), call(), dynamic_shapes={"ids": {0: Dim.AUTO}, "scale": {0: Dim.AUTO}}
    )
    for mode in ("static", "dynamic"):
        result = x86quant.quantize(
            program, [call() for _ in range(4)], mode=mode, speed_check=False, progress=False
        )
        given = call()
        assert sqnr(model(**given)["out"], result(**given)["out"]) > 20
        assert "a" in str(result.quantization.int8_layers)


class Branching(nn.Module):
    """Batch norms and dropouts behind convolutions, in code that torch.fx cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding="same"), nn.BatchNorm2d(8)
        self.inner = nn.Sequential(
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(inplace=True),
            nn.Dropout2d(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x))
        return self.inner(x * 2 if x.shape[2] > 5 else x)


def test_batch_norms_and_dropouts_go_where_export_traced() -> None:
    model = Branching().eval()
    traced = trace(model, Call((torch.randn(4, 3, 16, 16),)), by_export)
    called = [node.target for node in traced.graph_module.graph.nodes if node.op == "call_module"]
    assert called == ["a", "inner.0"]
    others = " ".join(node.name for node in traced.graph_module.graph.nodes)
    assert "batch_norm" not in others
    assert "dropout" not in others
    x = torch.randn(2, 3, 9, 9)
    torch.testing.assert_close(traced(x), model(x))


def test_feature_extractors_of_torchvision_are_quantized_in_the_mode_they_are_in() -> None:
    """Their copies begin to train, with another graph and norms that change at each call."""
    import_torchvision()
    from torchvision.models.feature_extraction import create_feature_extractor

    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)),
    )
    model = create_feature_extractor(body.eval(), {"0": "first", "1": "last"})
    result = x86quant.quantize(
        model, [images() for _ in range(4)], speed_check=False, progress=False
    )
    assert isinstance(result, CompiledModule)
    x = images()
    exact, found = model(x), result(x)
    assert found.keys() == exact.keys()
    assert all(sqnr(exact[name], found[name]) > 25 for name in exact)
    guarded = Aside(model)  # as a model that holds the float one for other calls
    assert not any(module.training for module in copy.deepcopy(guarded).module.modules())
    model.train()
    model.get_submodule("1.1").eval()
    copied = alike(model)
    modes = {name: module.training for name, module in model.named_modules()}
    assert {name: module.training for name, module in copied.named_modules()} == modes
    assert copied.graph is copied.train_graph
    assert alike(model.eval()).code == model.code


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_of_a_graph_module_are_kept(inside: bool) -> None:
    """Its copies lose them."""
    net = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval())
    net.register_forward_hook(lambda module, given, result: 2 * result)
    model: nn.Module = _Around(net).eval() if inside else net
    result = x86quant.quantize(model, [images()], speed_check=False, progress=False)
    x = images()
    assert sqnr(model(x), result(x)) > 25


class _Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.inner(x))
        return found

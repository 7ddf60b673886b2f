"""What a compiled model answers in place of the float model that it stands for."""

from __future__ import annotations

import copy
import pickle
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import x86quant
from tests.quantization.any_model import sqnr
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.compiled.watch import _plain_values, _private_values
from x86quant.errors import UnsupportedError, X86QuantWarning
from x86quant.given_model import form_of


class Net(nn.Module):
    """A small classifier with attributes and methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.fc = nn.Linear(16, 4)
        self.classes = 4
        self._gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.relu(self.conv(x)).mean((2, 3))) * self._gain

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).argmax(1)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


class Branches(Net):
    """Takes sizes that its graph does not hold for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.shape[2] < 30 else x[:, :, :20])


def images(count: int = 2, size: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, size, size)


def quantized(model: nn.Module) -> Any:
    batches = [images() for _ in range(3)]
    return x86quant.quantize(model.eval(), batches, speed_check=False, progress=False)


@pytest.fixture(scope="module", params=[Net, Branches])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = request.param().eval()
    result = quantized(model)
    assert type(result) is (CompiledModule if request.param is Net else GuardedModule)
    return model, result


def test_its_parameters_tell_type_and_device(pair: tuple[Any, Any]) -> None:
    first = next(pair[1].parameters())
    assert (first.dtype, first.device.type) == (torch.float32, "cpu")
    assert not first.requires_grad


def test_it_has_the_attributes_of_the_model(pair: tuple[Any, Any]) -> None:
    for one in (pair[1], copy.deepcopy(pair[1])):
        assert one.classes == 4
        assert one.fc.in_features == 16
        assert tuple(one.conv.weight.shape) == (16, 3, 3, 3)
        assert not hasattr(one, "nothing")
    assert isinstance(pair[1].float_nodes, tuple)


def test_its_methods_call_it_and_not_the_float_model(pair: tuple[Any, Any]) -> None:
    x = images()
    seen: list[Any] = []
    handle = pair[1].register_forward_hook(lambda *_: seen.append(1))
    try:
        assert torch.equal(pair[1].predict(x), pair[1](x).argmax(1))
    finally:
        handle.remove()
    assert len(seen) == 2


def test_layers_whose_weights_are_gone_compute_nothing() -> None:
    with pytest.raises(UnsupportedError, match="in the int8 graph"):
        quantized(Net()).features(images())


def test_a_private_attribute_that_has_no_effect_is_told_of(pair: tuple[Any, Any]) -> None:
    result = copy.deepcopy(pair[1])
    with pytest.warns(X86QuantWarning, match="_gain has no effect"):
        result._gain = 5


def test_make_fx_records_what_it_computes(pair: tuple[Any, Any]) -> None:
    x, other = images(), images()
    result = pair[1]
    result(x)
    traced = make_fx(result)(x)
    assert sqnr(result(other), traced(other)) > 40
    assert sqnr(pair[0](other), traced(other)) > 20


def test_tables_in_int8_are_no_float_model() -> None:
    bags = nn.Sequential(nn.EmbeddingBag(500, 64, mode="sum"), nn.Linear(64, 64)).eval()
    assert form_of(bags) == "float"
    ids = [torch.randint(500, (4, 6)) for _ in range(3)]
    result = x86quant.quantize(
        bags, ids, mode="dynamic", embedding_bits=8, speed_check=False, progress=False
    )
    assert form_of(result[:1]) == "compiled"


class Block(nn.Module):
    """Reads numbers from several places."""

    def __init__(self) -> None:
        super().__init__()
        self._scale = 1.0
        self.scale = 1.0
        self.options = types.SimpleNamespace(scale=1.0)
        self.cfg = types.SimpleNamespace(scale=1.0)
        self.norm = nn.LayerNorm(64)
        self.a, self.b, self.act = nn.Linear(64, 256), nn.Linear(256, 64), nn.GELU()
        self._calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._calls = 1
        y = self.b(self.act(self.a(self.norm(x))))
        return x + y * self._scale * self.scale * self.options.scale * self.cfg.scale


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(scale=1.0)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.config.scale


CHANGES = {
    "private": lambda m: setattr(m.blocks[0], "_scale", 5.0),
    "public": lambda m: setattr(m.blocks[0], "scale", 5.0),
    "namespace": lambda m: setattr(m.blocks[0].options, "scale", 5.0),
    "inner configuration": lambda m: setattr(m.blocks[1].cfg, "scale", 5.0),
    "configuration": lambda m: setattr(m.config, "scale", 5.0),
}


def fused() -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Blocks().eval(), torch.randn(4, 16, 64)
    result = x86quant.quantize(
        model, [x, x / 2], mode="dynamic", fuse_blocks=True, speed_check=False, progress=False
    )
    assert any("fused" in note for note in result.quantization.notes)
    result(x)
    return model, result, x


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("copies", [False, True])
def test_fused_graphs_go_once_an_attribute_changes(change: str, copies: bool) -> None:
    model, result, x = fused()
    result = copy.deepcopy(result) if copies else result
    CHANGES[change](model)
    CHANGES[change](result)
    with pytest.warns(X86QuantWarning, match="was changed after it was quantized"):
        assert sqnr(model(x), result(x)) > 25


def test_what_the_code_itself_writes_costs_no_graph() -> None:
    _, result, x = fused()
    for block in result.blocks:
        block._calls = 0
    result.forward._watch.accept_caches()
    handle = result.blocks[0].a.register_forward_hook(lambda *_: None)
    result(x)  # by the code, for the hook's sake
    handle.remove()
    assert result.blocks[0]._calls == 1
    assert result.forward.current()


class Writes(nn.Module):
    """Writes to a part of what it has computed, and makes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y[:, :4] = 0
        return self.b(y) + torch.zeros(x.shape[0], 1, 1, 1)


def test_graphs_that_write_to_slices_can_be_pickled(tmp_path: Path) -> None:
    result, x = quantized(Writes()), images()
    assert torch.equal(pickle.loads(pickle.dumps(result))(x), result(x))
    torch.save(result, tmp_path / "net.pt")
    assert torch.equal(torch.load(tmp_path / "net.pt", weights_only=False)(x), result(x))


def test_tensors_of_the_model_are_not_answered_for() -> None:
    """Their values are gone: who reads them gets the float layer, behind a guard."""
    result = quantized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    assert type(result) is CompiledModule
    layer = quantized(nn.Conv2d(3, 8, 3))
    assert layer.stride == (1, 1)
    assert not hasattr(layer, "weight")


def test_a_call_in_float_changes_nothing_that_fused_graphs_watch() -> None:
    """Its count was a public attribute, and one such call cost all graphs around the module."""
    result = quantized(Branches())
    before = _plain_values(result), _private_values(result)
    with pytest.warns(X86QuantWarning, match="runs in float"):
        result(images(size=40))
    assert result.outside == 1
    assert (_plain_values(result), _private_values(result)) == before


class _Counts(nn.Module):
    """It is no graph, as it counts its calls, and reads an attribute of a part that is one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = Net(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.body(x) * self.body.classes
        return found


@pytest.mark.filterwarnings("ignore:the file holds the layers:UserWarning")
def test_a_part_from_a_file_has_the_attributes_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = [torch.randn(2, 3, 8, 8) for _ in range(2)]
    model = x86quant.quantize(_Counts().eval(), images, speed_check=False, progress=False)
    assert isinstance(model.body, CompiledModule)
    path = tmp_path / "counts.x86q"
    x86quant.save(model, path)
    loaded = x86quant.load(path, model=_Counts().eval())
    assert torch.equal(loaded(images[0]), model(images[0]))
    x86quant.save(loaded, path)
    again = x86quant.load(path, model=loaded)
    assert torch.equal(again(images[0]), model(images[0]))

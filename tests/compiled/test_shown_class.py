"""Code that asks for the class of its own layers is answered by int8 parts as by the layers."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import x86quant
from x86quant.compiled import CompiledModule, GuardedModule


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Scaled(Block):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = super().forward(x)
        return y if scale is None else y * scale


class Keeping(Block):
    """One that has more to save than tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"kept": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"kept": 1}


class Network(nn.Module):
    """Calls its layers by their classes; that it asks for values keeps it from being one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(8), Scaled(8), Block(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.full((1, 8, 1, 1), 0.5)
        for layer in self.layers:
            if isinstance(layer, Scaled):
                x = layer(x, scale=scale)
            elif isinstance(layer, Block):
                x = layer(x)
            else:
                raise TypeError(f"no layer of this network: {type(layer)}")
            if float(x.abs().sum()) < 0:
                x = -x
        return x


@pytest.fixture(scope="module")
def calls() -> list[torch.Tensor]:
    return [torch.randn(2, 8, 12, 12, generator=torch.manual_seed(i)) for i in range(3)]


@pytest.fixture(scope="module")
def int8(calls: list[torch.Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return x86quant.quantize(Network().eval(), calls, progress=False, speed_check=False)


def test_all_layers_are_int8(int8: nn.Module, calls: list[torch.Tensor]) -> None:
    torch.manual_seed(0)
    model = Network().eval()
    parts = [int8.get_submodule(f"layers.{i}") for i in range(3)]
    assert {type(part) for part in parts} <= {CompiledModule, GuardedModule}
    assert [part.__class__ for part in parts] == [Block, Scaled, Block]
    assert isinstance(parts[0], CompiledModule | GuardedModule)
    with torch.no_grad():
        expected = model(calls[0])
        assert (int8(calls[0]) - expected).norm() < 0.05 * expected.norm()


def test_it_is_called_what_it_is(int8: nn.Module) -> None:
    part = int8.get_submodule("layers.0")
    assert repr(part).startswith(type(part).__name__ + "(")
    assert {"forward", "float_nodes"} <= {*dir(part)}


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies(copied, int8: nn.Module, calls: list[torch.Tensor]) -> None:
    again = copied(int8)
    assert isinstance(again.get_submodule("layers.1"), Scaled)
    assert torch.equal(again(calls[0]), int8(calls[0]))


def test_parts_copied_alone(int8: nn.Module, calls: list[torch.Tensor]) -> None:
    part = int8.get_submodule("layers.0")
    for again in (copy.deepcopy(part), copy.copy(part), pickle.loads(pickle.dumps(part))):
        assert type(again) is type(part)
        assert isinstance(again, Block)
        assert torch.equal(again(calls[0]), part(calls[0]))


def test_a_pickle_of_a_part_needs_no_class(
    int8: nn.Module, calls: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = int8.get_submodule("layers.0")
    said = pickle.dumps(part)
    monkeypatch.delitem(globals(), "Block")
    again = pickle.loads(said)
    assert again.__class__ is type(part)
    assert torch.equal(again(calls[0]), part(calls[0]))


def test_files(int8: nn.Module, calls: list[torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "network.x86q"
    with pytest.warns(x86quant.X86QuantWarning, match="load it with"):
        x86quant.save(int8, path)
    again = x86quant.load(path, model=Network().eval())
    assert isinstance(again.get_submodule("layers.1"), Scaled)
    assert torch.equal(again(calls[0]), int8(calls[0]))


def test_torchs_own_classes_are_not_shown(calls: list[torch.Tensor]) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.body(x)
            return -y if float(y.sum()) < 0 else y

    int8 = x86quant.quantize(Rows().eval(), calls, progress=False, speed_check=False)
    assert not isinstance(int8.body, nn.Sequential)


def test_a_class_with_a_state_of_its_own_is_not_shown(calls: list[torch.Tensor]) -> None:
    model = Network().eval()
    model.layers[0] = Keeping(8).eval()
    with pytest.warns(x86quant.X86QuantWarning):
        int8 = x86quant.quantize(model, calls, progress=False, speed_check=False)
    int8.load_state_dict(int8.state_dict())


def test_compiled_by_torch(int8: nn.Module, calls: list[torch.Tensor]) -> None:
    torch.compiler.reset()
    assert torch.equal(torch.compile(int8, backend="eager")(calls[0]), int8(calls[0]))

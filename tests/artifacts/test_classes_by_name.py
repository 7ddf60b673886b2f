"""Results and arguments of classes that a file knows by name and fields alone."""

from __future__ import annotations

import dataclasses
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.artifacts.own_classes import ByWay, Objects, Way, loaded_from
from x86quant.artifacts.records.calls import read_structure
from x86quant.artifacts.writer import to_bytes
from x86quant.compiled import GuardedModule
from x86quant.errors import ArtifactError, InvalidInputError, X86QuantWarning


def test_results_with_named_fields_keep_their_names() -> None:
    model = x86quant.to_dynamic(Objects().eval())
    x = torch.randn(3, 8)
    expected, found = model(x), loaded_from(to_bytes(model, (x,)))(x)
    assert torch.equal(found.left, expected.left)
    assert torch.equal(found[1].out, expected[1].out)
    assert type(found).__name__ == "Pair"


@dataclasses.dataclass
class Sampled(OrderedDict[str, Any]):
    """A result that is read by name, by key and by number: so are those of diffusers."""

    sample: torch.Tensor
    noise: torch.Tensor | None = None
    scale: float = 2.0

    def __post_init__(self) -> None:
        self.update({k: v for k, v in vars(self).items() if v is not None})

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 1)

    def forward(self, x: torch.Tensor) -> Sampled:
        return Sampled(self.last(F.silu(self.first(x))))


def test_results_that_are_dicts_with_fields_are_those_of_one_graph() -> None:
    batches = [torch.randn(2, 3, 12, 12) for _ in range(3)]
    int8 = x86quant.quantize(Denoiser(), batches, progress=False, speed_check=False)
    x = torch.randn(1, 3, 12, 12)
    expected = int8(x)
    assert type(expected) is Sampled
    assert not any("cannot be one graph" in note for note in int8.quantization.notes)
    loaded = loaded_from(to_bytes(int8, None))
    for found in (loaded(x), pickle.loads(pickle.dumps(loaded))(x)):
        assert type(found).__name__ == "Sampled"
        for value in (found.sample, found["sample"], found[0], found.to_tuple()[0]):
            assert torch.equal(value, expected.sample)
        assert found.noise is None
        assert (list(found), found.scale) == (["sample", "scale"], 2.0)


def test_members_of_enumerations_are_constants() -> None:
    model = ByWay().eval()
    batches = [{"x": torch.randn(4, 8), "way": Way.ONE} for _ in range(3)]
    fast = x86quant.quantize(model, batches, progress=False, speed_check=False)
    assert isinstance(fast, GuardedModule)
    x = torch.randn(5, 8)
    with pytest.warns(X86QuantWarning, match="not those that were given"):
        assert torch.equal(fast(x, Way.OTHER), model(x, Way.OTHER))
    loaded = loaded_from(to_bytes(fast, None))
    for found in (loaded(x), loaded(x, Way.ONE), loaded(x, way=Way.ONE)):
        assert torch.equal(found, fast(x))
    with pytest.raises(InvalidInputError, match=r"way was Way\.ONE, and is Way\.OTHER"):
        loaded(x, Way.OTHER)


@pytest.mark.parametrize("way", Way)
def test_a_dynamic_model_is_saved_with_the_member_it_was_called_with(way: Way) -> None:
    model = x86quant.to_dynamic(ByWay().eval())
    x = torch.randn(3, 8)
    loaded = loaded_from(to_bytes(model, (x, way)))
    assert torch.equal(loaded(x, way), model(x, way))
    with pytest.raises(InvalidInputError, match=f"way was {way}, and is"):
        loaded(x, *(other for other in Way if other is not way))


@pytest.mark.parametrize(
    ("name", "fields"),
    [("Way", {"name": "__class__"}), ("a b", {"name": "ONE"}), ("Way", {"name": 1}), ("Way", {})],
)
def test_no_other_members_are_read(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match=r"no member|no class"):
        read_structure({"named": ["enum", name, fields]})


@pytest.mark.parametrize("name", ["PackedSequence_", "Other"])
def test_a_packed_sequence_is_one_or_refused(name: str) -> None:
    fields = dict.fromkeys(nn.utils.rnn.PackedSequence._fields)
    read_structure({"named": ["packed", "PackedSequence", fields]})
    with pytest.raises(ArtifactError):
        read_structure({"named": ["packed", name, fields]})
    with pytest.raises(ArtifactError):
        read_structure({"named": ["packed", "PackedSequence", {"data": None}]})

"""A graph out of a file: one that every tool takes, and that answers no call it is not for."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.artifacts.own_classes import ByWay, Objects, Way, loaded_from
from tests.artifacts.test_artifact_forms import assert_same, encoder, guarded
from x86quant.artifacts.writer import to_bytes
from x86quant.errors import InvalidInputError


@pytest.fixture(scope="module")
def saved() -> tuple[nn.Module, dict[str, torch.Tensor], bytes]:
    model, call = encoder()
    quantized = x86quant.quantize(model, [call, call], progress=False, speed_check=False)
    return quantized, call, to_bytes(quantized)


def test_a_loaded_graph_is_explained_exported_pickled_and_takes_narrow_ids(
    saved: tuple[nn.Module, dict[str, torch.Tensor], bytes], tmp_path: Path
) -> None:
    """What stands behind a signature of its own is one graph to every tool."""
    _, call, data = saved
    loaded = loaded_from(data)
    expected = loaded(**call)
    assert_same(loaded(call["ids"].int(), mask=call["mask"]), expected)
    assert_same(pickle.loads(pickle.dumps(loaded))(**call), expected)
    assert_same(copy.deepcopy(loaded)(**call), expected)
    assert list(inspect.signature(loaded).parameters) == ["ids", "mask", "scale"]
    assert len(x86quant.explain(loaded, (call["ids"],), kwargs={"mask": call["mask"]})) > 3
    assert "head" in {choice.layer for choice in x86quant.explain(loaded)}
    assert "linear" in str(x86quant.profile(loaded, (call["ids"],), kwargs={"mask": call["mask"]}))
    with pytest.raises(InvalidInputError, match="mask was a tensor"):
        x86quant.explain(loaded, (call["ids"],))


def test_a_guarded_model_becomes_a_program_file(tmp_path: Path) -> None:
    model = guarded()
    x = torch.randn(2, 3, 8, 8)
    x86quant.export_program(model, tmp_path / "a.xq", [x])
    x86quant.export_program(loaded_from(to_bytes(model)), tmp_path / "b.xq", [{"x": x}])
    assert (tmp_path / "a.xq").read_bytes() == (tmp_path / "b.xq").read_bytes()
    with pytest.raises(InvalidInputError, match="3 dimensions, not 4"):
        x86quant.export_program(model, tmp_path / "a.xq", [x[0]])


def test_named_results_survive_pickle() -> None:
    model, x = x86quant.to_dynamic(Objects().eval()), torch.randn(3, 8)
    loaded = loaded_from(to_bytes(model, (x,)))
    assert torch.equal(pickle.loads(pickle.dumps(loaded))(x).left, loaded(x).left)
    by_way = loaded_from(to_bytes(x86quant.to_dynamic(ByWay().eval()), (x, Way.OTHER)))
    assert torch.equal(pickle.loads(pickle.dumps(by_way))(x, Way.OTHER), by_way(x, Way.OTHER))


class OddDefault(nn.Module):
    """A function is a default; no graph and no file can hold one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(
        self,
        x: torch.Tensor,
        act: Callable[[torch.Tensor], torch.Tensor] | None = F.relu,
        scale: float = 1.0,
    ) -> torch.Tensor:
        y = self.a(x) * scale
        return self.b(y if act is None else act(y))


@pytest.mark.parametrize("mode", ["static", "dynamic"])
@pytest.mark.parametrize("given", [{}, {"act": None}])
def test_a_default_that_no_file_holds(mode: Any, given: dict[str, Any]) -> None:
    """The graph is for the default or for what was given, and takes nothing else for it."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    call = {"x": x, **given}
    int8 = x86quant.quantize(
        OddDefault().eval(), [call, call], mode=mode, progress=False, speed_check=False
    )
    loaded = loaded_from(to_bytes(int8, call))
    assert torch.equal(loaded(**call), int8(**call))
    assert torch.equal(loaded(**call, scale=1.0), int8(**call))
    for other in (F.gelu, None if not given else F.relu):
        with pytest.raises(InvalidInputError, match="act"):
            loaded(x, act=other)
    with pytest.raises(InvalidInputError, match="does not hold for this call"):
        loaded(x, 1.0)  # in the place of the function
    if given:
        with pytest.raises(InvalidInputError, match="act"):
            loaded(x)

"""Files that earlier versions wrote: they load, and give the answers that they gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import x86quant
from tests.artifacts.test_artifact_forms import Way
from x86quant.artifacts.writer import to_bytes
from x86quant.errors import InvalidInputError

FILES = Path(__file__).parents[1] / "data" / "written_before"


@pytest.fixture(scope="module")
def known() -> dict[str, torch.Tensor]:
    return load_file(FILES / "signature_answers.safetensors")


def close(found: Any, expected: torch.Tensor) -> None:
    # Float layers of torch may add up in another order on another CPU, and codes turn round.
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_keywords(known: dict[str, torch.Tensor]) -> None:
    loaded = x86quant.load(FILES / "signature_keywords.x86q")
    for found in (
        loaded(ids=known["ids"], mask=known["mask"]),
        loaded(known["ids"], mask=known["mask"], scale=1.0),
    ):
        close(found["tokens"], known["tokens"])
        close(found["pooled"][0], known["pooled"])
        assert found["kind"] == "encoder"
    with pytest.raises(InvalidInputError, match=r"scale was 1\.0, and is 2\.0"):
        loaded(known["ids"], mask=known["mask"], scale=2.0)
    assert to_bytes(loaded)


def test_graphs_by_size(known: dict[str, torch.Tensor]) -> None:
    loaded = x86quant.load(FILES / "signature_sizes.x86q")
    close(loaded(known["x"]), known["branches"])
    with pytest.raises(InvalidInputError, match="does not hold for this call"):
        loaded(torch.ones(1, 12, 8))


def test_constants(known: dict[str, torch.Tensor]) -> None:
    loaded = x86quant.load(FILES / "signature_constant.x86q")
    close(loaded(known["y"], Way.OTHER), known["way"])
    with pytest.raises(InvalidInputError, match="way was"):
        loaded(known["y"], Way.ONE)


def test_named_results(known: dict[str, torch.Tensor]) -> None:
    found = x86quant.load(FILES / "signature_named.x86q")(known["y"])
    close(found.left, known["left"])
    close(found.right.out, known["out"])

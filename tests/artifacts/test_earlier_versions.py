"""Files that earlier versions wrote: they load, and give the answers that they gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import x86quant
from tests.artifacts.own_classes import Way
from tests.serving.served import Served
from tests.written_files import FOLDER, WRITTEN, flat
from x86quant.artifacts.writer import to_bytes
from x86quant.errors import InvalidInputError
from x86quant.kernels import kernels_for
from x86quant.routing.in_force import current_rules
from x86quant.routing.router import choose
from x86quant.tables.errata import read_errata
from x86quant.tables.table_reader import read_table
from x86quant.tuning import measurement_files

FILES = Path(__file__).parents[1] / "data" / "written_before"
RELEASES = [folder for folder in sorted(FOLDER.iterdir()) if folder.is_dir()]


def files(pattern: str) -> list[Any]:
    """Those of each release."""
    found = [path for folder in RELEASES for path in sorted(folder.glob(pattern))]
    return [pytest.param(path, id=f"{path.parent.name}-{path.stem}") for path in found]


def kept_calls(path: Path) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The inputs and answers that lie beside a release's file."""
    kept = load_file(path.parent / "answers.safetensors")
    calls: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    while f"{path.stem}.{len(calls)}.in.0" in kept:
        call = f"{path.stem}.{len(calls)}."
        inputs, answers = (
            [kept[name] for name in sorted(kept) if name.startswith(call + part)]
            for part in ("in", "out")
        )
        calls.append((inputs, answers))
    assert calls
    return calls


@pytest.mark.parametrize("path", files("*.x86q"))
def test_models_of_each_release_answer_as_they_did(path: Path) -> None:
    written = WRITTEN[path.stem]
    loaded = x86quant.load(path, model=written.make() if written.needs_class else None)
    assert x86quant.artifacts.describe(path).metadata == {"model": path.stem}
    for inputs, answers in kept_calls(path):
        with torch.no_grad():
            found = flat(loaded(*inputs))
        assert len(found) == len(answers)
        for one, expected in zip(found, answers, strict=True):
            close(one, expected)


@pytest.mark.parametrize("path", files("*.xq"))
def test_programs_of_each_release_answer_as_they_did(path: Path) -> None:
    inputs, answers = kept_calls(path)[0]
    (found,) = Served(path)(*inputs)
    close(found, answers[0])


@pytest.mark.parametrize("path", files("*.csv"))
def test_measurements_of_each_release_are_read(path: Path) -> None:
    measured = measurement_files.read(path)
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert len(measured) == len(lines) - 1
    assert measured.provenance["x86quant"]


@pytest.mark.parametrize("path", files("table.toml"))
def test_tables_of_each_release_choose(path: Path) -> None:
    assert len(read_table(path).rules) == path.read_text().count("[[rule]]") > 0
    measured = measurement_files.read(path.with_name("avx512_vnni.csv"))
    with x86quant.use_rules(path):
        table = current_rules()
        assert table.path == str(path)
        for one in measured:
            kernels = kernels_for("stock", one.spec())
            assert (
                choose(one.spec(), cpu=x86quant.cpu(), table=table, kernels=kernels).kernel
                in kernels
            )


@pytest.mark.parametrize("path", files("errata.toml"))
def test_errata_of_each_release_are_read(path: Path) -> None:
    assert read_errata("2.13.0", path)


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

"""Program files that are damaged or impossible: each is refused in a sentence."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests.lowering.test_lowering import stock
from tests.quantization.test_recommenders import (
    Weighted,
    lower_triangle,
    program_of,
    weighted,
)
from tests.runtime.test_stages import CACHE, Narrowing
from tests.serving.served import (
    CANNOT_READ,
    DAMAGED,
    SHAPES,
    WRONG_VERSION,
    RefusedError,
    Served,
    Tagger,
    are_same,
    branches,
    changed,
    file,
    flattened,
    quantized,
)
from x86quant.runtime import parts

__all__ = ["branches", "file"]


def test_a_file_sealed_again_runs(branches: nn.Module, file: Path, tmp_path: Path) -> None:
    """So that what the next tests see refused is refused for the change alone."""
    same = changed(file, tmp_path / "same.xq", lambda manifest: None)
    x = torch.randn(SHAPES[0])
    assert are_same(Served(same)(x), branches(x))


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 0.5, -1])
def test_a_truncated_file_is_refused(kept: float, file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    end = int(len(data) * kept) if isinstance(kept, float) else kept
    (tmp_path / "cut.xq").write_bytes(data[:end])
    with pytest.raises(RefusedError) as caught:
        Served(tmp_path / "cut.xq")
    assert caught.value.status == DAMAGED


def test_every_changed_byte_is_seen(file: Path, tmp_path: Path) -> None:
    data = bytearray(file.read_bytes())
    for at in range(0, len(data), 97):
        data[at] ^= 1
        (tmp_path / "bad.xq").write_bytes(data)
        data[at] ^= 1
        with pytest.raises(RefusedError) as caught:
            Served(tmp_path / "bad.xq")
        assert caught.value.status in (DAMAGED, WRONG_VERSION)


def test_other_files_are_refused(file: Path, tmp_path: Path) -> None:
    for path, status in (
        (tmp_path, CANNOT_READ),
        (tmp_path / "none", CANNOT_READ),
        (Path(__file__), DAMAGED),
    ):
        with pytest.raises(RefusedError) as caught:
            Served(path)
        assert caught.value.status == status
    newer = file.read_bytes().replace(b"x86quant-program 5 ", b"x86quant-program 6 ")
    (tmp_path / "newer.xq").write_bytes(newer)
    with pytest.raises(
        RefusedError, match="format version 6, and this library reads versions 4 to 5"
    ):
        Served(tmp_path / "newer.xq")


def test_a_level_that_the_cpu_lacks_is_refused(file: Path) -> None:
    with pytest.raises(RefusedError, match='does not reach the level "avx1024"; it reaches avx2'):
        Served(file, isa="avx1024")


def _first(plan: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(step["fields"] for step in _steps(plan) if step["kind"] == kind)


def _steps(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for stage in plan["stages"] for step in stage["steps"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["plans"][0].update(arena=64), "reaches bytes"),
        (lambda m: m["plans"][0].update(arena=-1), "negative sizes"),
        (lambda m: m["plans"][0].update(arena=1 << 62), "not enough memory|malformed|impossible"),
        (lambda m: m.update(plans=[]), "no plan"),
        (lambda m: m.pop("packs"), 'lacks "packs"'),
        (lambda m: _first(m["plans"][0], "quantize")["a"].__setitem__(1, -4), "reaches bytes -4"),
        (lambda m: _first(m["plans"][0], "quantize")["a"].__setitem__(0, 9), "no base 9"),
        (lambda m: _first(m["plans"][0], "quantize")["a"].__setitem__(0, -1), "no base -1"),
        (lambda m: _first(m["plans"][0], "quantize")["a"].__setitem__(0, 2**32), "no base 42949"),
        (lambda m: _first(m["plans"][0], "conv")["in"].__setitem__(4, 1 << 60), "impossible sizes"),
        (lambda m: _first(m["plans"][0], "conv")["out"].__setitem__(10, 1 << 20), "reaches bytes"),
        (lambda m: _first(m["plans"][0], "conv")["pack"].update(pack=99), "no pack 99"),
        (lambda m: _first(m["plans"][0], "conv").update(pack=3), "takes packed weights, got Int"),
        (lambda m: m["packs"][0].update(weight="t99"), "no tensor t99"),
        (lambda m: m["packs"][0]["geometry"].__setitem__(12, 0), "refuses this convolution"),
        (lambda m: m["packs"][0]["geometry"].__setitem__(12, 1 << 40), "number of groups"),
        (lambda m: m["packs"][0]["codes"].__setitem__(0, 256), "refused"),
        (lambda m: _steps(m["plans"][0])[0].update(kind="rm"), 'no kind of step "rm"'),
        (lambda m: m["plans"][0]["inputs"][0]["sizes"].__setitem__(0, 0), "impossible"),
        (lambda m: m["plans"][0]["inputs"][0]["strides"].__setitem__(3, 1 << 61), "impossible"),
    ],
)  # fmt: skip
def test_an_impossible_plan_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, file: Path, tmp_path: Path
) -> None:
    bad = changed(file, tmp_path / "bad.xq", change)
    with pytest.raises(RefusedError, match=message):
        Served(bad)(torch.zeros(SHAPES[0]))


def _open_beside_kept(plan: dict[str, Any]) -> None:
    """An input of any size, whose size would lie where steps look for what is kept."""
    plan["inputs"].append({"sizes": [-1], "strides": [1], "type": "int64"})
    for stage in plan["stages"]:
        stage["parts"] = None


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A network whose batches run in stages, and its program file."""
    path = tmp_path_factory.mktemp("programs") / "staged.xq"
    here = dataclasses.replace(parts.cpu(), l2=CACHE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parts, "cpu", lambda: here)
        torch.manual_seed(0)
        x = torch.randn(2, 3, 32, 32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # stock PyTorch's own
            module = x86quant.compile(stock(Narrowing(), x), (x,))
        x86quant.export_program(module, path, [torch.zeros(n, 3, 32, 32) for n in (8, 16)])
    return module, path


@pytest.mark.parametrize("threads", [1, 2])
def test_plans_in_stages_give_the_same(
    threads: int, staged: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    module, file = staged
    served = Served(file, threads=threads)
    for batch in (8, 16):
        x = torch.randn(batch, 3, 32, 32)
        assert are_same(served(x), module(x))
    seen: list[dict[str, Any]] = []
    changed(file, tmp_path / "same.xq", lambda manifest: seen.extend(manifest["plans"]))
    assert all(len(plan["stages"]) > 1 and plan["kept"] for plan in seen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["kept"].__setitem__(0, p["kept"][0] - 1), "reaches bytes"),
        (lambda p: p["kept"].__setitem__(0, -1), "impossible sizes"),
        (lambda p: p["kept"].__setitem__(0, (1 << 63) - 1), "impossible sizes"),
        (lambda p: p["kept"].pop(), "parts of a plan are malformed"),
        (lambda p: p["stages"][0]["parts"].update(times=9), "reaches bytes"),
        (lambda p: p["stages"][1]["parts"].update(times=1 << 62), "malformed|reaches bytes"),
        (lambda p: p["stages"][1]["parts"]["bytes"].pop(), "parts of a plan are malformed"),
        (lambda p: p["stages"][1]["parts"]["bytes"].__setitem__(-1, -64), "malformed"),
        (lambda p: p.pop("stages"), 'lacks "stages"'),
        (lambda p: p["stages"][1].pop("parts"), 'lacks "parts"'),
        (_open_beside_kept, "parts of a plan are malformed"),
    ],
)  # fmt: skip
def test_impossible_stages_are_refused(
    change: Callable[[dict[str, Any]], object],
    message: str,
    staged: tuple[nn.Module, Path],
    tmp_path: Path,
) -> None:
    bad = changed(staged[1], tmp_path / "bad.xq", lambda m: change(m["plans"][0]))
    with pytest.raises(RefusedError, match=message):
        Served(bad)


@pytest.fixture(scope="module")
def bags_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "bags.xq"
    model = Weighted(lower_triangle).eval()
    batches = [weighted() for _ in range(3)]
    module = x86quant.quantize(model, batches, effort="fast", speed_check=False, progress=False)
    x86quant.export_program(program_of(module), path, [flattened(weighted(4))])
    return path


def _lookup(manifest: dict[str, Any]) -> dict[str, Any]:
    return _first(manifest["plans"][0], "lookup")


def _input(manifest: dict[str, Any], index: int) -> dict[str, Any]:
    return manifest["plans"][0]["inputs"][index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: _lookup(m).update(count0=_lookup(m)["count1"]), "the size of another input"),
        (lambda m: _lookup(m).update(weight_count0=_lookup(m)["count0"]), "of another input"),
        (lambda m: _lookup(m)["count0"].__setitem__(0, 1), "the size of another input"),
        (lambda m: _lookup(m)["count0"].__setitem__(1, 1 << 40), "the size of another input"),
        (lambda m: _lookup(m)["indices0"].__setitem__(1, 8), "does not begin where its input does"),
        (lambda m: _lookup(m)["indices0"].__setitem__(0, 0), "no input of any size at base 0"),
        (lambda m: _lookup(m)["indices0"].__setitem__(0, 17), "no input of any size at base 17"),
        (lambda m: _lookup(m)["indices0"].__setitem__(0, 1), "not like this"),
        (lambda m: _lookup(m)["table0"].__setitem__(11, 4), "not like this"),
        (lambda m: _input(m, 1).update(type="int32"), "not like this"),
        (lambda m: _input(m, 1).update(sizes=[8]), "not like this"),
        (lambda m: _input(m, 1).update(strides=[2]), "impossible sizes"),
        (lambda m: _input(m, 1).update(sizes=[-1, 2], strides=[2, 1]), "impossible sizes"),
        (lambda m: _input(m, 1).update(sizes=[-2]), "impossible sizes"),
        (lambda m: _lookup(m).pop("count0"), "reaches bytes"),
        (lambda m: m["plans"][0]["outputs"][0].update(sizes=[-1], strides=[1]), "has no size"),
    ],
)  # fmt: skip
def test_impossible_inputs_of_any_size_are_refused(
    change: Callable[[dict[str, Any]], object], message: str, bags_file: Path, tmp_path: Path
) -> None:
    Served(bags_file)(*flattened(weighted(4)))
    with pytest.raises(RefusedError, match=message):
        Served(changed(bags_file, tmp_path / "bad.xq", change))


@pytest.fixture(scope="module")
def tagger_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "tagger.xq"
    x86quant.export_program(quantized(Tagger(nn.LSTM), TAGGED), path, [TAGGED])
    return path


TAGGED = torch.linspace(-1, 1, 540).view(3, 9, 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("row_packs"), 'lacks "row_packs"'),
        (lambda m: m["row_packs"].pop(), "no pack 8"),
        (lambda m: m["row_packs"][0].update(activation="x"), 'no activation "x"'),
        (lambda m: m["row_packs"][0].update(linears=[]), "has 0 linears"),
        (lambda m: m["row_packs"][0]["linears"][0].update(weight="t99"), "no tensor t99"),
        (lambda m: m["row_packs"][0]["linears"].append(m["row_packs"][1]["linears"][0]),
         "gate and up must have one shape"),
        (lambda m: _linear(m).update(scale=_linear(m)["weight"]), "takes a scale, or"),
        (lambda m: _linear(m).update(weight=_linear(m)["scale"]), "takes an int8 weight"),
        (lambda m: _recurrent(m).update(units=25), "has weights of other sizes"),
        (lambda m: _recurrent(m).update(steps=1000), "reaches bytes|writes over"),
        (lambda m: _recurrent(m).update(sequences=1 << 40), "is not a size"),
        (lambda m: _recurrent(m).update(h_zp=256), "is no code"),
        (lambda m: _recurrent(m).update(hidden0=3), "takes packed weights of rows, got Int"),
        (lambda m: _recurrent(m)["x"].__setitem__(1, -64), "reaches bytes -64|writes over"),
        (lambda m: _quantize(m)["a"].__setitem__(1, 2), "does not lie at whole elements of 4"),
    ],
)  # fmt: skip
def test_an_impossible_recurrent_layer_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, tagger_file: Path, tmp_path: Path
) -> None:
    bad = changed(tagger_file, tmp_path / "bad.xq", change)
    with pytest.raises(RefusedError, match=message):
        Served(bad)(TAGGED)


def _recurrent(manifest: dict[str, Any]) -> dict[str, Any]:
    return _first(manifest["plans"][0], "recurrent")


def _quantize(manifest: dict[str, Any]) -> dict[str, Any]:
    return _first(manifest["plans"][0], "quantize")


def _linear(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["row_packs"][0]["linears"][0]

"""``x86quant tune --quick``: judged on formulas; nothing here is timed."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import isa, synthetic
from x86quant import cli
from x86quant.kernels import kernel_names
from x86quant.routing import in_force as active_rules
from x86quant.routing.in_force import current_rules
from x86quant.spec import OpSpec
from x86quant.tables.likeness import likeness
from x86quant.tables.table_reader import read_table
from x86quant.tuning import quick, user_table
from x86quant.tuning.cases import LAYERS, PROBES, read_shapes
from x86quant.tuning.measurements import MeasurementSet

HERE = isa.at("amx_int8")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("X86QUANT_RULES", raising=False)
    active_rules.reset()
    yield
    active_rules.reset()


def linear(channels: int, rows: int) -> OpSpec:
    return OpSpec("linear", channels, channels, rows=rows, threads=1, dynamic=False)


def slow_kernel(name: str, factor: float) -> MeasurementSet:
    """Linears of stock operators on which ``name`` takes ``factor`` times as long as others."""
    cases = [
        synthetic.case(linear(64 * n, rows), f"net{n}") for n in range(1, 9) for rows in (1, 64)
    ]
    kernels = ("fbgemm", "onednn")
    return synthetic.measure(
        cases, lambda _: {kernel: 10.0 * (factor if kernel == name else 1.0) for kernel in kernels}
    )


@pytest.mark.parametrize("slow", ["fbgemm", "onednn"])
def test_it_finds_what_this_cpu_likes_and_installs_it(slow: str) -> None:
    found = quick.evaluate(slow_kernel(slow, 3.0), HERE)
    assert found is not None
    assert found.cases == 16
    path = user_table.install(quick.as_user_table(found, HERE), HERE)
    table = read_table(path, kernel_names())
    assert not quick.keeps_own_rules(table)  # another quick tune may replace it
    active_rules.reset()
    again = quick.evaluate(slow_kernel(slow, 3.0), HERE)
    assert again is not None
    assert again.losses[again.before.name] == pytest.approx(0, abs=1e-6)
    assert not again.worth_it
    assert found.worth_it == (found.losses[found.before.name] > 0.02)


def test_a_rule_is_added_where_one_kernel_is_better_throughout() -> None:
    best = dataclasses.replace(current_rules(HERE), base=None)
    measured = slow_kernel(best_of(best), 2.0)
    samples = [s for s in quick.samples(measured) if s.decided]
    (rule,) = quick._corrections(best, samples)
    assert rule.use != (best_of(best),)
    assert "times as fast on" in rule.because
    level = [s for s in quick.samples(slow_kernel("fbgemm", 1.0)) if s.decided]
    assert list(quick._corrections(best, level)) == []


def best_of(table: object) -> str:
    """What ``table`` takes for the linears here; the same for all, or a correction is moot."""
    from collections import Counter

    chosen = Counter(
        quick.choice_of(sample, table).kernel  # type: ignore[arg-type]
        for sample in quick.samples(slow_kernel("fbgemm", 1.0))
    )
    return chosen.most_common(1)[0][0]


def test_entries_and_denials_of_the_users_table_stay() -> None:
    mine = user_table.users_table(HERE)
    from x86quant.tables.table import Denial, Entry

    shape = linear(64, 4)
    mine = dataclasses.replace(
        mine,
        entries=(Entry(shape, ("onednn",)),),
        denials=(Denial(shape, "fbgemm", "off"),),
    )
    user_table.install(mine, HERE)
    active_rules.reset()
    found = quick.evaluate(slow_kernel("fbgemm", 3.0), HERE)
    assert found is not None
    table = quick.as_user_table(found, HERE)
    assert (table.entries, table.denials) == (mine.entries, mine.denials)


def test_where_one_kernel_alone_runs_there_is_nothing_to_choose() -> None:
    only = synthetic.measure([synthetic.case(linear(64, 1), "net")], lambda _: {"native": 1.0})
    assert quick.evaluate(only, HERE) is None


def test_every_kind_of_layer_comes_early() -> None:
    shapes = list(quick._in_turn((*read_shapes(LAYERS), *read_shapes(PROBES))))
    first = shapes[:12]
    assert {shape.spec.op for shape in first} >= {"linear", "conv1d", "conv2d"}
    assert any(shape.spec.depthwise for shape in first)
    assert any(shape.spec.groups > 1 and not shape.spec.depthwise for shape in first)
    assert len(shapes) == len(set(shapes))


def test_it_says_which_options_do_not_go_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--quick", "--out", "x.csv"]) == 2
    assert "leave out --out" in capsys.readouterr().err


def test_the_command_prints_the_gain_and_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: object, **__: object) -> MeasurementSet:
        return slow_kernel("fbgemm", 3.0)

    monkeypatch.setattr(quick, "measure_few", measured)
    monkeypatch.setattr("x86quant.hardware.cpu.cpu", lambda: HERE)
    assert cli.main(["tune", "--quick", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cases"] == 16
    assert told["gain"] >= 1.0
    assert (told["installed"] is not None) == (told["gain"] > 1.015)


def test_that_nothing_is_better_is_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = quick.evaluate(slow_kernel("fbgemm", 3.0), HERE)
    assert found is not None
    evaluated = dataclasses.replace(found, gain=1.0)
    monkeypatch.setattr(quick, "measure_few", lambda *_, **__: None)
    monkeypatch.setattr(quick, "evaluate", lambda *_: evaluated)
    monkeypatch.setattr("x86quant.hardware.cpu.cpu", lambda: HERE)
    assert cli.main(["tune", "--quick"]) == 0
    assert "nothing is better" in capsys.readouterr().out
    table = user_table.users_table(HERE)
    assert table.base is not None
    assert table.base.name == found.before.name
    assert not table.rules
    assert likeness(table, HERE).degree == "same"
    assert "tune --quick" not in str(likeness(table, HERE))


def test_options_parse() -> None:
    from x86quant.cli import tune

    parser = argparse.ArgumentParser()
    tune.configure(parser)
    assert parser.parse_args(["--quick"]).quick

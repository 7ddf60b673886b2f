"""Weights of 4 bits with scales for groups: measured, kept in files, and given rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import synthetic
from tests.synthetic import case, measure
from x86quant import cli
from x86quant.errors import MeasurementError
from x86quant.spec import OpSpec
from x86quant.tuning import measurement_files
from x86quant.tuning.candidates import candidates
from x86quant.tuning.cases import Grid, Shape, jobs
from x86quant.tuning.fit import fit
from x86quant.tuning.layer_shapes import bytes_touched, nonsense
from x86quant.tuning.measurements import Case
from x86quant.tuning.operands import make_operands
from x86quant.tuning.samples import choice_of, samples

LINEAR = OpSpec("linear", 256, 40)
FOUR = LINEAR.replace(dynamic=True, rows=3, threads=1, bits=4, weight_group=32)


def test_they_are_measured_in_compiled_models_alone_in_groups_that_fit() -> None:
    grid = Grid(rows=(1, 16), weight_groups=(32, 128, 96), caches=("hot",))
    cases = [c for job in jobs([Shape(LINEAR, "n")], grid, machine="m", isa="avx2") for c in job]
    found = [c for c in cases if c.spec.bits == 4]
    assert {(c.spec.rows, c.spec.weight_group) for c in found} == {
        (rows, group) for rows in (1, 16) for group in (32, 128)
    }
    assert all(c.caller == "graph" and c.spec.dynamic for c in found)
    assert len(cases) - len(found) == 2 * 2 * 2  # of 8 bits: rows, static or not, callers
    without = Grid(rows=(1,), weight_bits=(8,), callers=("graph",), caches=("hot",))
    assert len(jobs([Shape(LINEAR, "n")], without, machine="m", isa="avx2")) == 2


@pytest.mark.parametrize("post_op", [None, "relu"])
@pytest.mark.parametrize("group", [8, 32, 256])
def test_each_kernel_gives_what_the_plain_product_gives(group: int, post_op: str | None) -> None:
    spec = FOUR.replace(weight_group=group, post_op=post_op)
    made = [one for one in candidates("graph", lambda _: make_operands(spec)) if one.make]
    assert {one.name for one in made} == {"native", "native_blocks"}
    for one in made:
        assert one.make is not None
        runner, operands = one.make(), make_operands(spec)
        assert operands.difference(runner.result()) is None, one.name
        assert operands.difference(runner.result() * 1.01) is not None


def test_a_file_keeps_bits_and_groups_and_older_files_do_without(tmp_path: Path) -> None:
    measured = measure(
        [case(FOUR, "n", caller="graph")], lambda _: {"native": 1.0, "native_blocks": 2.0}
    )
    path = tmp_path / "m.csv"
    measurement_files.write(path, measured)
    assert {m.case.spec for m in measurement_files.read(path)} == {FOUR}
    text = path.read_text().replace(",weight_group", "").replace(",32\n", "\n")
    path.write_text(text)
    with pytest.raises(MeasurementError, match="weight_group"):
        measurement_files.read(path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"bits": 2}, "bits"),
        ({"dynamic": False}, "bits"),
        ({"weight_group": 12}, "weight_group"),
        ({"weight_group": 96}, "weight_group"),
        ({"weight_group": None}, "weight_group"),
        ({"bits": None}, "weight_group"),
    ],
)
def test_what_makes_no_sense_is_named(changes: dict[str, object], field: str) -> None:
    assert nonsense(FOUR) is None
    found = nonsense(FOUR.replace(**changes))
    assert found is not None
    assert found[0] == field


def test_half_of_the_bytes_are_touched() -> None:
    assert bytes_touched(FOUR) == 3 * 256 + 256 * 40 // 2 + 3 * 40


def test_rules_say_from_how_many_rows_on_blocks_are_unpacked() -> None:
    def times(one: Case) -> synthetic.Times:
        if one.spec.bits == 4:
            many = (one.spec.rows or 0) >= 16
            return {"native": 2.0 if many else 1.0, "native_blocks": 1.0 if many else 2.0}
        return {"native": 3.0, "fbgemm": 1.0}

    shapes = [OpSpec("linear", n, m) for n in (256, 512) for m in (64, 192)]
    cases = [
        case(spec.replace(rows=rows, threads=1, **form), "n", caller="graph")
        for spec in shapes
        for rows in (1, 4, 16, 64)
        for form in ({"dynamic": True}, {"dynamic": True, "bits": 4, "weight_group": 128})
    ]
    table = fit(measure(cases, times)).table
    told = [str(rule) for rule in table.rules]
    assert any("weight_bits 4" in text and "rows >= 8" in text for text in told), told
    for sample in samples(measure(cases, times)):
        assert sample.losses[choice_of(sample, table).kernel] == 0


def test_of_4_bits_alone_nothing_is_said_of_8() -> None:
    cases = [case(FOUR.replace(rows=rows), "n", caller="graph") for rows in (1, 4)]
    table = fit(measure(cases, lambda _: {"native": 1.0, "native_blocks": 2.0})).table
    (rule,) = table.rules
    assert "linear when caller graph and weight_bits 4 →" in str(rule)


def test_the_command_refuses_groups_that_no_kernel_reads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["tune", "--weight-groups", "12", "--out", "never.csv"]) == 2
    assert "--weight-groups: 12" in capsys.readouterr().err

"""The measurement file: what is written reads back, what is wrong is said with its place."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from x86quant.errors import MeasurementError
from x86quant.spec import OpSpec, lookup_spec
from x86quant.tuning.measurement_files import COLUMNS, PROVENANCE, read, write
from x86quant.tuning.measurements import Case, Measurement, MeasurementSet, merge, usual

CONV = OpSpec(
    "conv2d",
    64,
    64,
    1,
    (3, 3),
    (1, 1),
    (1, 1),
    (1, 1),
    (0, 0),
    dynamic=False,
    post_op="relu",
    batch=1,
    rows=3136,
    spatial=(56, 56),
    threads=1,
)
LINEAR = OpSpec("linear", 768, 3072, dynamic=True, rows=128, threads=2)
HEAD = dict.fromkeys(PROVENANCE, "x") | {"date": "2026-01-02"}


def case(spec: OpSpec = CONV, **changes: object) -> Case:
    nets = (("resnet_50", 3), ("ssd", 1))
    return dataclasses.replace(
        Case("GenuineIntel-6-143", "amx_int8", "stock", spec, "hot", nets), **changes
    )  # type: ignore[arg-type]


def timed(kernel: str, median: float, of: Case | None = None) -> Measurement:
    return Measurement(
        of or case(), kernel, "ok", median, median - 1, median + 1.25, median - 2, rounds=9
    )


def measured(*measurements: Measurement, **head: str) -> MeasurementSet:
    return MeasurementSet(measurements, HEAD | head)


SEVERAL = measured(
    timed("fbgemm", 80.125),
    dataclasses.replace(timed("onednn", 40), tie=True, note='checked, with "small" weights'),
    Measurement(case(), "qnnpack", "failed", note="the process died of signal 11"),
    Measurement(case(LINEAR), "native", "unsupported", note="no linears"),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.csv"


def test_what_is_written_reads_back(path: Path) -> None:
    write(path, SEVERAL)
    found = read(path)
    assert set(found.measurements) == set(SEVERAL.measurements)
    assert {m.case.nets for m in found.measurements} == {case().nets}
    assert found.provenance == SEVERAL.provenance
    assert path.read_text().splitlines()[len(PROVENANCE)] == ",".join(COLUMNS)


def test_embedding_tables_read_back_and_files_without_them_may_lack_their_columns(
    path: Path,
) -> None:
    spec = lookup_spec(1000, 64, 4, "sum", stock_rows=True, caller=None)
    table = case(spec.replace(rows=128, each=20, threads=1))
    both = measured(timed("native", 3), timed("fbgemm", 4, table))
    write(path, both)
    assert read(path).cases().keys() == both.cases().keys()
    lines = [line if line.startswith("#") else line.rsplit(",", 2)[0]
             for line in path.read_text().splitlines() if "embedding_bag" not in line]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    assert [m.kernel_name for m in read(path)] == ["native"]


def test_order_of_measurements_does_not_change_the_bytes(path: Path) -> None:
    write(path, SEVERAL)
    before = path.read_bytes()
    write(path, measured(*reversed(SEVERAL.measurements)))
    assert path.read_bytes() == before


def test_a_kernel_may_be_measured_with_narrow_weights_too(path: Path) -> None:
    usually = timed("native", 9)
    narrow = dataclasses.replace(timed("native", 5), note="narrow weights only: quicker")
    write(path, measured(narrow, usually))
    found = read(path).measurements
    assert [(m.median_us, m.narrow_weights) for m in found] == [(9, False), (5, True)]
    assert list(usual(found)) == [found[0]]
    assert list(usual([found[1]])) == [found[1]]


def test_cases_group_the_candidates_whatever_the_networks_are() -> None:
    elsewhere = timed("onednn", 3, case(nets=(("vgg", 1),)))
    cases = measured(timed("fbgemm", 9), elsewhere).cases()
    assert [m.kernel_name for m in cases[case()]] == ["fbgemm", "onednn"]


def test_a_set_iterates_over_measurements_that_know_their_op() -> None:
    assert [m.spec().op for m in SEVERAL] == ["conv2d", "conv2d", "conv2d", "linear"]
    assert len(SEVERAL) == 4


def test_networks_and_where() -> None:
    assert SEVERAL.networks() == ("resnet_50", "ssd")
    assert [m.kernel_name for m in SEVERAL.where(lambda c: c.spec.op == "linear").measurements] == [
        "native"
    ]


def test_merging_replaces_whole_cases_and_unites_networks() -> None:
    old = measured(timed("fbgemm", 5), timed("onednn", 6), date="2026-01-01")
    new = measured(timed("fbgemm", 50, case(nets=(("vgg", 2),))), date="2026-02-01", torch="y")
    for order in ([old, new], [new, old]):
        both = merge(order)
        assert [(m.kernel_name, m.median_us) for m in both.measurements] == [("fbgemm", 50)]
        assert both.measurements[0].case.nets == (("resnet_50", 3), ("ssd", 1), ("vgg", 2))
        assert both.provenance["torch"] == "x | y"


def test_merging_keeps_machines_apart() -> None:
    elsewhere = case(machine="AuthenticAMD-25-97")
    both = merge([measured(timed("fbgemm", 5)), measured(timed("fbgemm", 7, elsewhere))])
    assert len(both.cases()) == 2


def test_merging_a_merged_set_changes_nothing() -> None:
    once = merge([SEVERAL, measured(timed("fbgemm", 5, case(isa="avx2")), cpu="y")])
    assert merge([once, once]) == once


def test_empty_file(path: Path) -> None:
    path.write_text("")
    with pytest.raises(MeasurementError, match=r"m\.csv:1: no cpu, .* 'unknown' if need be"):
        read(path)


def test_missing_file(path: Path) -> None:
    with pytest.raises(MeasurementError, match=r"m\.csv: cannot be read: No such file"):
        read(path)


def test_not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MeasurementError, match=r"not UTF-8 text .* save it as UTF-8"):
        read(path)


def spoilt(path: Path, old: str, new: str) -> str:
    """The error that reading a good file with one change gives."""
    write(path, SEVERAL)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(MeasurementError) as caught:
        read(path)
    return str(caught.value)


FIRST = len(PROVENANCE) + 2  # the line of the first measurement


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("# torch = x\n", "", r":1: no torch among"),
        ("# torch = x", "# torch", r":9: write '# key = value'"),
        ("isa,caller", "caller", rf":{FIRST - 1}: no column 'isa'"),
        ("isa,caller", "isa,isa,caller", rf":{FIRST - 1}: more than one column 'isa'"),
        ("tie,note", "tie,note,speed", rf":{FIRST - 1}: unknown column 'speed'"),
        (",stock,1,", ",stock,", rf":{FIRST}: 33 cells where the header has 34"),
        ("amx_int8", "amx", rf":{FIRST}: column isa: 'amx' is not one of"),
        ("64,64,1,3x3", "64,64,3,3x3", rf":{FIRST}: column in_channels: 64 .* 3 groups"),
        ("64,64,1,3x3", "0,64,1,3x3", rf":{FIRST}: column in_channels: 0 is too small"),
        ("64,64,1,3x3", "64,6_4,1,3x3", rf":{FIRST}: column out_channels: '6_4' is no whole"),
        ("64,64,1,3x3", "64,64,1,3x", rf":{FIRST}: column kernel: '3x' is not like 3x3"),
        ("64,64,1,3x3", "64,64,1,3", rf":{FIRST}: column kernel: a conv2d needs 2 numbers"),
        ("64,64,1,3x3", "64,64,1,99x3", rf":{FIRST}: column spatial: .* leaves no output"),
        ("conv2d", "conv4d", rf":{FIRST}: column op: 'conv4d' is no op"),
        ("3;1", "3", rf":{FIRST}: column count: '3' is not one whole number for each"),
        ("80.125", "8O", rf":{FIRST}: column median_us: '8O' is no number"),
        ("80.125", "nan", rf":{FIRST}: column median_us: nan is no positive number"),
        ("80.125", "", rf":{FIRST}: column median_us: empty, though the status is ok"),
        ("80.125", "99", rf":{FIRST}: column median_us: 99.0 lies outside its interval"),
        (",78.125,", ",80.5,", rf":{FIRST}: column min_us: 80.5 exceeds the median"),
        (",9,hot", ",0,hot", rf":{FIRST}: column rounds: 0, though"),
        ("fbgemm,ok", "fbgemm,failed", rf":{FIRST}: column median_us: a time, though"),
        ("no linears", "", r"column note: empty; say why it is unsupported"),
        (
            "onednn,ok",
            "fbgemm,ok",
            rf":{FIRST + 1}: column kernel_name: .* in line {FIRST} already",
        ),
        ('weights"', "weights", r"not valid CSV: .*close the quote"),
        ("hot,false", "warm,false", rf":{FIRST}: column cache: 'warm'"),
        ("hot,false", "hot,no", rf":{FIRST}: column tie: 'no'"),
    ],
)
def test_errors_name_file_line_column_and_remedy(
    path: Path, old: str, new: str, words: str
) -> None:
    message = spoilt(path, old, new)
    assert message.startswith(str(path))
    assert re.search(words, message), message


def test_provenance_must_be_whole_to_be_written(path: Path) -> None:
    with pytest.raises(MeasurementError, match="the provenance lacks torch"):
        write(path, MeasurementSet((), {k: "x" for k in PROVENANCE if k != "torch"}))
    assert not path.exists()


def test_notes_of_several_lines_are_joined(path: Path) -> None:
    note = "RuntimeError: a\n  b"
    write(path, measured(Measurement(case(), "fbgemm", "failed", note=note)))
    assert read(path).measurements[0].note == "RuntimeError: a b"

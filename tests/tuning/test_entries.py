"""From measurements to entries of a table, and to the user's own."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from tests.tuning.small_runs import (
    CONV,
    CONV_LINE,
    HEADER,
    LINEAR,
    InstantWorker,
    Net,
    _own_cache,
    case,
    graph,
    run,
    shapes_csv,
    stock,
)
from x86quant import cli
from x86quant.hardware.cpu import cpu
from x86quant.kernels import kernel_names
from x86quant.packing.linear_dynamic import choose_linear_dynamic
from x86quant.routing.in_force import use_rules
from x86quant.tables.table_reader import read_table
from x86quant.tuning import session, user_table
from x86quant.tuning.measurement_files import read
from x86quant.tuning.measurements import Measurement

__all__ = ["_own_cache", "shapes_csv"]


def test_entries_rank_kernels_over_both_caches_and_leave_out_wrong_ones() -> None:
    (entry,) = user_table.entries([
        stock(CONV, "onednn", 10), stock(CONV, "fbgemm", 12),
        stock(CONV, "onednn", 30, "rotated"), stock(CONV, "fbgemm", 14, "rotated"),
        stock(CONV, "qnnpack", 1),
        Measurement(case(CONV, isa=cpu().isa, cache="rotated"), "qnnpack", "wrong", note="off"),
    ])  # fmt: skip
    assert entry.use == ("fbgemm", "onednn")
    assert (entry.spec.rows, entry.spec.batch, entry.spec.dynamic) == (None, None, None)
    assert entry.because == "measured: 13.0 µs, onednn 17.3"


def test_stock_entries_tell_rows_apart_only_where_the_best_kernel_differs() -> None:
    few, many = LINEAR, LINEAR.replace(rows=64)
    measured = [stock(few, "fbgemm", 1), stock(few, "onednn", 2), stock(many, "onednn", 5)]
    differing = user_table.entries([*measured, stock(many, "fbgemm", 9)])
    assert [(e.spec.rows, e.use[0]) for e in differing] == [(4, "fbgemm"), (64, "onednn")]
    alike = user_table.entries([*measured, stock(many, "fbgemm", 4)])
    assert [(e.spec.rows, e.use[0]) for e in alike] == [(None, "fbgemm")]


def test_entries_of_compiled_models_come_first_and_are_exact() -> None:
    found = user_table.entries([stock(CONV, "onednn", 3), graph(CONV, "native", 1)])
    assert [(e.spec.caller, e.spec.rows, e.use) for e in found] == [
        ("graph", 36, ("native",)), ("stock", None, ("onednn",)),
    ]  # fmt: skip


def test_linears_on_float_tensors_find_what_was_measured_of_them() -> None:
    one, several = (LINEAR.replace(dynamic=True, rows=rows) for rows in (1, 4))
    measured = [graph(one, "onednn", 1), graph(one, "native", 2), graph(several, "native", 3)]
    path = user_table.install(user_table.with_entries(measured, cpu()), cpu())
    weight = torch.ones(LINEAR.out_channels, LINEAR.in_channels, dtype=torch.int8)
    with use_rules(path):
        scale = bias = torch.zeros(LINEAR.out_channels)
        routes = choose_linear_dynamic(weight, scale, bias, None)
    assert [choice.kernel for choice in routes.choices][:2] == ["onednn", "native"]
    assert routes.choices[0].rule.partition("#")[0].endswith(":entry")


def test_the_users_table_is_read_back_and_keeps_other_entries() -> None:
    path = user_table.install(user_table.with_entries([stock(CONV, "onednn", 3)], cpu()), cpu())
    table = read_table(path, kernel_names())
    assert table.fits(cpu())
    assert [e.use for e in table.entries] == [("onednn",)]
    more = user_table.with_entries([stock(LINEAR, "fbgemm", 3), stock(CONV, "fbgemm", 1)], cpu())
    found = {e.spec.op: e.use for e in more.entries}
    assert found == {"conv2d": ("fbgemm",), "linear": ("fbgemm",)}
    assert len(more.entries) == 2
    path.write_text("broken")
    assert user_table.with_entries([], cpu()).base is not None


def test_tuning_one_model_again_replaces_its_entries() -> None:
    """Also those of transposed layers, whose weights have one scale for all channels."""
    up = CONV.replace(transposed=True, per_channel=False, output_padding=(0, 0))
    for took in (3, 2, 1):
        measured = [stock(up, "onednn", took), graph(up, "native", took), stock(CONV, "fbgemm", 1)]
        table = user_table.with_entries(measured, cpu())
        path = user_table.install(table, cpu())
        assert read_table(path, kernel_names()) == table
        assert len(table.entries) == 3
        assert f"measured: {took}.0 µs" in {entry.because for entry in table.entries}


def test_tuning_again_replaces_a_denial_whose_reason_changes() -> None:
    for note in ("2 steps off", "9 steps off"):
        wrong = [
            Measurement(case(CONV, isa=cpu().isa, caller=caller), "onednn", "wrong", note=note)
            for caller in ("stock", "graph")
        ]
        path = user_table.install(user_table.with_entries(wrong, cpu()), cpu())
        denials = read_table(path, kernel_names()).denials
        assert [(d.spec.caller, d.because) for d in denials] == [("graph", note), ("stock", note)]


# ---------------------------------------------------------------------------- command line


def test_tune_measures_at_a_lower_level_and_writes_a_file(
    tmp_path: Path, shapes_csv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.csv"
    status = cli.main(
        ["tune", "--shapes", str(shapes_csv), "--out", str(out), "--isa", "avx2", "--batch", "1",
         "--rows", "4", "--budget", "1h", "--json"]
    )  # fmt: skip
    assert status == 0
    found = read(out)
    assert {m.case.isa for m in found} == {"avx2"}
    assert {m.case.caller for m in found} == {"stock", "graph"}
    assert {m.case.cache for m in found} == {"hot", "rotated"}
    assert not [m for m in found if m.status in ("wrong", "failed")]
    onednn = [m for m in found if (m.kernel_name, m.case.caller) == ("onednn", "stock")]
    assert all(m.narrow_weights for m in onednn)  # without VNNI it saturates at full range
    assert onednn
    # Where others need narrow weights, native is timed with them too, as it is quicker then.
    native = [m for m in found if (m.kernel_name, m.status) == ("native", "ok")]
    need = {m.case for m in found if m.narrow_weights and m.kernel_name != "native"}
    assert {m.case for m in native if m.narrow_weights} == need & {m.case for m in native} != set()
    printed = json.loads(capsys.readouterr().out)
    assert (printed["cases"], printed["unmeasured"]) == (len(found.cases()), 0)
    assert printed["bad"] == printed["tables"] == []
    assert not user_table.user_table_path("avx2").exists()


def test_tune_says_what_is_wrong_with_its_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"{HEADER}\n{CONV_LINE.replace(',1,8,8,', ',0,8,8,')}\n")
    assert cli.main(["tune", "--shapes", str(path), "--out", str(tmp_path / "m.csv")]) == 2
    assert "bad.csv:2: column groups: 0 is too small" in capsys.readouterr().err
    assert cli.main(["tune", "--shape", "1,3,8,8"]) == 2
    assert "--shape is the input of a --model" in capsys.readouterr().err


def test_a_model_becomes_entries_of_the_users_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "run", functools.partial(run, worker=InstantWorker()))
    name = f"{Net.__module__}:Net"
    status = cli.main(["tune", "--model", name, "--shape", "1,3,16,16", "--isa", "avx2"])
    assert status == 0
    table = read_table(user_table.user_table_path("avx2"), kernel_names())
    assert {e.spec.op for e in table.entries} == {"conv2d", "linear"}
    assert f"{user_table.user_table_path('avx2')}: installed" in capsys.readouterr().out

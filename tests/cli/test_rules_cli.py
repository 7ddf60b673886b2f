"""``x86quant rules``: what it prints, as text and JSON, and its exit status."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests import synthetic
from tests.synthetic import case, linear, measure
from x86quant.cli import main
from x86quant.hardware.cpu import cpu
from x86quant.hardware.isa import LEVELS
from x86quant.kernels import kernel_names
from x86quant.routing import in_force as active_rules
from x86quant.tables.shipped import SHIPPED, shipped_tables
from x86quant.tables.table_reader import read_table
from x86quant.tables.user import user_rules_dir
from x86quant.tuning.cases import LAYERS, read_shapes

MINE = 'schema = 1\nname = "mine"\nextends = "default"\n[[rule]]\nop = "linear"\nuse = "onednn"\n'
SHAPES = "op,net,layer,groups,ic,oc,id,ih,iw,kd,kh,kw,sd,sh,sw,pd,ph,pw,dd,dh,dw\n"


class Net(nn.Module):
    """Two linears alike and one that differs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("X86QUANT_RULES", raising=False)
    active_rules.reset()
    yield
    active_rules.reset()


@pytest.fixture
def rules(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object, status: int = 0) -> str:
        assert main(["rules", *map(str, arguments)]) == status
        out, err = capsys.readouterr()
        return err if status == 2 else out

    return call


def put(name: str, text: str = MINE) -> Path:
    user_rules_dir().mkdir(parents=True, exist_ok=True)
    path = user_rules_dir() / f"{name}.toml"
    path.write_text(text)
    return path


# ---------------------------------------------------------------------------- list, show, check


def test_list_names_shipped_and_own_tables_and_marks_the_one_in_force(rules: Any) -> None:
    put("mine")
    put("broken", "schema = 9\n")
    lines = rules("list").splitlines()
    starts = [line.split()[:2] for line in lines]
    assert ["default", "shipped"] in starts
    assert ["pytorch-2.0", "shipped"] in starts
    assert ["*", "mine"] in starts
    assert any("broken" in line and "newer than this x86quant" in line for line in lines)
    rows = {row["name"]: row for row in json.loads(rules("list", "--json"))}
    assert rows["mine"]["in_force"]
    assert rows["mine"]["source"] == "yours"
    assert rows["broken"]["error"]
    assert rows["pytorch-2.0"]["error"] is None


def test_list_shows_a_table_that_is_in_force_by_its_path(
    rules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "named.toml"
    path.write_text(MINE)
    monkeypatch.setenv("X86QUANT_RULES", str(path))
    rows = json.loads(rules("list", "--json"))
    assert [r["path"] for r in rows if r["in_force"]] == [str(path)]


def test_show_prints_the_table_in_force_or_a_named_one(rules: Any) -> None:
    put("mine")
    assert "mine#1: linear → onednn" in rules("show")
    assert rules("show", "pytorch-2.0").startswith("pytorch-2.0: ")
    assert 'op = "linear"\nuse = "onednn"' in rules("show", "mine", "--toml")
    shown = json.loads(rules("show", "mine", "--json"))
    assert shown["rules"] == [{"op": "linear", "when": {}, "use": ["onednn"], "because": ""}]
    assert "unknown rule table 'minee'" in rules("show", "minee", status=2)


def test_check_says_what_is_wrong(rules: Any, tmp_path: Path) -> None:
    shipped = rules("check").splitlines()
    assert [line.partition(": ok")[0] for line in shipped] == list(shipped_tables())
    good, bad, old = (tmp_path / f"{name}.toml" for name in ("good", "bad", "old"))
    good.write_text(MINE)
    bad.write_text(MINE.replace("onednn", "onednm"))
    old.write_text(MINE.replace("[[rule]]", '[provenance]\ntorch = "2.1"\n[[rule]]'))
    printed = rules("check", good, bad, status=1)
    assert f"{good}: ok\n" in printed
    assert f"{bad}: wrong: {bad}:4: mine#1 names the unknown kernel 'onednm'" in printed
    assert "ok: was measured with torch 2.1" in rules("check", old)
    found = json.loads(rules("check", good, bad, "--json", status=1))
    assert [one["ok"] for one in found] == [True, False]


# ---------------------------------------------------------------------------- diff


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    cases = [case(linear(64, 64, 32), "x", isa=cpu().isa)]
    found = measure(cases, lambda _: {"fbgemm": 30.0, "onednn": 20.0})
    return synthetic.example_file(tmp_path / "m.csv", found)


def test_diff_of_a_shape_list_gives_the_gain_where_it_was_measured(
    rules: Any, tmp_path: Path, measured: Path
) -> None:
    fbgemm = tmp_path / "a.toml"
    fbgemm.write_text(MINE.replace("onednn", "fbgemm").replace("mine", "a"))
    onednn = tmp_path / "b.toml"
    onednn.write_text(MINE.replace("mine", "b"))
    shapes = tmp_path / "shapes.csv"
    shapes.write_text(f"{SHAPES}linear,n,fc*3,1,64,64{',' * 15}\nlinear,n,out,1,64,8{',' * 15}\n")
    common = ["--shapes", shapes, "--rows", 32, "--measurements", measured]
    lines = rules("diff", fbgemm, onednn, *common).splitlines()
    assert lines == [
        "linear 64→64 rows=32 ×3: fbgemm (a#1) → onednn (b#1): 1.50x",
        "linear 64→8 rows=32: fbgemm (a#1) → onednn (b#1): not measured",
        "2 of 2 layers change from a to b; where measured (1), 0.03 ms are saved",
    ]
    found = json.loads(rules("diff", onednn, fbgemm, *common, "--json"))
    assert (found["layers"], found["changed"], found["measured"]) == (2, 2, 1)
    assert found["saved_us"] == pytest.approx(-30)
    assert found["changes"][0]["gain"] == pytest.approx(2 / 3)
    assert found["changes"][1]["gain"] is None


def test_diff_of_a_model(rules: Any) -> None:
    put("mine", MINE.replace("onednn", "qnnpack"))
    put("other", MINE.replace("mine", "other").replace("onednn", "fbgemm"))
    name = f"{Net.__module__}:Net"
    found = json.loads(
        rules("diff", "other", "mine", "--model", name, "--shape", "32,64", "--json")
    )
    layers = {c["layer"]: (c["count"], c["old"]["kernel"]) for c in found["changes"]}
    assert layers == {
        "linear 64→64 rows=32": (2, "fbgemm"),
        "linear 64→8 rows=32": (1, "fbgemm"),
    }
    same = rules("diff", "mine", "mine", "--model", name, "--shape", "32,64")
    assert same.startswith("0 of 2 layers change")


def test_diff_reads_the_shipped_layers_and_refuses_nonsense(rules: Any, tmp_path: Path) -> None:
    found = json.loads(rules("diff", "default", "pytorch-2.0", "--isa", "avx2", "--json"))
    assert 0 < found["changed"] < found["layers"] <= len(read_shapes(LAYERS))
    assert "--shape is the input" in rules("diff", "default", "default", "--shape", 1, status=2)
    wrong = ("diff", "default", "default", "--model", "m:f", "--shape", "1,x")
    assert "'x' is no whole number" in rules(*wrong, status=2)
    missing = ("diff", "default", "default", "--measurements", tmp_path / "none.csv")
    assert "none.csv: cannot be read" in rules(*missing, status=2)


def test_files_on_record_hold_the_level_that_they_are_named_by() -> None:
    for path in (SHIPPED / "measurements").glob("*.csv"):
        level = path.stem.partition("-")[0]
        if level in LEVELS:
            lines = [x for x in path.read_text(encoding="utf-8").splitlines() if x[:1] != "#"]
            assert {row["isa"] for row in csv.DictReader(lines)} == {level}


# ---------------------------------------------------------------------------- fit, score


def test_fit_writes_a_table_with_its_score(rules: Any, tmp_path: Path) -> None:
    path, out = synthetic.example_file(tmp_path / "m.csv"), tmp_path / "fitted.toml"
    printed = rules("fit", path, "--out", out)
    assert printed.startswith(f"{out}: 4 rules\n")
    assert "stock: fitted, network left out" in printed
    table = read_table(out, kernel_names())
    assert table.name == "fitted"
    assert table.provenance["regret"] == pytest.approx(0)
    first = out.read_bytes()
    rules("fit", path, "--out", out)
    assert out.read_bytes() == first


def test_fit_prints_without_a_file_and_as_json(rules: Any, tmp_path: Path) -> None:
    path = synthetic.example_file(tmp_path / "m.csv")
    assert rules("fit", path, "--name", "x").startswith('schema = 1\nname = "x"\n')
    found = json.loads(rules("fit", path, "--json"))
    assert found["table"]["name"] == "amx_int8"
    assert {one["table"] for one in found["scores"]} >= {"pytorch-2.0", "always onednn"}


def test_several_files_are_merged_and_one_level_is_chosen(rules: Any, tmp_path: Path) -> None:
    files = [synthetic.example_file(tmp_path / "a.csv")]
    cases = [case(linear(32 * n, 64, 16), f"net{n % 3}", isa="avx2") for n in range(1, 9)]
    other = measure(cases, lambda _: {"fbgemm": 10.0, "onednn": 20.0})
    files.append(synthetic.example_file(tmp_path / "b.csv", other))
    message = rules("fit", *files, status=2)
    assert "of amx_int8, avx2; choose one level by --isa" in message
    assert '[hardware]\nisa = "avx2"' in rules("fit", *files, "--isa", "avx2")
    assert "nothing was measured at avx512" in rules("fit", *files, "--isa", "avx512", status=2)


def test_score_puts_tables_beside_each_other(rules: Any, tmp_path: Path) -> None:
    path = synthetic.example_file(tmp_path / "m.csv")
    put("mine")
    found = json.loads(rules("score", path, "--table", "mine", "--table", "default", "--json"))
    regrets = {one["table"]: one["mean"] for one in found}
    assert regrets["fitted, network left out"] == pytest.approx(0)
    assert regrets["mine"] > 0.05
    assert "default" in regrets
    printed = rules("score", path)
    assert "always fbgemm" in printed
    assert "stock: fitted, network left out" in printed


def test_unreadable_measurements_are_an_error_of_one_line(rules: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("nonsense")
    message = rules("fit", path, status=2)
    assert message.startswith("x86quant rules: ")
    assert message.count("\n") == 1


def test_plots(rules: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = synthetic.example_file(tmp_path / "m.csv")
    rules("fit", path, "--plots", tmp_path / "plots")
    assert (tmp_path / "plots" / "regret_stock.png").exists()

"""The user's own tables: found, used, told about when broken or old, never in the way."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import isa
from x86quant.cli import main
from x86quant.errors import RuleError, UnsupportedError, X86QuantWarning
from x86quant.kernels import all_kernels
from x86quant.routing import in_force as active_rules
from x86quant.routing.in_force import current_rules, shipped_table, use_rules
from x86quant.routing.router import choose
from x86quant.routing.routes import Choice
from x86quant.spec import OpSpec
from x86quant.tables.likeness import likeness
from x86quant.tables.shipped import SHIPPED, find_table, shipped_tables
from x86quant.tables.table import RuleTable
from x86quant.tables.table_reader import parse_table, read_table
from x86quant.tables.table_writer import dumps
from x86quant.tables.user import (
    install_user_table,
    user_folder,
    user_rules_dir,
    user_table_path,
    user_tables,
)
from x86quant.tuning.fit import _assemble, _problems, denials_of
from x86quant.tuning.measurement_files import read
from x86quant.tuning.regret import judge, summarize
from x86quant.tuning.samples import samples, wrong_results

AMX = isa.at("amx_int8")
VNNI = isa.at("avx512_vnni")
LINEAR = OpSpec("linear", 64, 64, rows=32, caller="stock", threads=1)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("X86QUANT_RULES", raising=False)
    # What is in force must not depend on which levels have a table of their own.
    monkeypatch.setattr(active_rules, "shipped_tables", lambda: {"default": find_table("default")})
    active_rules.reset()
    yield
    active_rules.reset()


def put(name: str, text: str) -> Path:
    user_rules_dir().mkdir(parents=True, exist_ok=True)
    path = user_rules_dir() / f"{name}.toml"
    path.write_text(text)
    return path


def table_text(name: str = "mine", kernel: str = "onednn", more: str = "") -> str:
    return (
        f'schema = 1\nname = "{name}"\nextends = "default"\n{more}'
        f'[hardware]\nisa = "amx_int8"\n[[rule]]\nop = "linear"\nuse = "{kernel}"\n'
    )


def pick(table: RuleTable, spec: OpSpec = LINEAR) -> Choice:
    return choose(spec, cpu=AMX, table=table, kernels=all_kernels())


# ---------------------------------------------------------------------------- found and used


def test_a_users_table_is_used_on_the_cpu_it_is_for() -> None:
    put("mine", table_text())
    assert current_rules(AMX).name == "mine"
    assert current_rules(VNNI).name == "default"
    assert pick(current_rules(AMX)).rule == "mine#1"


def test_what_is_named_wins_over_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    put("mine", table_text())
    with use_rules("pytorch-2.0"):
        assert current_rules(AMX).name == "pytorch-2.0"
    monkeypatch.setenv("X86QUANT_RULES", "default")
    active_rules.reset()
    assert current_rules(AMX).name == "default"


def test_a_users_table_has_a_name_but_cannot_hide_a_shipped_one() -> None:
    put("mine", table_text())
    put("pytorch-2.0", table_text("pytorch-2.0"))
    with use_rules("mine") as table:
        assert Path(table.path) == user_rules_dir() / "mine.toml"
    with use_rules("pytorch-2.0") as table:
        assert Path(table.path) == find_table("pytorch-2.0")


def test_installing_is_found_next_time_and_replaces() -> None:
    first = parse_table(table_text("tuned-amx_int8"))
    assert install_user_table(first, "amx_int8") == user_table_path("amx_int8")
    assert user_tables() == {"tuned-amx_int8": user_table_path("amx_int8")}
    active_rules.reset()
    assert pick(current_rules(AMX)).kernel == "onednn"
    install_user_table(parse_table(table_text("tuned-amx_int8", "fbgemm")), "amx_int8")
    active_rules.reset()
    assert pick(current_rules(AMX)).kernel == "fbgemm"


def test_a_failed_write_leaves_the_old_table(monkeypatch: pytest.MonkeyPatch) -> None:
    path = install_user_table(parse_table(table_text()), "amx_int8")
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="the disk is full, what was there before is untouched"):
        install_user_table(parse_table(table_text(kernel="fbgemm")), "amx_int8")
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_the_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert user_folder() == tmp_path / "cache" / "x86quant"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_rules_dir() == tmp_path / "home" / ".cache" / "x86quant" / "rules"
    assert user_tables() == {}


def test_a_user_without_a_home_gets_the_shipped_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert current_rules(AMX).name == "default"


# ---------------------------------------------------------------------------- broken


@pytest.mark.parametrize(
    "text",
    ["", "schema = 1\n", "\x00", table_text(more='extnds = "x"\n'), table_text(kernel="gone")],
)
def test_a_broken_one_is_skipped_with_one_warning(text: str) -> None:
    put("broken", text)
    put("mine", table_text())
    with pytest.warns(X86QuantWarning, match=r"rule table skipped: .*broken\.toml") as told:
        assert current_rules(AMX).name == "mine"
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert current_rules(VNNI).name == "default"
        assert current_rules(AMX).name == "mine"


def test_an_unknown_kernel_is_an_error_that_names_the_rule_where_the_table_is_named() -> None:
    path = put("mine", table_text(kernel="gone"))
    with pytest.raises(RuleError, match=r"mine\.toml:\d+: mine#1 names the unknown kernel 'gone'"):
        use_rules(path)


# ---------------------------------------------------------------------------- shipped


@pytest.mark.parametrize("level", isa.LEVELS)
def test_every_level_has_a_table(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_rules, "shipped_tables", shipped_tables)
    assert shipped_table(isa.at(level)).provenance["isa"] == level


@pytest.mark.parametrize(
    "name",
    sorted(
        {x.stem for x in (SHIPPED / "measurements").iterdir()} - {"stock_kernels", "embeddings"}
    ),
)
def test_a_fitted_table_chooses_well(name: str) -> None:
    table = read_table(find_table(name))
    assert table.name == name
    regret = table.provenance["regret"]
    assert isinstance(regret, float)
    assert regret <= 0.03
    assert regret <= float(table.provenance["regret_pytorch_2_0"]) / 3
    # Not only by its own account: of the measurements that it was fitted to, one in nine.
    found = samples(read(SHIPPED / "measurements" / f"{name}.csv"))[::9]
    chosen = summarize(judge(table, found))
    stock = summarize(judge(read_table(find_table("pytorch-2.0")), found))
    assert chosen is not None
    assert stock is not None
    assert chosen.mean <= 0.04
    assert chosen.mean <= stock.mean / 2


def test_a_shipped_table_is_what_its_measurements_give() -> None:
    table = read_table(find_table("avx512"))
    measured = read(SHIPPED / "measurements" / "avx512.csv")
    problems = _problems(samples(measured))
    denials = denials_of(wrong_results(measured))
    again = _assemble("avx512", problems, read_table(find_table("default")), denials)
    again = dataclasses.replace(
        again,
        description=table.description,
        hardware=table.hardware,
        provenance=table.provenance,
    )
    assert dumps(again) == find_table("avx512").read_text()


def test_tables_say_whether_they_were_measured_on_a_cpu_like_this_one() -> None:
    table = read_table(find_table("avx2"))
    here = dataclasses.replace(isa.at("avx2"), vendor="GenuineIntel", family=6, model=167)
    assert likeness(table, here).degree == "same"
    assert likeness(table, dataclasses.replace(here, model=60)).degree == "family"
    zen = likeness(table, dataclasses.replace(here, vendor="AuthenticAMD", family=25))
    assert zen.degree == "other"
    assert "tune --quick" in str(zen)
    assert "GenuineIntel family 6 model 167 at avx2" in str(zen)
    assert likeness(read_table(find_table("default")), here).degree == "unknown"


def test_of_several_tables_of_a_level_the_one_measured_on_the_likest_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = {"default": find_table("default")}
    text = find_table("avx2").read_text()
    for name, model in (("avx2", "167"), ("avx2-intel-6-60", "60"), ("avx2-amd-25-1", "1")):
        shipped[name] = tmp_path / f"{name}.toml"
        made = text.replace('name = "avx2"', f'name = "{name}"').replace('"167"', f'"{model}"')
        if "amd" in name:
            made = made.replace("GenuineIntel", "AuthenticAMD").replace(
                'family = "6"', 'family = "25"'
            )
        shipped[name].write_text(made)
    monkeypatch.setattr(active_rules, "shipped_tables", lambda: dict(shipped))
    here = isa.at("avx2")
    chosen = [
        shipped_table(dataclasses.replace(here, vendor=vendor, family=family, model=model)).name
        for vendor, family, model in (
            ("GenuineIntel", 6, 60),
            ("GenuineIntel", 6, 167),
            ("GenuineIntel", 6, 94),  # of the two of its family the first
            ("AuthenticAMD", 25, 33),
            ("CentaurHauls", 7, 59),  # like none: the level's own
        )
    ]
    assert chosen == ["avx2-intel-6-60", "avx2", "avx2", "avx2-amd-25-1", "avx2"]


def test_the_shipped_table_of_the_nearest_lower_level(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = {"default": find_table("default")}
    for level in ("avx2", "avx512_vnni"):
        shipped[level] = tmp_path / f"{level}.toml"
        shipped[level].write_text(table_text(level).replace("amx_int8", level))
    monkeypatch.setattr(active_rules, "shipped_tables", lambda: dict(shipped))
    names = {level: shipped_table(isa.at(level)).name for level in isa.LEVELS}
    assert names == {
        "avx2": "avx2",
        "avx512": "avx2",
        "avx_vnni": "avx2",
        "avx512_vnni": "avx512_vnni",
        "amx_int8": "avx512_vnni",
    }


# ---------------------------------------------------------------------------- stale


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('torch = "2.9.1+cpu"', r"torch 2\.9\.1\+cpu, not 2\."),
        ('x86quant = "0.0.7"', r"x86quant 0\.0\.7, not 0\."),
    ],
)
def test_a_stale_table_works_and_info_says_so(line: str, words: str, capsys) -> None:
    put("mine", table_text(more=f"[provenance]\n{line}\n"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pick(current_rules(AMX)).kernel == "onednn"
        with use_rules("mine"):
            assert main(["info"]) == 0
    assert re.search(rf"{words}.*Measure again: x86quant tune$", capsys.readouterr().out, re.M)


def test_the_command_for_a_table_of_ones_own_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(table_text(more='[provenance]\ntorch = "2.9"\n'))
    note = active_rules.stale(read_table(path))
    assert note is not None
    assert f"rules fit new.csv --out {path}" in note


def test_one_of_several_measured_versions_is_enough() -> None:
    table = parse_table(table_text(more='[provenance]\ntorch = "2.9.0 | 2.13.0 | 2.14.0"\n'))
    assert active_rules.stale(table) is None


# ---------------------------------------------------------------------------- entries, denials


EXACT = (
    '[[entry]]\nspec = { op = "linear", in_channels = 64, out_channels = 64, caller = "stock" }\n'
    'use = "qnnpack"\n'
)
DENIED = (
    '[[deny]]\nspec = { op = "linear", in_channels = 64, out_channels = 64 }\n'
    'kernel = "onednn"\nbecause = "2 steps off"\n'
)


def test_an_exact_entry_comes_before_the_rules() -> None:
    table = parse_table(table_text() + EXACT)
    assert (pick(table).kernel, pick(table).rule) == ("qnnpack", "mine:entry#1")
    assert pick(table, LINEAR.replace(in_channels=65)).rule == "mine#1"
    assert pick(table, LINEAR.replace(caller="graph")).rule == "mine#1"


def test_a_denied_kernel_is_passed_over_whoever_prefers_it() -> None:
    table = parse_table(table_text() + DENIED)
    choice = pick(table)
    assert choice.kernel == "fbgemm"
    assert dict(choice.passed_over)["onednn"] == ("denied by mine:deny#1: 2 steps off",)
    assert pick(table, LINEAR.replace(out_channels=65)).kernel == "onednn"
    assert parse_table(dumps(table)) == table
    assert "mine:deny#1: linear 64→64: never onednn  (2 steps off)" in str(table)
    above = parse_table(
        table_text("above").replace('"default"', f'"{put("base", table_text() + DENIED)}"')
    )
    assert pick(above).kernel == "fbgemm"
    other = choose(LINEAR, cpu=VNNI, table=table, kernels=all_kernels())
    assert other.kernel == "onednn"  # found wrong on other hardware


def test_when_all_are_denied_the_error_says_so() -> None:
    kernels = {"onednn": all_kernels()["onednn"]}
    with pytest.raises(UnsupportedError, match="denied by mine:deny#1: 2 steps off"):
        choose(LINEAR, cpu=AMX, table=parse_table(table_text() + DENIED), kernels=kernels)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[deny]]\nkernel = 'onednn'\n", "no spec"),
        (DENIED.replace('kernel = "onednn"\n', ""), "no kernel"),
        (DENIED + DENIED, "same spec as line"),
        (DENIED.replace("because", "reason"), "unknown key 'reason'"),
        (DENIED.replace("64 }", "64, rows = -1 }"), "rows = -1 is not int"),
    ],
)
def test_denials_are_checked(text: str, words: str) -> None:
    with pytest.raises(RuleError, match=words):
        parse_table(table_text() + text)


def test_a_denied_kernel_must_be_known() -> None:
    text = table_text() + DENIED.replace('"onednn"', '"gone"')
    with pytest.raises(RuleError, match="mine:deny#1 names the unknown kernel 'gone'"):
        parse_table(text, kernels=all_kernels())


def test_a_denial_of_some_rows_switches_there() -> None:
    text = table_text() + DENIED.replace("64 }", "64, rows = 7 }")
    breaks = parse_table(text).row_breaks(LINEAR.replace(rows=None), AMX)
    assert {7, 8} <= set(breaks)


def test_shipped_tables_read() -> None:
    assert read_table(find_table("default")).denials == ()

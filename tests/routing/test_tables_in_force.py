"""Which table is in force: for a process, a thread or a block, and what is said of a broken one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.routing.fake_kernels import (
    AMX,
    STOCK,
    VNNI,
    clean,
)
from x86quant.errors import RuleError, X86QuantWarning
from x86quant.routing import in_force as active_rules
from x86quant.routing.in_force import current_overrides, current_rules, override, use_rules
from x86quant.tables.shipped import find_table

__all__ = ["clean"]


def in_force(cpu: Any = AMX) -> str:
    return current_rules(cpu).name


def test_use_rules_for_the_process_and_undone() -> None:
    assert in_force() == "default"
    handle = use_rules("pytorch-2.0")
    assert in_force() == "pytorch-2.0"
    handle.undo()
    assert in_force() == "default"


def test_use_rules_in_a_block_also_after_an_exception() -> None:
    def fail_inside() -> None:
        with use_rules("default") as table_in_block:
            assert table_in_block.name == in_force() == "default"
            with use_rules(STOCK):
                assert in_force() == "pytorch-2.0"
            assert in_force() == "default"
            raise KeyError

    use_rules("pytorch-2.0")
    with pytest.raises(KeyError):
        fail_inside()
    assert in_force() == "pytorch-2.0"


def test_a_block_counts_in_its_own_thread_only() -> None:
    inside, seen = threading.Event(), threading.Event()
    names: list[str] = []

    def other() -> None:
        inside.wait(10)
        names.append(in_force())
        with use_rules("default"):
            names.append(in_force())
        seen.set()

    thread = threading.Thread(target=other)
    thread.start()
    with use_rules("pytorch-2.0"):
        inside.set()
        assert seen.wait(10)
        assert in_force() == "pytorch-2.0"
    thread.join()
    assert names == ["default", "default"]
    assert in_force() == "default"


def test_many_threads_leave_nothing_behind() -> None:
    def work() -> None:
        for _ in range(200):
            with use_rules(STOCK), override("fbgemm"):
                assert in_force() == "pytorch-2.0"
                assert len(current_overrides()) >= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert in_force() == "default"
    assert current_overrides() == ()


def test_a_wrong_table_changes_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text('schema = 1\nname = "x"\n[[rule]]\nop = "*"\nuse = "nope"\n')
    with pytest.raises(RuleError, match="unknown kernel 'nope'"):
        use_rules(broken)
    with pytest.raises(RuleError, match="unknown rule table"):
        use_rules("nope")
    assert in_force() == "default"


def test_the_variable_is_read_once_and_named_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X86QUANT_RULES", "pytorch-2.0")
    assert in_force() == "pytorch-2.0"
    monkeypatch.setenv("X86QUANT_RULES", "pytorch-9")
    assert in_force() == "pytorch-2.0"
    with use_rules("default"):
        assert in_force() == "default"
    active_rules.reset()
    with pytest.raises(RuleError, match="X86QUANT_RULES=pytorch-9: unknown rule table"):
        in_force()
    monkeypatch.delenv("X86QUANT_RULES")
    active_rules.reset()
    without = in_force()
    monkeypatch.setenv("X86QUANT_RULES", "")
    active_rules.reset()
    assert in_force() == without, "empty means unset"


def test_a_table_for_this_hardware_is_found_and_a_broken_one_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = {"default": find_table("default"), "broken": tmp_path / "broken.toml"}
    shipped["broken"].write_text("schema = 1\n")
    shipped["tuned"] = tmp_path / "tuned.toml"
    shipped["tuned"].write_text(
        'schema = 1\nname = "tuned"\nextends = "default"\n[hardware]\nisa = "amx_int8"\n'
    )
    monkeypatch.setattr(active_rules, "shipped_tables", lambda: dict(shipped))
    with pytest.warns(X86QuantWarning, match=r"skipped: .*broken\.toml:1: no name"):
        assert in_force() == "tuned"
    assert in_force(VNNI) == "default"  # said once

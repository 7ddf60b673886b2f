"""Into how many processes a machine is cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from x86quant.hardware.allowance import memory_nodes
from x86quant.hardware.processes import Cut, for_one_answer, for_rate

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("cores", "nodes", "rate", "soon"),
    [
        (1, 1, (1, 1), (1, 1)),
        (2, 1, (2, 1), (1, 2)),
        (7, 1, (7, 1), (1, 7)),
        (8, 1, (2, 4), (1, 8)),
        (16, 1, (4, 4), (1, 16)),
        (64, 2, (16, 4), (1, 16)),
        (192, 2, (48, 4), (1, 16)),
        (1, 2, (1, 1), (1, 1)),  # a quota of one core on both
        (12, 2, (12, 1), (1, 6)),
    ],
)
def test_no_cut_has_more_threads_than_cores(
    cores: int, nodes: int, rate: tuple[int, int], soon: tuple[int, int]
) -> None:
    """And none of its processes lies on two nodes."""
    assert for_rate(cores, nodes) == Cut(*rate)
    assert for_one_answer(cores, nodes) == Cut(*soon)


def test_the_documented_cuts_are_those_that_info_says() -> None:
    text = (DOCS / "containers.md").read_text()
    for cores, nodes in ((2, 1), (16, 1), (64, 2), (192, 2)):
        row = f"| {cores}, {nodes} | {for_rate(cores, nodes)} | {for_one_answer(cores, nodes)} |"
        assert row in text


def test_nodes_are_those_of_the_cores_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sys" / "devices" / "system" / "node"
    for number, cpus in enumerate(("0-1,8-9\n", "2-3\n", "4\n", "\n")):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(cpus)
    for mask, nodes in (({0, 9}, 1), ({1, 2}, 2), ({1, 3, 4}, 3), ({64}, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, mask=mask: mask)
        assert memory_nodes(tmp_path) == nodes
    (folder / "node0" / "cpulist").write_text("none")
    assert memory_nodes(tmp_path) == 1
    assert memory_nodes(tmp_path / "elsewhere") == 1

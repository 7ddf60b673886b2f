"""Which nodes of memory large weights are spread over: those whose cores the process may use."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cpp import program

_MAIN = """
#include <cstdio>
#include <cstdlib>
#include "runtime/numa.h"
int main(int count, char** words) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (int i = 2; i < count; ++i) CPU_SET(std::atoi(words[i]), &cpus);
  for (int node : x86quant::runtime::nodes_of(cpus, words[1])) std::printf("%d ", node);
  const size_t size = size_t{8} << 20;
  void* memory = std::aligned_alloc(4096, size);
  x86quant::runtime::spread_over_nodes(memory, size);
  static_cast<char*>(memory)[size - 1] = 1;
}
"""


@pytest.fixture(scope="module")
def nodes_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program(tmp_path_factory.mktemp("nodes"), _MAIN, ["runtime/numa.cpp"])


@pytest.mark.parametrize(
    ("files", "cpus", "nodes"),
    [
        ({"online": "0-1\n", "node0": "0-1,4-5\n", "node1": "2-3,6-7\n"}, "0 1 5", "0"),
        ({"online": "0-1\n", "node0": "0-1,4-5\n", "node1": "2-3,6-7\n"}, "5 6", "0 1"),
        ({"online": "0,2\n", "node0": "0\n", "node2": "1\n"}, "0 1", "0 2"),
        ({"online": "0-1\n", "node0": "0-3\n", "node1": "\n"}, "0 3", "0"),  # of memory alone
        ({"online": "0\n", "node0": "0-2000000000\n"}, "0", ""),
        ({"online": "many\n"}, "0", ""),
        ({}, "0", ""),
    ],
)
def test_nodes_of_the_cores_in_use(
    nodes_of: Path, tmp_path: Path, files: dict[str, str], cpus: str, nodes: str
) -> None:
    folder = tmp_path / "sys" / "devices" / "system" / "node"
    for name, text in files.items():
        path = folder / (name if name == "online" else f"{name}/cpulist")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [str(nodes_of), str(tmp_path), *cpus.split()]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.split() == nodes.split()

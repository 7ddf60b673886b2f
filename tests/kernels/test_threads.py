"""One run on many threads: the same results, no hang, errors told; more threads than CPUs too.

In processes of their own: the number of threads is a process's.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests import sanitized

_MODEL = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
import x86quant

torch.manual_seed(0)

class Wide(nn.Module):
    # Steps that are worth sharing, and small ones between them.
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), nn.ReLU())
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.point = nn.Conv2d(64, 64, 1)
        self.pool = nn.MaxPool2d(2)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(64, 64, 1), nn.Sigmoid())
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        y = self.first(x)
        y = y + self.point(self.depthwise(y))
        y = self.pool(y * self.gate(y))
        return self.head(y.mean((2, 3)))

example = torch.randn(1, 8, 64, 64)
with torch.no_grad():
    module = x86quant.quantize(Wide().eval(), [(example,)], mode="static", speed_check=False,
                               progress=False)
torch.set_num_threads(1)
want = module(example)
"""


def run(script: str) -> str:
    """What ``script`` prints; it has to end."""
    done = subprocess.run(
        [sys.executable, "-c", _MODEL + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("batch", [1, 5])
def test_any_number_of_threads_gives_the_same_results(batch: int) -> None:
    rounds = 4 if sanitized.RUNNING and batch > 1 else 20  # each takes seconds there
    out = run(f"""
        x = example.expand({batch}, -1, -1, -1).contiguous()
        torch.set_num_threads(1)
        want = module(x)
        for threads in (1, 2, 4, 16, 64):
            torch.set_num_threads(threads)
            print(all(torch.equal(module(x), want) for _ in range({rounds})))
    """)
    assert out.split() == ["True"] * 5


def test_threads_that_share_one_cpu_do_not_wait_for_ever() -> None:
    out = run("""
        torch.set_num_threads(4)
        module(example)  # with all CPUs
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), {min(os.sched_getaffinity(0))})
        print(all(torch.equal(module(example), want) for _ in range(20)))
    """)
    assert out.split() == ["True"]


def test_callers_side_by_side_each_have_their_threads() -> None:
    out = run("""
        def call(right):
            torch.set_num_threads(3)
            right.append(all(torch.equal(module(example), want) for _ in range(20)))

        right = []
        callers = [threading.Thread(target=call, args=(right,)) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        print(right)
    """)
    assert out.strip() == "[True, True, True, True]"


def test_torch_has_its_threads_again_after_a_run() -> None:
    out = run("""
        torch.set_num_threads(3)
        a, b = torch.randn(300, 400), torch.randn(400, 500)
        product = a @ b
        module(example)
        print(torch.equal(a @ b, product), torch.get_num_threads())
    """)
    assert out.split() == ["True", "3"]


def test_what_a_share_throws_is_thrown_to_the_caller_and_the_next_run_is_right() -> None:
    out = run("""
        class Lookup(nn.Module):
            def __init__(self):
                super().__init__()
                self.tables = nn.ModuleList(nn.EmbeddingBag(500, 32, mode="sum") for _ in range(4))
                self.top = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256))
            def forward(self, ids):
                rows = [t(ids[:, i]) for i, t in enumerate(self.tables)]
                return self.top(torch.cat(rows, 1))
        ids = torch.randint(0, 500, (512, 4, 8))
        lookup = x86quant.quantize(Lookup().eval(), [(ids,)], speed_check=False, progress=False)
        torch.set_num_threads(1)
        want = lookup(ids)
        torch.set_num_threads(4)
        wrong = ids.clone()
        wrong[400, 2, 5] = 500
        for _ in range(3):
            try:
                lookup(wrong)
            except Exception as error:
                print(type(error).__name__, "index 500" in str(error))
            print(torch.equal(lookup(ids), want))
    """)
    assert out.split() == ["InvalidInputError", "True", "True"] * 3

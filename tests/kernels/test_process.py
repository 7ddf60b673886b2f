"""What the compiled part does to the process it runs in: forks, permissions, memory.

Each in a process of its own, because each changes it for good.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from x86quant.hardware.cpu import cpu

_MODEL = """
import os, signal, time, warnings
import torch
from torch import nn
import x86quant
from x86quant.dynamic import DynamicLinear

torch.manual_seed(0)
torch.set_num_threads(3)
linear = DynamicLinear.from_float(nn.Linear(512, 2048))
x = torch.randn(256, 512)

def status(child):
    # The exit status of a child; of one that hangs, that of a signal.
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(code)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def run(script: str, model: str = _MODEL, **environment: str) -> str:
    """What ``script`` prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", model + textwrap.dedent(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("started_by", ["linear(x)", "x @ torch.randn(512, 900)"])
def test_a_process_forked_after_a_threaded_run_does_not_hang(started_by: str) -> None:
    out = run(f"""
        want = linear(x)
        {started_by}
        child = os.fork()
        if child == 0:
            right = torch.equal(linear(x), want) and torch.get_num_threads() == 3
            os._exit(0 if right else 1)
        print(status(child))
        print(torch.equal(linear(x), want), torch.get_num_threads())
    """)
    assert out.split() == ["0", "True", "3"]


def test_a_forked_process_may_fork_again_and_use_several_threads() -> None:
    out = run("""
        want = linear(x)
        child = os.fork()
        if child == 0:
            linear(x)
            grandchild = os.fork()
            if grandchild == 0:
                torch.set_num_threads(2)
                os._exit(0 if torch.equal(linear(x), want) else 1)
            os._exit(status(grandchild))
        print(status(child))
    """)
    assert out.split() == ["0"]


def test_workers_of_a_data_loader_run_a_compiled_model() -> None:
    out = run("""
        from torch.utils.data import DataLoader, Dataset

        class Rows(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                torch.set_num_threads(2)  # a worker starts with one
                return linear(x)[index]

        want = linear(x)[:4]
        loader = DataLoader(Rows(), batch_size=4, num_workers=2, timeout=60,
                            multiprocessing_context="fork")
        print(all(torch.equal(got, want) for got in loader))
    """)
    assert out.split() == ["True"]


_REFUSE_AMX = """
# A filter as containers have it: arch_prctl(ARCH_REQ_XCOMP_PERM) is not permitted.
import ctypes, platform, struct

assert platform.machine() == "x86_64"
def instruction(code, jump_true, jump_false, value):
    return struct.pack("HBBI", code, jump_true, jump_false, value)
load, equal, give = 0x20, 0x15, 0x06
program = b"".join([
    instruction(load, 0, 0, 0),              # the number of the system call
    instruction(equal, 0, 3, 158),           # arch_prctl
    instruction(load, 0, 0, 16),             # its first argument
    instruction(equal, 0, 1, 0x1023),        # ARCH_REQ_XCOMP_PERM
    instruction(give, 0, 0, 0x00050000 | 1), # EPERM
    instruction(give, 0, 0, 0x7FFF0000),     # everything else
])
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(6, program)), 0, 0) == 0
"""


@pytest.mark.skipif(not cpu().amx, reason="the CPU has no AMX")
def test_where_amx_is_refused_everything_is_for_the_level_below() -> None:
    """The CPU has AMX and others were seen to use it. One note says so; results are equal."""
    script = """
        here = x86quant.cpu()
        print(here.isa)
        print(sum("refuses its use to this process" in note for note in here.notes))
        print(float(linear(x).double().sum()))
    """
    allowed = run(script).split()
    refused = run(script, _REFUSE_AMX + _MODEL).split()
    assert allowed[:2] == ["amx_int8", "0"]
    assert refused[:2] == ["avx512_vnni", "1"]
    assert allowed[2] == refused[2]


@pytest.mark.skipif(not cpu().amx, reason="the CPU has no AMX")
def test_native_kernels_that_lack_a_part_of_amx_are_packed_for_the_level_below() -> None:
    """Once, with one warning; here the refusal comes after ``cpu()`` has found no fault."""
    script = """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                DynamicLinear.from_float(nn.Linear(512, 2048))(x)
        notes = [str(w.message) for w in caught if w.category.__name__ == "X86QuantWarning"]
        print(len(notes), "use avx512_vnni instead of amx_int8" in "".join(notes))
        print(float(linear(x).double().sum()))
    """
    late = """
import x86quant.hardware.amx_probe
x86quant.hardware.amx_probe.permitted = lambda: True
"""
    allowed = run(script).split()
    refused = run(script, _REFUSE_AMX + late + _MODEL).split()
    assert allowed[:2] == ["0", "False"]
    assert refused[:2] == ["1", "True"]
    assert allowed[2] == refused[2]


_MEMORY = """
def memory(name):
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(name)]
    return int(line.split()[1]) / 1024
"""


def test_rows_of_a_dynamic_linear_are_quantized_in_blocks() -> None:
    """Codes of all rows would take 134 MB here."""
    out = run(
        """
        linear = DynamicLinear.from_float(nn.Linear(2048, 8))
        x = torch.ones(1, 2048).expand(65536, 2048)[:, :]
        rows = torch.ones(65536, 2048)
        linear(rows[:8])
        before = memory("VmRSS")
        linear(rows)
        print(memory("VmHWM") - before)
        """,
        _MODEL + _MEMORY,
    )
    assert float(out) < 64


def test_working_memory_of_a_large_call_is_given_back() -> None:
    """A slice of channels, which FBGEMM cannot read in place, takes 64 MB."""
    out = run(
        """
        from x86quant import extension
        from x86quant.runtime.programs import NativeStep
        pack = extension.native().pack_graph_conv(
            "fbgemm", torch.ones(8, 64, 1, 1, 1, dtype=torch.int8), torch.ones(8), None, None,
            [1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 255, 0, 0], 0.0,
        )
        n = 1024
        program = extension.native().Program(0, 1)
        program.expect([1, n, n, 128], [n * n * 128, n * 128, 128, 1], "uint8")
        program.add_output([1, n, n, 8], [n * n * 8, n * 8, 8, 1], "uint8")
        def words(base, c, of):
            return [base, 0, 1, 1, n, n, c, n * n * of, n * n * of, n * of, of]
        tensors = {"in": words(1, 64, 128), "out": words(2, 8, 8)}
        NativeStep("conv", {"pack": pack, **tensors}).add_to(program)
        program.check_reach()
        x = torch.ones(1, n, n, 128, dtype=torch.uint8)
        before = memory("VmRSS")
        (out,) = program.run([x])
        del out
        print(memory("VmRSS") - before, memory("VmHWM") - before)
        """,
        _MODEL + _MEMORY,
    )
    left, most = map(float, out.split())
    assert most > 64
    assert left < 32


_SAVED = """
import sys
import torch
from torch import nn
import x86quant

class Scaled(nn.Module):
    # What has an argument that no tensor is comes back as a module with a guard.
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x, scale=1.0):
        return self.b(torch.relu(self.a(x)) * scale)

class Gated(nn.Module):
    # What is multiplied has other sizes than what multiplies it.
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        y = torch.relu(self.a(x))
        return y * torch.sigmoid(self.b(y.mean((2, 3), keepdim=True)))

def images(batch):
    return torch.randn(batch, 3, 8, 8)

def model(kind):
    if kind == "dynamic":
        return x86quant.to_dynamic(nn.Sequential(nn.Linear(8, 64), nn.ReLU()).eval())
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    made = {"guarded": Scaled(), "gated": Gated()}.get(kind, plain)
    return x86quant.quantize(made.eval(), [images(2)], progress=False, speed_check=False)
"""


@pytest.mark.parametrize("kind", ["static", "guarded", "gated", "dynamic"])
def test_loading_and_running_a_model_imports_no_compiler(kind: str, tmp_path: Path) -> None:
    """torch.compile's half of torch takes as long to import as the other one."""
    path = tmp_path / "model.x86q"
    run(f"x86quant.save(model({kind!r}), {str(path)!r}, example_inputs=(images(2),))", _SAVED)
    found = run(
        f"""
        loaded = x86quant.load({str(path)!r})
        print(*(tuple(loaded(images(batch)).shape)[0] for batch in (1, 2)))
        print(*({{"torch._dynamo", "torch._inductor", "sympy"}} & {{*sys.modules}}))
        """,
        _SAVED,
    )
    assert found.split() == ["1", "2"]

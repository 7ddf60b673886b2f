"""Processes that are forked while other threads of theirs hold locks or run loops."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import torch
from torch import nn

import x86quant

_RUNS = """
import ctypes, os, sys, threading, time

class Tensor(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("rank", ctypes.c_int32), ("sizes", ctypes.c_int64 * 8),
                ("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]

class Options(ctypes.Structure):
    _fields_ = [("threads", ctypes.c_int32), ("isa", ctypes.c_char_p), ("cache", ctypes.c_char_p)]

library, size = ctypes.CDLL(sys.argv[1]), ctypes.c_size_t
program = ctypes.c_void_p()
options = ctypes.byref(Options(2))
assert library.x86quant_load(sys.argv[2].encode(), options, ctypes.byref(program)) == 0

def run():
    tensors = (Tensor * 2)()
    library.x86quant_input(program, size(0), size(0), ctypes.byref(tensors[0]))
    library.x86quant_output(program, size(0), size(0), ctypes.byref(tensors[1]))
    memory = [ctypes.create_string_buffer(tensor.bytes) for tensor in tensors]
    for tensor, place in zip(tensors, memory):
        tensor.data = ctypes.addressof(place)
    at = [ctypes.byref(tensor) for tensor in tensors]
    assert library.x86quant_run(program, at[0], size(1), at[1], size(1)) == 0
    return memory[1].raw

expected = run()
threading.Thread(target=lambda: [run() for _ in iter(int, 1)], daemon=True).start()
for _ in range(30):
    time.sleep(0.003)
    child = os.fork()
    if child == 0:
        same = run() == expected
        os._exit(0 if same and len(os.listdir("/proc/self/task")) == 2 else 1 if same else 2)
    assert os.waitpid(child, 0)[1] == 0, "a forked process has one thread, or other results"
print("same")
os._exit(0)
"""


def test_a_process_forked_in_mid_run_has_threads_of_its_own(tmp_path: Path) -> None:
    """The pool was another thread's, which is not there to give it back."""
    model = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(4))).eval()
    x = torch.randn(1, 64, 64, 64)
    module = x86quant.quantize(model, [(x,)], mode="static", speed_check=False, progress=False)
    file = tmp_path / "model.xq"
    x86quant.export_program(module, file, [x])
    library = str(x86quant.cpp_paths().library)
    command = [sys.executable, "-c", _RUNS, library, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "same\n", done.stderr


def test_a_process_forked_while_weights_are_packed_can_pack() -> None:
    """Weights share memory, and programs a list of their numbers, each behind a lock."""
    script = textwrap.dedent(
        """
        import os, threading, warnings
        warnings.simplefilter("ignore")
        import torch
        from x86quant import extension
        from x86quant.packing.linear_dynamic import row_linear
        extension.load()
        torch.set_num_threads(1)
        program = extension.native().Program(0, 1)  # torch's own locks are not looked at here
        weights = torch.ones(256, 512, dtype=torch.int8), torch.ones(256), None

        def work():
            row_linear(weights, None)
            return program.check_reach

        threading.Thread(target=lambda: [work() for _ in iter(int, 1)], daemon=True).start()
        for _ in range(60):
            child = os.fork()
            if child == 0:
                work()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        print("done")
        os._exit(0)
        """
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr

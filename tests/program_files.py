"""Program files made by hand, and running them where nothing that goes wrong ends the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

import x86quant
from x86quant.serving.program_file import VERSION, sealed

#: Loads and runs files on inputs of zeros and of bytes 0 to 255 again and again; a line for each.
_ATTEMPTS = """
import ctypes, sys

class Tensor(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("rank", ctypes.c_int32), ("sizes", ctypes.c_int64 * 8),
                ("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]

class Options(ctypes.Structure):
    _fields_ = [("threads", ctypes.c_int32), ("isa", ctypes.c_char_p), ("cache", ctypes.c_char_p)]

library = ctypes.CDLL(sys.argv[1])
library.x86quant_error.restype = ctypes.c_char_p
for name in ("plans", "inputs", "outputs"):
    getattr(library, f"x86quant_{name}").restype = ctypes.c_size_t

def attempt(path):
    program = ctypes.c_void_p()
    if library.x86quant_load(path.encode(), ctypes.byref(Options(1)), ctypes.byref(program)):
        return library.x86quant_error().decode(errors="replace")
    size = ctypes.c_size_t
    inputs = (Tensor * library.x86quant_inputs(program))()
    outputs = (Tensor * library.x86quant_outputs(program))()
    memory, said = [], []
    for pattern in (bytes(256), bytes(range(256))):
        for tensors, name in ((inputs, "x86quant_input"), (outputs, "x86quant_output")):
            for i, tensor in enumerate(tensors):
                getattr(library, name)(program, size(0), size(i), ctypes.byref(tensor))
                held = (pattern * (tensor.bytes // 256 + 1))[: tensor.bytes]
                memory.append(ctypes.create_string_buffer(held, tensor.bytes))
                tensor.data = ctypes.addressof(memory[-1])
        before = [ctypes.string_at(tensor.data, tensor.bytes) for tensor in inputs]
        counts = size(len(inputs)), size(len(outputs))
        status = library.x86quant_run(program, inputs, counts[0], outputs, counts[1])
        said.append(library.x86quant_error().decode(errors="replace") if status else "ran")
        if before != [ctypes.string_at(tensor.data, tensor.bytes) for tensor in inputs]:
            said.append("AN INPUT WAS CHANGED")
    library.x86quant_free(program)
    return "; ".join(said)

for path in sys.stdin.read().split("\\n"):
    print(path, end="\\t", flush=True)
    print(attempt(path).replace("\\n", " "), flush=True)
"""


def layout(sizes: Sequence[int], type_name: str) -> dict[str, Any]:
    """A contiguous input or output."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= size
    return {"sizes": list(sizes), "strides": strides, "type": type_name}


def plan(
    arena: int,
    inputs: Sequence[dict[str, Any]],
    outputs: Sequence[dict[str, Any]],
    steps: Sequence[tuple[str, Mapping[str, Any]]],
    parts: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One plan of one stage."""
    made = [{"kind": kind, "fields": dict(fields)} for kind, fields in steps]
    stages = [{"steps": made, "parts": parts}]
    found = {"inputs": list(inputs), "outputs": list(outputs), "kept": [], "stages": stages}
    return {"arena": arena, **found}


def write(
    path: Path,
    plans: Sequence[dict[str, Any]],
    tensors: Mapping[str, torch.Tensor] | None = None,
    packs: Sequence[dict[str, Any]] = (),
    row_packs: Sequence[dict[str, Any]] = (),
) -> Path:
    """A program file with a right checksum."""
    manifest = {"packs": list(packs), "row_packs": list(row_packs), "plans": list(plans)}
    text = f"x86quant-program {VERSION} {'0' * 8}\n{json.dumps(manifest)}"
    path.write_bytes(sealed(save(dict(tensors or {}), {"x86quant": text})))
    return path


def attempts(paths: Sequence[Path], megabytes: int | None = None) -> list[str]:
    """What loading and running each file said, in one process that may not crash."""
    command = [sys.executable, "-c", _ATTEMPTS, str(x86quant.cpp_paths().library)]
    if megabytes is not None:
        command = ["prlimit", f"--as={megabytes << 20}", *command]
    done = subprocess.run(
        command, input="\n".join(map(str, paths)), capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"status {done.returncode} at {lines[-1]}\n{done.stderr[-2000:]}"
    assert len(lines) == len(paths)
    return [line.partition("\t")[2] for line in lines]

"""Which CPU this process sees: vendor, name and numbers, asked of the CPU itself.

The system's files describe the CPU that the system runs on. An emulator of user programs shows
another one to the process and leaves the files as they are. No compiler is needed: the instruction
is below, as bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
from collections.abc import Callable
from typing import Any

#: Leaf -> the registers EAX, EBX, ECX and EDX.
Ask = Callable[[int], tuple[int, int, int, int]]

# void f(uint32_t leaf, uint32_t registers[4])
_CODE = bytes.fromhex(
    "53"  # push rbx
    "89f8"  # mov eax, edi
    "31c9"  # xor ecx, ecx
    "0fa2"  # cpuid
    "8906"  # mov [rsi], eax
    "895e04"  # mov [rsi + 4], ebx
    "894e08"  # mov [rsi + 8], ecx
    "89560c"  # mov [rsi + 12], edx
    "5b"  # pop rbx
    "c3"  # ret
)
_BRAND = 0x80000000  # followed by the three leaves that hold the name


def identity() -> dict[str, Any] | None:
    """Vendor, name, family, model and stepping, under py-cpuinfo's names.

    None where the instruction cannot be executed from memory: another architecture or calling
    convention, or a system that forbids it.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    page.write(_CODE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    run = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_void_p)(start)

    def ask(leaf: int) -> tuple[int, int, int, int]:
        registers = (ctypes.c_uint32 * 4)()
        run(leaf, ctypes.addressof(registers))
        return registers[0], registers[1], registers[2], registers[3]

    return decode(ask)


def decode(ask: Ask) -> dict[str, Any]:
    """The answers of a CPU in words and numbers."""
    _, b, c, d = ask(0)
    signature = ask(1)[0]
    family, model = signature >> 8 & 15, signature >> 4 & 15
    if family in (6, 15):
        model |= signature >> 12 & 0xF0
    if family == 15:
        family += signature >> 20 & 0xFF
    found: dict[str, Any] = {
        "vendor_id_raw": _text(b, d, c),
        "family": family,
        "model": model,
        "stepping": signature & 15,
    }
    if ask(_BRAND)[0] >= _BRAND + 4:
        name = _text(*(register for leaf in (2, 3, 4) for register in ask(_BRAND + leaf)))
        found["brand_raw"] = " ".join(name.split())
    return found


def _text(*registers: int) -> str:
    raw = struct.pack(f"<{len(registers)}I", *registers)
    return raw.partition(b"\0")[0].decode("ascii", "replace")

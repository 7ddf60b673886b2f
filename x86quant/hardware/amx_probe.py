"""Does AMX really execute here? Some systems advertise it and then fault.

Run as a program in a process of its own: multiplies two int8 tiles and checks the result. Exit
code 0 means that AMX works; anything else, a signal included, that it does not. No compiler and
no torch is needed: the instructions are below, as bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): ask Linux for the tile registers.
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18

_CODE = bytes.fromhex(
    "41b840000000"  # mov r8d, 64          bytes a tile row
    "c4e2784907"  # ldtilecfg [rdi]
    "c4a27b4b0c06"  # tileloadd tmm1, [rsi + r8]
    "c4a27b4b1402"  # tileloadd tmm2, [rdx + r8]
    "c4e27b49c0"  # tilezero tmm0
    "c4e2695ec1"  # tdpbusd tmm0, tmm1, tmm2
    "c4a27a4b0401"  # tilestored [rcx + r8], tmm0
    "c4e27849c0"  # tilerelease
    "c3"  # ret
)


def permitted() -> bool:
    """Ask the system to let this process use the tile registers, and say whether it does."""
    libc = ctypes.CDLL(None, use_errno=True)
    asked: int = libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return asked == 0


def main() -> int:
    """Execute the tile instructions; 0 when their result is right."""
    if not permitted():
        return 2
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_CODE)
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(
        ctypes.addressof(ctypes.c_char.from_buffer(page))
    )
    # Palette 1; three tiles of 16 rows by 64 bytes.
    config = (ctypes.c_uint8 * 64)(1)
    for tile in range(3):
        config[16 + 2 * tile] = 64
        config[48 + tile] = 16
    left = (ctypes.c_uint8 * 1024)(*[255] * 1024)
    right = (ctypes.c_int8 * 1024)(*[-128] * 1024)
    result = (ctypes.c_int32 * 256)()
    run(config, left, right, result)
    return 0 if list(result) == [64 * 255 * -128] * 256 else 3


if __name__ == "__main__":
    sys.exit(main())

"""Runs a command on another x86 CPU than this one, as far as CPUID can tell, at full speed.

    python -m tools.masked_cpu "Zen 3" python -m pytest -n 2
    python -m tools.masked_cpu Broadwell python -m benchmarks.against_peers --models resnet50
    python -m tools.masked_cpu --list

``X86QUANT_ISA`` caps what libraries let themselves be capped to. Here every library, OpenVINO and
ONNX Runtime too, is answered as if the CPU were another one: its vendor, numbers, features and
caches. It cannot show a CPU what it does not have, so this needs one with at least the features of
the other; the features that are not shown still work, so that an instruction used without asking
goes unnoticed. (qemu, of ``tests/emulated.py``, notices it, knows no AVX-512 and is slow.) The
files in /proc and /sys still describe the real CPU.

Linux on a CPU that lets CPUID fault (Intel since Ivy Bridge, AMD since Zen 4; a virtual machine
where its hypervisor passes that on), and a C compiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")
_EAX, _EBX, _ECX, _EDX = range(4)
_ALL = 0xFFFFFFFF

#: Feature -> leaf, subleaf, register and bit. Those that some CPU below lacks.
_BITS = {
    "avx512f": (7, 0, _EBX, 16),
    "avx512dq": (7, 0, _EBX, 17),
    "avx512ifma": (7, 0, _EBX, 21),
    "avx512cd": (7, 0, _EBX, 28),
    "sha": (7, 0, _EBX, 29),
    "avx512bw": (7, 0, _EBX, 30),
    "avx512vl": (7, 0, _EBX, 31),
    "avx512_vbmi": (7, 0, _ECX, 1),
    "avx512_vbmi2": (7, 0, _ECX, 6),
    "gfni": (7, 0, _ECX, 8),
    "vaes": (7, 0, _ECX, 9),
    "vpclmulqdq": (7, 0, _ECX, 10),
    "avx512_vnni": (7, 0, _ECX, 11),
    "avx512_bitalg": (7, 0, _ECX, 12),
    "avx512_vpopcntdq": (7, 0, _ECX, 14),
    "avx512_4vnniw": (7, 0, _EDX, 2),
    "avx512_4fmaps": (7, 0, _EDX, 3),
    "avx512_vp2intersect": (7, 0, _EDX, 8),
    "amx_bf16": (7, 0, _EDX, 22),
    "avx512_fp16": (7, 0, _EDX, 23),
    "amx_tile": (7, 0, _EDX, 24),
    "amx_int8": (7, 0, _EDX, 25),
    "avx_vnni": (7, 1, _EAX, 4),
    "avx512_bf16": (7, 1, _EAX, 5),
    "amx_fp16": (7, 1, _EAX, 21),
    "avx_ifma": (7, 1, _EAX, 23),
    "avx_vnni_int8": (7, 1, _EDX, 4),
    "avx_ne_convert": (7, 1, _EDX, 5),
    "amx_complex": (7, 1, _EDX, 8),
    "avx_vnni_int16": (7, 1, _EDX, 10),
    "avx10": (7, 1, _EDX, 19),
}
_AMX = frozenset(name for name in _BITS if name.startswith("amx"))
_VECTOR_512 = frozenset(name for name in _BITS if name.startswith(("avx512", "avx10")))
_VECTOR_256 = {
    "avx_vnni", "avx_ifma", "avx_vnni_int8", "avx_ne_convert", "avx_vnni_int16", "gfni", "vaes",
    "vpclmulqdq", "sha",
}  # fmt: skip
_PLAIN_AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
_ZEN4_AVX512 = _VECTOR_512 - {"avx512_fp16", "avx512_vp2intersect", "avx10"}


@dataclasses.dataclass(frozen=True)
class Mask:
    """A CPU to be shown.

    Attributes:
        vendor: "GenuineIntel" or "AuthenticAMD".
        family, model, stepping: its numbers.
        brand: its name.
        lacks: of this CPU's features, those that it does not have.
        caches: KiB of L1d and L2 a core, and of L3; the ways of each are made up.
    """

    vendor: str
    family: int
    model: int
    stepping: int
    brand: str
    lacks: frozenset[str]
    caches: tuple[int, int, int]

    @property
    def needs(self) -> frozenset[str]:
        """What a CPU must have to be shown as this one."""
        levels = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
        return frozenset(levels) - self.lacks


_BELOW_AVX512 = _AMX | _VECTOR_512 | _VECTOR_256
MASKS: Mapping[str, Mask] = {
    "Broadwell": Mask(
        "GenuineIntel", 6, 79, 1, "Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz",
        _BELOW_AVX512, (32, 256, 35840),
    ),
    "Zen 3": Mask(
        "AuthenticAMD", 25, 1, 1, "AMD EPYC 7763 64-Core Processor",
        _BELOW_AVX512 - {"sha", "vaes", "vpclmulqdq"}, (32, 512, 32768),
    ),
    "Zen 4": Mask(
        "AuthenticAMD", 25, 17, 1, "AMD EPYC 9654 96-Core Processor",
        _BELOW_AVX512 - _ZEN4_AVX512 - {"gfni", "sha", "vaes", "vpclmulqdq"}, (32, 1024, 32768),
    ),
    "Alder Lake": Mask(
        "GenuineIntel", 6, 151, 2, "12th Gen Intel(R) Core(TM) i9-12900K",
        _BELOW_AVX512 - {"avx_vnni", "gfni", "sha", "vaes", "vpclmulqdq"}, (48, 1280, 30720),
    ),
    "Skylake server": Mask(
        "GenuineIntel", 6, 85, 4, "Intel(R) Xeon(R) Platinum 8180 CPU @ 2.50GHz",
        _BELOW_AVX512 - _PLAIN_AVX512, (32, 1024, 39424),
    ),
    "Cascade Lake": Mask(
        "GenuineIntel", 6, 85, 7, "Intel(R) Xeon(R) Platinum 8280 CPU @ 2.70GHz",
        _BELOW_AVX512 - _PLAIN_AVX512 - {"avx512_vnni"}, (32, 1024, 39424),
    ),
}  # fmt: skip


def why_not(name: str) -> str | None:
    """Why this machine cannot show itself as the CPU of this name; None when it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "only Linux on x86-64 lets CPUID fault"
    flags = _flags()
    if "cpuid_fault" not in flags:
        return "this CPU, or the virtual machine, cannot let CPUID fault"
    missing = MASKS[name].needs - flags
    return f"this CPU lacks {', '.join(sorted(missing))}" if missing else None


def environment(name: str, folder: Path) -> dict[str, str]:
    """What makes a program see the CPU of this name; the library goes into ``folder``."""
    library = folder / "libmasked_cpu.so"
    if not library.exists():
        compiler = os.environ.get("CC", "cc").split()
        flags = ["-O1", "-fPIC", "-shared", "-Wall", "-Wextra"]
        subprocess.run([*compiler, *flags, "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    preload = " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
    return {"LD_PRELOAD": preload, "MASKED_CPU": _spelled(MASKS[name])}


def _spelled(mask: Mask) -> str:
    """The changes to CPUID's answers, as ``masked_cpu.c`` reads them."""
    family, extended = (mask.family, 0) if mask.family < 15 else (15, mask.family - 15)
    signature = (
        extended << 20 | mask.model >> 4 << 16 | family << 8 | (mask.model & 15) << 4
    ) | mask.stepping
    changes = [(1, "*", _EAX, 0, signature)]
    for leaf in (0, 0x80000000):
        for register, start in ((_EBX, 0), (_EDX, 4), (_ECX, 8)):
            changes.append((leaf, "*", register, 0, _word(mask.vendor, start)))
    for start in range(0, 48, 4):
        leaf, register = 0x80000002 + start // 16, start // 4 % 4
        changes.append((leaf, "*", register, 0, _word(mask.brand, start)))
    changes += [
        (leaf, f"{sub:x}", register, _ALL & ~(1 << bit), 0)
        for leaf, sub, register, bit in (_BITS[name] for name in sorted(mask.lacks))
    ]
    changes += _caches(mask)
    words = [f"{leaf:x}.{sub}.{reg:x}={keep:x}+{put:x}" for leaf, sub, reg, keep, put in changes]
    return " ".join(words)


def _caches(mask: Mask) -> list[tuple[int, str, int, int, int]]:
    """The leaf that describes caches one by one; AMD's has another number and the same form."""
    amd = mask.vendor == "AuthenticAMD"
    leaf = 0x8000001D if amd else 4
    l1, l2, l3 = mask.caches
    changes = []
    # Kind (1 data, 2 code, 3 both), level, KiB, ways, and how many logical cores share it.
    for sub, (kind, level, size, ways, shared) in enumerate(
        [(1, 1, l1, 8 if l1 == 32 else 12, 1), (2, 1, 32, 8, 1), (3, 2, l2, 8, 1),
         (3, 3, l3, 16 if l3 % 11 else 11, 16), (0, 0, 0, 0, 1)]
    ):  # fmt: skip
        eax = kind | level << 5 | (1 << 8 if kind else 0) | (shared - 1) << 14
        ebx = (ways - 1) << 22 | 63 if kind else 0
        sets = size * 1024 // (64 * ways) - 1 if kind else 0
        for register, value in enumerate((eax, ebx, sets, 0)):
            changes.append((leaf, f"{sub:x}", register, 0, value))
    if amd:
        changes.append((0x80000000, "*", _EAX, 0, 0x8000001E))
        changes.append((0x80000001, "*", _ECX, _ALL, 1 << 22))  # that leaf is there
        changes.append((0x80000005, "*", _ECX, 0, l1 << 24 | 8 << 16 | 1 << 8 | 64))
        changes.append((0x80000006, "*", _ECX, 0, l2 << 16 | 6 << 12 | 1 << 8 | 64))
        changes.append((0x80000006, "*", _EDX, 0, l3 // 512 << 18 | 8 << 12 | 1 << 8 | 64))
    return changes


def _word(text: str, start: int) -> int:
    return int.from_bytes(text.encode().ljust(48, b"\0")[start : start + 4], "little")


@functools.cache
def _flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="which CPUs this one can be shown as")
    parser.add_argument("cpu", nargs="?", choices=MASKS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.list or options.cpu is None or not options.command:
        for name in MASKS:
            print(f"{name:15} {why_not(name) or 'yes'}")
        return 0 if options.list else 2
    if reason := why_not(options.cpu):
        print(f"{options.cpu} cannot be shown here: {reason}", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **environment(options.cpu, Path(folder))}
        return subprocess.run(options.command, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())

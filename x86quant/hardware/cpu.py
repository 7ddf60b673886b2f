"""What this CPU can do: ``cpu()``.

py-cpuinfo reads the system's description, the CPU itself and torch confirm it, a probe confirms
AMX, and ``X86QUANT_ISA``, or the libraries' own variables, may lower it. ``classify`` is the pure
part, tested on recorded descriptions of other CPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from x86quant.errors import CpuError
from x86quant.files import write_aside
from x86quant.hardware import amx_probe, cpuid
from x86quant.hardware.allowance import Allowance, allowance
from x86quant.hardware.isa import (
    LEVELS,
    VARIABLE,
    best_level,
    cap_onednn_below_amx,
    capped_features,
    check_isa_cap,
    forced_level,
    library_caps,
)

# Feature -> the flags, in py-cpuinfo's spellings, of which one in each group must be there.
_FLAGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "avx2": (("avx2",), ("fma", "fma3")),
    "avx_vnni": (("avx_vnni", "avxvnni"),),
    "avx512": (("avx512f",), ("avx512bw",), ("avx512vl",), ("avx512dq",)),
    "avx512_vnni": (("avx512_vnni", "avx512vnni"),),
    "amx_int8": (("amx_tile",), ("amx_int8",)),
}
# The same in the words of torch.cpu.get_capabilities().
_TORCH_NAMES = {
    "avx2": ("avx2",),
    "avx_vnni": ("avx_vnni",),
    "avx512": ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"),
    "avx512_vnni": ("avx512_vnni",),
    "amx_int8": ("amx_tile", "amx_int8"),
}
# A feature is of use only on top of these.
_NEEDS = {"avx_vnni": "avx2", "avx512": "avx2", "avx512_vnni": "avx512", "amx_int8": "avx512_vnni"}


_EVERYTHING = Allowance()


@dataclasses.dataclass(frozen=True)
class Cpu:
    """A CPU as kernels and rules see it.

    Attributes:
        vendor: "GenuineIntel", "AuthenticAMD", …
        name: the brand string.
        family, model, stepping: the CPUID numbers, 0 when unknown.
        features: of "avx2", "avx_vnni", "avx512", "avx512_vnni", "amx_int8".
        isa: the highest level these make up.
        withheld: features that it has as well, and that are not to be used. Libraries that ask the
            CPU itself may use them nevertheless.
        cores: physical cores.
        threads: logical cores.
        best_threads: threads that suit this process: the physical cores, the fast ones of a
            hybrid CPU, and no more than its CPU mask and its control group's quota allow.
        l1d, l2: bytes a core; None when unknown.
        l3: bytes in all; None when unknown.
        notes: what was found odd or lowered, in words.
    """

    vendor: str
    name: str
    family: int
    model: int
    stepping: int
    features: frozenset[str]
    isa: str
    cores: int = 1
    threads: int = 1
    best_threads: int = 1
    l1d: int | None = None
    l2: int | None = None
    l3: int | None = None
    notes: tuple[str, ...] = ()
    withheld: frozenset[str] = frozenset()

    @property
    def vnni(self) -> bool:
        """Either kind of VNNI."""
        return bool({"avx_vnni", "avx512_vnni"} & self.features)

    @property
    def amx(self) -> bool:
        """AMX for int8, seen to execute."""
        return "amx_int8" in self.features

    def without(self, feature: str, note: str) -> Cpu:
        """This CPU less a feature and all that needs it, and a note that says why."""
        lost = {feature}
        while more := {name for name, base in _NEEDS.items() if base in lost} - lost:
            lost |= more
        kept = self.features - lost
        return dataclasses.replace(
            self, features=kept, isa=best_level(kept), notes=(*self.notes, note)
        )

    def capped(self, isa: str) -> Cpu:
        """This CPU as a process limited to ``isa`` sees it.

        Raises:
            CpuError: no such level, or this CPU does not reach it.
        """
        if isa not in LEVELS:
            raise CpuError(f"{isa!r} is no ISA level; use one of {', '.join(LEVELS)}.")
        missing = LEVELS[isa].features - self.features
        if missing:
            here = [name for name, level in LEVELS.items() if level.features <= self.features]
            raise CpuError(
                f"{self.name} does not reach {isa}: it lacks {', '.join(sorted(missing))}. "
                f"It reaches {', '.join(here)}."
            )
        kept = capped_features(self.features, isa)
        notes = self.notes if isa == self.isa else (*self.notes, f"capped from {self.isa}")
        return self._with_only(kept, notes)

    def _with_only(self, kept: frozenset[str], notes: tuple[str, ...]) -> Cpu:
        withheld = self.withheld | (self.features - kept)
        return dataclasses.replace(
            self, features=kept, isa=best_level(kept), notes=notes, withheld=withheld
        )

    def __str__(self) -> str:
        def size(count: int | None) -> str:
            if count is None:
                return "?"
            return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"

        text = (
            f"{self.name}: {self.isa}, {self.cores} cores, {self.threads} threads, "
            f"L1d {size(self.l1d)}, L2 {size(self.l2)}, L3 {size(self.l3)}"
        )
        return "\n".join([text, *(f"  note: {note}" for note in self.notes)])


def classify(description: Mapping[str, Any], allowed: Allowance = _EVERYTHING) -> Cpu:
    """The CPU in a description as py-cpuinfo gives it, of which a process may use a part.

    Reads ``flags`` (list), ``vendor_id_raw``, ``brand_raw``, ``family``, ``model``,
    ``stepping``, and where present ``cores``, ``count``, ``l1d``, ``l2``, ``l3``.

    Raises:
        CpuTooOldError: the CPU lacks AVX2.
    """
    flags = set(description.get("flags", ()))
    features: set[str] = set()
    for feature, groups in _FLAGS.items():
        base = _NEEDS.get(feature)
        if all(flags & set(group) for group in groups) and (base is None or base in features):
            features.add(feature)
    threads = int(description.get("count") or 1)
    cores = int(description.get("cores") or threads)
    return Cpu(
        vendor=str(description.get("vendor_id_raw", "unknown")),
        name=str(description.get("brand_raw", "unknown CPU")),
        family=int(description.get("family", 0)),
        model=int(description.get("model", 0)),
        stepping=int(description.get("stepping", 0)),
        features=frozenset(features),
        isa=best_level(frozenset(features)),
        cores=cores,
        threads=threads,
        best_threads=allowed.threads(cores, threads),
        l1d=description.get("l1d"),
        l2=description.get("l2"),
        l3=description.get("l3"),
        notes=allowed.notes(threads),
    )


@functools.cache
def cpu() -> Cpu:
    """This CPU, at the level ``X86QUANT_ISA`` caps it to if that is set.

    Raises:
        CpuTooOldError: no AVX2.
        CpuError: ``X86QUANT_ISA`` is wrong, too high, or was set too late.
    """
    import torch

    capabilities = torch.cpu.get_capabilities()
    description, notes = _confirmed_by_cpuid(_describe(), cpuid.identity(), capabilities)
    found = classify({**description, **_sizes(capabilities)}, allowance())
    found = dataclasses.replace(found, notes=(*found.notes, *notes))
    found = _confirmed_by_torch(found, capabilities)
    if found.amx:
        found = _confirmed_by_probe(found)
    wanted = forced_level()
    if wanted is None:
        return _capped_like_libraries(found)
    found = found.capped(wanted)
    check_isa_cap(wanted, torch.backends.cpu.get_cpu_capability())
    return found


def _describe() -> dict[str, Any]:
    """The cheap part of py-cpuinfo where it has one; the whole query sleeps a second."""
    import cpuinfo
    from cpuinfo import cpuinfo as parts

    cheap = getattr(parts, "_get_cpu_info_from_proc_cpuinfo", None)
    found: dict[str, Any] | None = cheap() if cheap is not None else None
    if not found or not found.get("flags"):
        found = dict(cpuinfo.get_cpu_info())
    return found


def _confirmed_by_cpuid(
    description: dict[str, Any], seen: Mapping[str, Any] | None, capabilities: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The CPU that this process sees, and a note where the system describes another one.

    It does so in an emulator of user programs. Nothing that it says is then of use, so that the
    flags are those that torch read from the CPU.
    """
    if seen is None or all(
        description.get(key, seen[key]) == seen[key] for key in ("vendor_id_raw", "family", "model")
    ):
        return description, ()
    # torch writes avx512_f, py-cpuinfo avx512f.
    flags = [
        name.replace("avx512_", "avx512") for name, there in capabilities.items() if there is True
    ]
    note = (
        f"the system describes another CPU ({description.get('brand_raw', 'without a name')}); "
        f"this process sees the one above, and that counts"
    )
    return {**seen, "flags": flags}, (note,)


def _sizes(capabilities: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "cores": capabilities.get("num_physical_cores"),
        "count": capabilities.get("num_logical_cores") or os.cpu_count(),
        "l1d": capabilities.get("l1d_cache_size"),
        "l2": capabilities.get("l2_cache_size"),
        "l3": _l3_size(),
    }


def _l3_size() -> int | None:
    """Bytes of the last-level cache that the first core sees."""
    with contextlib.suppress(OSError, ValueError):
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    return None


def _confirmed_by_torch(found: Cpu, capabilities: Mapping[str, Any]) -> Cpu:
    """Keep only the features that torch sees too, and note those that only torch sees."""
    seen = {
        feature
        for feature, names in _TORCH_NAMES.items()
        if all(capabilities.get(name) for name in names)
    }
    for feature in sorted(seen - found.features):
        note = f"torch sees {feature}, but the operating system does not list it; not used"
        found = dataclasses.replace(
            found, notes=(*found.notes, note), withheld=found.withheld | {feature}
        )
    for feature in _TORCH_NAMES:
        if feature in found.features - seen:
            found = found.without(
                feature, f"{feature} is advertised, but torch does not see it; not used"
            )
    return found


def _capped_like_libraries(found: Cpu) -> Cpu:
    """This CPU with the features that oneDNN's and FBGEMM's own variables leave to both.

    Which kernels are exact depends on the instructions they really use: a library without VNNI
    saturates. So a cap that x86quant did not set must count too.
    """
    for setting, isa in library_caps().items():
        kept = capped_features(found.features, isa)
        if kept != found.features:
            note = f"{setting} caps it to {isa}; {VARIABLE} would cap all libraries alike"
            found = found._with_only(kept, (*found.notes, note))
    return found


def _confirmed_by_probe(found: Cpu) -> Cpu:
    """Without AMX unless it is seen to execute; then oneDNN is kept off it too."""
    key = _probe_key(found)
    try:
        reason = _probe_amx() if key is None else _remembered(key, _probe_amx)
    except OSError as error:
        reason = f"a probe of it could not be started ({error})"
    # Another process was seen to use it. This one may be refused: by a filter of system calls, say,
    # or because a thread has a signal stack that is too small for the tiles.
    if reason is None and not amx_probe.permitted():
        reason = "the system refuses its use to this process"
    if reason is None:
        return found
    cap_onednn_below_amx()
    return found.without("amx_int8", f"AMX is advertised, but {reason}; not used")


def _probe_amx() -> str | None:
    """None when AMX executes, else why it does not count.

    Raises:
        OSError: no process could be started, which says nothing of AMX.
    """
    # In a frozen program sys.executable is that program, which would start itself again.
    if not sys.executable or getattr(sys, "frozen", False):
        raise OSError("there is no Python interpreter to start")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", amx_probe.__file__],
            capture_output=True,
            timeout=20,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "a probe of it hung"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"a probe of it died of signal {-done.returncode}"
    return {2: "the system refuses its use", 3: "a probe of it computed a wrong result"}.get(
        done.returncode, f"a probe of it failed with exit code {done.returncode}"
    )


def _probe_key(found: Cpu) -> str | None:
    """What the answer depends on: the CPU, and when the machine, or its kernel, was started.

    None where the start cannot be told from others, so that nothing may be remembered.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return f"{found.vendor}/{found.family}/{found.model}/{found.stepping}/{boot}"


def _cache_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "x86quant" / "amx_probe.json"


def _remembered(key: str, probe: Callable[[], str | None]) -> str | None:
    """The probe's answer, from the cache file if it holds one for ``key``.

    A cache that cannot be read or written costs a probe, nothing else.
    """
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        saved = json.loads(_cache_file().read_text())
        if isinstance(saved, dict) and saved.get("key") == key:
            reason = saved.get("reason")
            if reason is None or isinstance(reason, str):
                return reason
    reason = probe()
    with contextlib.suppress(OSError, RuntimeError):
        _cache_file().parent.mkdir(parents=True, exist_ok=True)
        write_aside(_cache_file(), json.dumps({"key": key, "reason": reason}))
    return reason

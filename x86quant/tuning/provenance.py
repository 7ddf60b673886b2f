"""What a run measures with: the head of its file."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from x86quant.hardware.cpu import cpu
from x86quant.tuning.measurements import machine_name
from x86quant.version import __version__


def this_machine() -> str:
    """The class of this CPU, as cases name it."""
    here = cpu()
    return machine_name(here.vendor, here.family, here.model)


def provenance(levels: Sequence[str], threads: Sequence[int]) -> dict[str, str]:
    """CPU, versions, levels, threads and date."""
    here = cpu()
    caches = {"l1d": here.l1d, "l2": here.l2, "l3": here.l3}
    return {
        "cpu": here.name,
        "vendor": here.vendor,
        "family": str(here.family),
        "model": str(here.model),
        "stepping": str(here.stepping),
        "microcode": _microcode(),
        "isa": " | ".join(levels),
        "caches": ", ".join(f"{name} {size or 'unknown'}" for name, size in caches.items()),
        "cores": str(here.cores),
        "torch": torch.__version__,
        "onednn": _onednn_version(),
        "fbgemm": f"of torch {torch.__version__}; fbgemm-gpu-cpu {_installed('fbgemm-gpu-cpu')}",
        "x86quant": __version__,
        "threads": " | ".join(map(str, threads)),
        "omp": os.environ.get("OMP_NUM_THREADS", "unset"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _microcode() -> str:
    try:
        found = re.search(r"^microcode\s*:\s*(\S+)", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        return "unknown"
    return found[1] if found else "unknown"


def _onednn_version() -> str:
    found = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    return found[1] if found else "unknown"


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"

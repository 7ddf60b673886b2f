"""Which versions of FBGEMM, oneDNN and QNNPACK this torch carries, and which are on record.

FBGEMM and QNNPACK are parts of torch and have no version of their own; oneDNN has one.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import torch

RECORD = Path(__file__).with_name("on_record.json")

#: Libraries whose kernels are asked what they do: the native ones and the reference are ours.
LIBRARIES = ("fbgemm", "onednn", "qnnpack")


@functools.cache
def version(library: str) -> str:
    """The version of ``library`` in this process: that of oneDNN, or of the torch it is part of."""
    if library == "onednn":
        found = re.search(r"(?:MKL-DNN|oneDNN|DNNL) v(\d+(?:\.\d+)*)", torch.__config__.show())
        if found:
            return found[1]
    return release(torch.__version__)


def on_record(library: str) -> bool:
    """Whether somebody has put on record what this version of ``library`` computes."""
    return library not in LIBRARIES or version(library) in _record()[library]


def judged_as(torch_version: str) -> str:
    """The torch whose errata count for ``torch_version``: the newest on record for newer ones.

    That a mistake of the last version is gone must be seen before it is believed.
    """
    newest = max(_record()["fbgemm"], key=_numbers)
    return newest if _numbers(release(torch_version)) > _numbers(newest) else torch_version


def release(version_of_package: str) -> str:
    """``2.13.0+cpu`` as ``2.13``: kernels, and their times, change with the second number."""
    return ".".join(version_of_package.split(".")[:2])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


@functools.cache
def _record() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(RECORD.read_text())["versions"]
    return found

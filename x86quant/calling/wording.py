"""What several steps say, or keep stock PyTorch from saying."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager

import torch

from x86quant.errors import X86QuantWarning
from x86quant.graph_sources import forgotten_with_their_graphs


def listed(names: list[str], most: int = 4) -> str:
    """``names`` with commas, the first few of them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def layers_stay(names: Collection[object]) -> str:
    """That the layers of these ``names`` stay, by their number."""
    return "1 layer stays" if len(names) == 1 else f"{len(names)} layers stay"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A block without torch's warnings of its own defaults and deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", X86QuantWarning)
        yield


#: torch.fx patches modules, and observers draw random numbers, for the whole process.
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A block that no other thread is in, and that leaves torch's random numbers as they were, and
    no source of graphs that are gone.

    What torch.compile made runs as it is written: its graphs cannot be traced once more.
    """
    random = torch.random.fork_rng(devices=[])
    with _ONE_AT_A_TIME, random, _as_written(), forgotten_with_their_graphs():
        yield


def _as_written() -> AbstractContextManager[object]:
    """A block in which nothing runs compiled.

    To be made where it is entered: torch takes note there of what held before, and of another
    thread's block it would bring back that for ever.
    """
    loaded = "torch._dynamo" in sys.modules  # else nothing was compiled
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()

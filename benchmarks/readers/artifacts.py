"""Saved models: bit flips, truncations, splices, and hostile edits behind a right checksum.

``graph`` is one graph, ``exported`` graphs for ranges of sizes, ``of_class`` int8 layers, static
parts and tensors for a class that is given, ``guarded`` a graph for some calls and the float model
for others. Where an edit may describe another valid model, what is loaded must be exactly what the
file says (saved again it has the same content; ``graph`` alone), and its run ends in a result or
in a Python exception.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.readers.reader import Depth, Reader, WrongAnswerError, refused
from tests.artifact_models import FORMS, mixed
from tests.corruption import content, corrupted, corrupted_anywhere
from x86quant.artifacts.reader import from_bytes
from x86quant.artifacts.writer import to_bytes
from x86quant.errors import ArtifactError

_FIRST = ("artifacts.file.container",)
_REFUSE = b"R"  # before an input that no reader may take


def opened(data: bytes, skeleton: nn.Module | None, *, faithful: bool) -> nn.Module | Depth:
    """The model in ``data``, or how far it got that was refused.

    Args:
        data: a file.
        skeleton: what ``load`` is given as the model.
        faithful: compare what was loaded with the file.

    Raises:
        WrongAnswerError: it is not what the file says.
    """
    try:
        model = from_bytes(data)[1].build(skeleton)
    except ArtifactError as error:
        return refused(error, _FIRST)
    if faithful and content(to_bytes(model)) != content(data):
        raise WrongAnswerError("the loaded model is not what the file says")
    return model


def _reader(
    model: nn.Module,
    x: torch.Tensor,
    skeleton: nn.Module | None,
    corrupt: Callable[[bytes, int], tuple[bytes, str, str]],
    faithful: bool,
) -> Reader:
    data = to_bytes(model)

    def change(rng: random.Random, sample: bytes) -> bytes:
        damaged, expected, _ = corrupt(sample[1:], rng.randrange(2**62))
        return (_REFUSE if expected == "refuse" else b" ") + damaged

    def read(changed: bytes) -> Depth:
        found = opened(changed[1:], skeleton, faithful=faithful)
        if isinstance(found, Depth):
            return found
        if changed[:1] == _REFUSE:
            raise WrongAnswerError("a damaged file was loaded")
        with contextlib.suppress(Exception):  # any will do, as any answer; a crash will not
            found(x)
        return Depth.READ

    return Reader([b" " + data], change, read, least=0.4)


def graph(folder: Path) -> Reader:
    """A model that is one graph."""
    model, x = mixed()
    return _reader(model, x, None, corrupted, faithful=True)


def _of_form(form: str, folder: Path) -> Reader:
    model, x, skeleton = FORMS[form]()
    return _reader(model, x, skeleton, corrupted_anywhere, faithful=False)


exported = functools.partial(_of_form, "exported")
of_class = functools.partial(_of_form, "class")
guarded = functools.partial(_of_form, "guarded")

"""Whether a graph has a form in a file."""

from __future__ import annotations

from x86quant.artifacts.records import forms
from x86quant.capture.traced_graph import Traced
from x86quant.compiled import CompiledModule
from x86quant.errors import ArtifactError, UnsupportedError


def check_savable(built: CompiledModule, traced: Traced | None) -> None:
    """Raise UnsupportedError unless ``built``, called as ``traced`` if not None, can be saved."""
    call = None if traced is None else (traced.form, traced.results, traced.guard)
    try:
        forms.check_savable(built, call)
    except ArtifactError as error:
        raise UnsupportedError(str(error)) from error

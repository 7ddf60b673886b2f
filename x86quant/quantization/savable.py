"""Whether a graph has a form in a file."""

from __future__ import annotations

import importlib
from typing import Any

from x86quant.compiled import CompiledModule
from x86quant.errors import ArtifactError, UnsupportedError
from x86quant.quantization.tracing import Traced

#: The package that writes files knows; it imports this one, and so is found at the first question.
_FORMS = "x86quant.artifacts.forms"


def check_savable(built: CompiledModule, traced: Traced | None) -> None:
    """Raise UnsupportedError unless ``built``, called as ``traced`` if not None, can be saved."""
    forms: Any = importlib.import_module(_FORMS)
    try:
        forms.check_savable(built, traced and (traced.form, traced.results, traced.guard))
    except ArtifactError as error:
        raise UnsupportedError(str(error)) from error

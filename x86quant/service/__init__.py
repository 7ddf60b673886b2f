"""Sentence encoders and rerankers over HTTP: ``x86quant serve FOLDER``.

    from x86quant.service import EncoderService, Limits, application, load_engine

    app = application(EncoderService(load_engine("all-MiniLM-L6-v2"), Limits()))  # any ASGI server

Requests are those of OpenAI's embeddings and of text-embeddings-inference; docs/service.md lists
them. What computes is an ``Engine``; everything else knows only that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from x86quant.service.asgi import application
    from x86quant.service.encoder_engine import load_engine
    from x86quant.service.encoder_service import EncoderService
    from x86quant.service.engine import Engine, EngineFacts, TokenRow
    from x86quant.service.limits import Limits

_MODULE_OF = {
    "EncoderService": "encoder_service",
    "Engine": "engine",
    "EngineFacts": "engine",
    "Limits": "limits",
    "TokenRow": "engine",
    "application": "asgi",
    "load_engine": "encoder_engine",
}

__all__ = [
    "EncoderService",
    "Engine",
    "EngineFacts",
    "Limits",
    "TokenRow",
    "application",
    "load_engine",
]


def __getattr__(name: str) -> Any:  # the engine imports sentence-transformers, which takes seconds
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

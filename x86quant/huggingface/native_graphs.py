"""Native graphs for a model that became int8 while it was loaded, as ``quantize`` makes them.

There are no data, and none are needed: what transformers calls its models with is known. Decoders
are called with a prompt and then token by token; encoders with what a tokenizer gives, all of it
or the first of it; those of pictures with pixels of one size.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from x86quant.calling.call import Call
from x86quant.calling.wording import alone
from x86quant.dynamic.layers import DynamicLinear
from x86quant.errors import first_line
from x86quant.quantization.graphs import given_graphs
from x86quant.quantization.graphs.given_graphs import wants_graphs
from x86quant.quantization.settings import Switch
from x86quant.quantization.summary import Summary

_log = logging.getLogger("x86quant.huggingface")

#: Sequences and tokens of the calls on which graphs are proved. The first is traced.
_SIZES = ((2, 12), (1, 12), (1, 7))
#: What a tokenizer may give beside the ids, as it lies in forwards.
_BESIDE = ("attention_mask", "token_type_ids")


def give_graphs(
    model: Any, fuse_blocks: Switch, calls_of: Callable[[Any], Sequence[Call]] | None = None
) -> None:
    """Let ``model`` run as native graphs of its int8 layers where it can.

    What was done is in its attribute ``quantization``. What has no graph runs layer by layer.
    ``calls_of`` makes the calls on which graphs are proved, ``usual_calls`` if it is left out.
    """
    notes: tuple[str, ...] = ()
    if wants_graphs(model, fuse_blocks):
        with alone():
            notes = _noted(model, fuse_blocks, calls_of or usual_calls)
    layers = tuple(n for n, m in model.named_modules() if isinstance(m, DynamicLinear))
    model.quantization = Summary(
        "dynamic", "as its weights were loaded", {}, 0, None, layers, {}, notes=notes
    )
    _log.info("%s", model.quantization)


def _noted(
    model: Any, fuse_blocks: Switch, calls_of: Callable[[Any], Sequence[Call]]
) -> tuple[str, ...]:
    try:
        calls = calls_of(model)
        notes = given_graphs.give_graphs(model, calls, fuse_blocks)
    except Exception as error:  # the model's own code may raise anything at made-up inputs
        _log.info("no graphs: %s", first_line(error))
        return (f"layers run one by one: {first_line(error)}",)
    if not calls and not notes:
        return ("layers run one by one: how it is called is known from data alone",)
    return notes or ("layers run one by one: no block of it could be traced and fused",)


def usual_calls(model: Any) -> list[Call]:
    """Calls of ``model`` as transformers' own tools make them; empty where these are not known."""
    given = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", None)
    if main == "pixel_values":
        return _of_pictures(model.config)
    if main != "input_ids" or getattr(model.config, "is_encoder_decoder", False):
        return []
    beside = [name for name in _BESIDE if name in given]
    if getattr(model.config, "type_vocab_size", 0) < 1:
        beside = [name for name in beside if name != "token_type_ids"]
    forms = [beside[:count] for count in range(len(beside), -1, -1)]
    return [_of_tokens(model.config, form, *sizes) for form in forms for sizes in _SIZES]


def _of_tokens(config: Any, names: list[str], batch: int, tokens: int) -> Call:
    """Random tokens; if there is a mask, with padding behind the last sequence of several."""
    generator = torch.Generator().manual_seed(batch * 100 + tokens)
    words = int(config.get_text_config().vocab_size)
    ids = torch.randint(words, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[-1, -tokens // 3 :] = 0
    beside = {"attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    return Call((), {"input_ids": ids, **{name: beside[name] for name in names}})


def _of_pictures(config: Any) -> list[Call]:
    size = getattr(config, "image_size", None)
    sides = (size, size) if isinstance(size, int) else tuple(size or ())
    if len(sides) != 2:
        return []
    generator = torch.Generator().manual_seed(0)
    channels = int(getattr(config, "num_channels", 3))
    pixels = torch.randn(2, channels, *sides, generator=generator, dtype=torch.float32)
    return [Call((), {"pixel_values": x}) for x in (pixels, pixels[:1])]

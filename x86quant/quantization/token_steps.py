"""From a decoder with dynamic int8 layers to one that adds a token in one native run.

``generate`` calls a decoder once for each token, with a cache of those before. That call is traced
as a function of tensors alone: ids, positions and the cache as one tensor, to logits and the longer
cache. It is proved against the decoder itself, with the rounding of rows left out on both sides;
then its attention reads and extends the cache in place (``attend_to_cache``), and the int8 results
are compared with those of the layers.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import hooks_set_aside
from x86quant.calling.state import state_kept
from x86quant.calling.wording import first_line
from x86quant.compiled import CompiledModule
from x86quant.compiled.block_graphs import BlockGraphs
from x86quant.compiled.structure import CallForm
from x86quant.compiled.token_step import TokenStep
from x86quant.errors import UnsupportedError
from x86quant.lowering.graph_tools import is_op, nodes_of
from x86quant.lowering.lower import FloatNode, computes_in_float
from x86quant.lowering.lower_rows import lower_rows
from x86quant.quantization.exported import ops_from_export
from x86quant.quantization.fused_blocks import rows_left_float
from x86quant.quantization.harm import sqnr_between
from x86quant.quantization.proof import Observed, prove
from x86quant.quantization.tracing import Traced

_log = logging.getLogger("x86quant.quantization")

#: Sequences, and tokens of each, behind which a token is added to prove the graph.
_SIZES = ((2, 5), (1, 3), (3, 8), (1, 17))
#: What fusing may cost against the layers one by one, in dB.
_ALLOWED_LOSS = 3.0
_ATTENTION = "x86quant_one_token"


def with_token_step(model: nn.Module) -> tuple[str, ...]:
    """Let ``model`` add each token by one native run if it can; returns notes on it."""
    if not _generates(model):
        return ()
    try:
        step = _token_step(model)
    except Exception as error:  # the model's own code may raise anything
        _log.info("no token step: %s", first_line(error))
        return ()
    blocks = vars(model).get("forward")
    if isinstance(blocks, BlockGraphs):
        blocks.token_step = step
    else:
        BlockGraphs(model, (), step).attach()
    return ("each new token of generate is one native run",)


def _generates(model: nn.Module) -> bool:
    """Whether ``generate`` of transformers drives ``model``, by the names of its arguments."""
    can = getattr(model, "can_generate", None)
    config = getattr(model, "config", None)
    if not callable(can) or not can() or getattr(config, "is_encoder_decoder", True):
        return False
    names = inspect.signature(model.forward).parameters
    return {"input_ids", "position_ids", "past_key_values", "use_cache"} <= set(names)


def _token_step(model: Any) -> TokenStep:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    def cache_of(past: torch.Tensor) -> Any:
        cache = DynamicCache(config=model.config)
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            raise UnsupportedError("its cache keeps more, or less, than all tokens")
        for number, layer in enumerate(cache.layers):
            keys, values = past[2 * number], past[2 * number + 1]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache

    with state_kept(model), hooks_set_aside(model):
        with rows_left_float():
            calls = [_call(model, *sizes) for sizes in _SIZES]
            seen = [_observed(model, cache_of(call.args[2].clone()), call) for call in calls]
        function = _OneToken(model, cache_of)
        form, leaves = CallForm.of(function, calls[0].args, {})
        with _one_token_attention(model):
            exported = ops_from_export(function, form, leaves, sizes=_batch_and_cache)
            traced = Traced(
                exported.graph_module, form, exported.results, exported.guard, "torch.export"
            )
            with rows_left_float():
                prove(function, traced, [observed for observed, _ in seen])
        lowered, reports = lower_rows(exported.graph_module)
        past = calls[0].args[2]
        layers = past.shape[0] // 2
        _check_all_in_place(lowered, layers)
        float_nodes = [
            FloatNode.of(lowered, n) for n in lowered.graph.nodes if computes_in_float(n)
        ]
        compiled = CompiledModule(lowered, reports, tuple(float_nodes))
        step = TokenStep(compiled, seen[0][1], layers, past.shape[2], past.shape[4])
        _check_noise(model, step, cache_of, calls, seen)
    return step


class _OneToken(nn.Module):
    """A decoder's next token as a function of tensors."""

    def __init__(self, model: nn.Module, cache_of: Any) -> None:
        super().__init__()
        self.model = model
        self.cache_of = cache_of

    def forward(self, input_ids: Any, position_ids: Any, past: Any) -> Any:
        cache = self.cache_of(past)
        result = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
        return result.logits, *_parts(cache)


def _parts(cache: Any) -> list[torch.Tensor]:
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def _call(model: Any, batch: int, tokens: int) -> Call:
    """The arguments of ``_OneToken`` behind a prompt of random tokens."""
    generator = torch.Generator().manual_seed(batch * 100 + tokens)
    words = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(words, (batch, tokens + 1), generator=generator)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :-1], use_cache=True, return_dict=True).past_key_values
    past = torch.stack(_parts(cache))
    return Call((ids[:, -1:], torch.full((batch, 1), tokens), past))


def _observed(model: nn.Module, cache: Any, call: Call) -> tuple[Observed, type]:
    """What the decoder itself returns, with its own masks, and the class of that."""
    ids, positions, _ = call.args
    given = {"input_ids": ids, "position_ids": positions, "past_key_values": cache}
    with torch.no_grad():
        result = model(**given, use_cache=True, return_dict=True)
    more = [k for k, v in vars(result).items() if v is not None and k not in _RESULTS]
    if more or result.past_key_values is not cache:
        raise UnsupportedError(f"it returns {', '.join(more) or 'another cache'}")
    return Observed(call, (result.logits, *_parts(cache)), False), type(result)


_RESULTS = ("logits", "past_key_values")


def _batch_and_cache(_: Sequence[torch.Tensor]) -> Any:
    auto = torch.export.Dim.AUTO
    return ({0: auto}, {0: auto}, {1: auto, 3: auto})


@contextlib.contextmanager
def _one_token_attention(model: Any) -> Iterator[None]:
    """A block in which the decoder makes no masks: one token sees all that came before.

    An attention that transformers knows no mask for gets none.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    if {*before.values()} - {"sdpa", "eager"}:
        raise UnsupportedError(f"its attention is one of {', '.join(map(str, before.values()))}")
    try:
        for config in configs.values():
            config._attn_implementation_internal = _ATTENTION
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def _check_all_in_place(lowered: Any, layers: int) -> None:
    """Raise UnsupportedError unless each layer extends the cache, and nothing else reads it."""
    attentions: Any = nodes_of(lowered, "cached_attention")
    found = sorted(node.kwargs["layer"] for node in attentions)
    (output,) = (n for n in lowered.graph.nodes if n.op == "output")
    past = [n for n in lowered.graph.nodes if n.op == "placeholder" and n.target == "past"]
    others = [
        u for n in past for u in n.users if not (is_op(u, "cached_attention") or _is_batch(u))
    ]
    if found != [*range(layers)] or len(output.args[0]) != 1 or others:
        raise UnsupportedError("not every attention of it was recognised")


def _is_batch(node: Any) -> bool:
    """Whether ``node`` asks for the cache's batch, which is that of the ids whatever the room."""
    return node.target is torch.ops.aten.sym_size.int and node.args[1] == 1


def _check_noise(
    model: nn.Module, step: TokenStep, cache_of: Any, calls: Sequence[Call], seen: Sequence[Any]
) -> None:
    """Raise UnsupportedError if the step is clearly noisier than the layers one by one."""
    exact, layers, fused = [], [], []
    for call, (observed, _) in zip(calls, seen, strict=True):
        ids, positions, past = call.args
        given = {"input_ids": ids, "position_ids": positions, "use_cache": True}
        answer = step.answer((), {**given, "past_key_values": cache_of(past)})
        if answer is None:
            raise UnsupportedError("it does not take its own calls")
        exact += [x.float() for x in observed.result]
        fused += [answer.logits, *_parts(answer.past_key_values)]
        plain = {**given, "return_dict": True, "past_key_values": cache_of(past)}
        with torch.no_grad():
            result = model(**plain)
        layers += [result.logits, *_parts(result.past_key_values)]
    if any(a.shape != b.shape for a, b in zip(exact, fused, strict=True)):
        raise UnsupportedError("the cache it leaves is of another shape")
    before, after = sqnr_between(exact, layers), sqnr_between(exact, fused)
    if not after >= before - _ALLOWED_LOSS:
        raise UnsupportedError(f"fused it has {after:.1f} dB, layer by layer {before:.1f} dB")

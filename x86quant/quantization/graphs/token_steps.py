"""From a decoder with dynamic int8 layers to one that adds tokens in one native run.

``generate`` calls a decoder with a prompt, then once for each token, with a cache of those before.
That call is traced as a function of tensors alone: ids, positions and the cache as one tensor, to
logits and the longer cache. It is proved against the decoder itself, with the rounding of rows left
out on both sides; then its attention reads and extends the cache in place (``attend_to_cache``),
and the int8 results are compared with those of the layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import hooks_set_aside
from x86quant.calling.state import state_kept
from x86quant.capture.exported import ops_from_export
from x86quant.capture.observed import Observed
from x86quant.capture.proof import prove
from x86quant.compiled.block_graphs import give_token_step
from x86quant.compiled.token_step import CACHE_NAMES, TokenStep
from x86quant.errors import UnsupportedError, X86QuantWarning, first_line
from x86quant.forms.call_form import CallForm
from x86quant.lowering.graph_tools import is_op, nodes_of
from x86quant.lowering.lower import lower_rows
from x86quant.quantization.graphs.fused_blocks import (
    check_noise,
    compiled_rows,
    drop_packs,
    rows_left_float,
)
from x86quant.unforeseen import described, is_own

_log = logging.getLogger("x86quant.quantization")

#: Sequences, tokens held, tokens that follow, and how many in front are hidden in the first
#: sequence, to prove the graph. The first is traced, so its sizes differ.
_SIZES = ((2, 7, 5, 0), (1, 3, 1, 0), (3, 8, 1, 2), (1, 17, 3, 4), (2, 4, 1, 0))
#: The same, to compare the int8 results: prompts, too, with nothing before them.
_INT8_SIZES = (*_SIZES, (1, 0, 6, 0), (2, 0, 9, 3), (1, 0, 1, 0))
_ATTENTION = "x86quant_newest_tokens"


def with_token_step(model: nn.Module) -> tuple[str, ...]:
    """Let ``model`` add tokens by one native run if it can; returns notes on it."""
    if not _generates(model):
        return ()
    try:
        step = _token_step(model)
    except Exception as error:  # the model's own code may raise anything
        if is_own(error):
            warnings.warn(
                f"each new token runs layer by layer: {described(error)}",
                X86QuantWarning,
                stacklevel=2,
            )
        _log.info("no token step: %s", first_line(error))
        return ()
    give_token_step(model, step)
    drop_packs(model)
    return ("prompts and each new token of generate are one native run",)


def _generates(model: nn.Module) -> bool:
    """Whether ``generate`` of transformers drives ``model``, by the names of its arguments."""
    can = getattr(model, "can_generate", None)
    config = getattr(model, "config", None)
    if not callable(can) or not can() or getattr(config, "is_encoder_decoder", True):
        return False
    names = inspect.signature(model.forward).parameters
    return {*_arguments(model), "use_cache"} <= set(names)


def _arguments(model: nn.Module) -> tuple[str, ...]:
    """What the forward takes, in the order of a case."""
    names = inspect.signature(model.forward).parameters
    cache = next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])
    return "input_ids", "position_ids", cache, "attention_mask", "logits_to_keep"


def _token_step(model: Any) -> TokenStep:
    with state_kept(model), hooks_set_aside(model):
        cache_of = _cache_maker(model)
        with rows_left_float():
            cases = [_Case.of(model, *sizes) for sizes in _INT8_SIZES]
            exact = [case.seen(model, cache_of) for case in cases]
        proved = [*zip(cases, exact, strict=True)][: len(_SIZES)]
        function = _NewestTokens(model, cache_of)
        form, leaves = CallForm.of(function, cases[0].tensors, {})
        with _told_attention(model):
            traced = ops_from_export(function, form, leaves, sizes=_free_sizes)
            observed = [Observed(Call(c.tensors, {}), seen.tensors, False) for c, seen in proved]
            with rows_left_float():
                prove(function, traced, observed)
        lowered, reports = lower_rows(traced.graph_module)
        past = cases[0].past
        layers = past.shape[0] // 2
        _check_all_in_place(lowered, layers)
        compiled = compiled_rows(lowered, reports)
        zeros_unseen = model.config._attn_implementation == "sdpa"
        step = TokenStep(
            compiled,
            exact[0].kind,
            layers,
            past.shape[2],
            past.shape[4],
            zeros_unseen,
            _caches_unasked(model),
        )
        _check_noise(model, step, cache_of, cases, exact)
    return step


def _caches_unasked(model: Any) -> bool:
    """Whether ``model`` makes a cache where a call does not say whether it should."""
    with torch.no_grad():
        result = model(input_ids=torch.zeros(1, 1, dtype=torch.int64), return_dict=True)
    return _cache_of(result) is not None


def _cache_maker(model: Any) -> Callable[[torch.Tensor], Any]:
    """What makes a cache of keys and values [2 layers, batch, heads, tokens, size]."""
    from transformers import DynamicCache

    def cache_of(past: torch.Tensor) -> Any:
        cache = DynamicCache(config=model.config)
        _check_cache(cache)
        for number, layer in enumerate(cache.layers):
            keys, values = past[2 * number], past[2 * number + 1]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache

    return cache_of


class _NewestTokens(nn.Module):
    """A decoder's newest tokens as a function of tensors."""

    def __init__(self, model: nn.Module, cache_of: Any) -> None:
        super().__init__()
        self.model = model
        self.arguments = _arguments(model)
        self.cache_of = cache_of

    def forward(self, input_ids: Any, position_ids: Any, past: Any, hidden: Any, keep: Any) -> Any:
        cache = self.cache_of(past)
        held = torch.cat([past[0, :, 0, :, 0], input_ids.float()], 1)
        mask = torch.ops.x86quant.newest_sees(hidden, input_ids, held)
        given = (input_ids, position_ids, cache, mask, keep)
        result = self.model(
            **dict(zip(self.arguments, given, strict=True)), use_cache=True, return_dict=True
        )
        return result.logits, *_parts(cache)


def _check_cache(cache: Any) -> None:
    from transformers.cache_utils import DynamicLayer

    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise UnsupportedError("its cache keeps more, or less, than all tokens")


def _parts(cache: Any) -> list[torch.Tensor]:
    _check_cache(cache)
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


@dataclasses.dataclass(frozen=True)
class _Returned:
    """What a decoder returned: logits, then the cache's parts; and the class of its result."""

    tensors: tuple[torch.Tensor, ...]
    kind: type


@dataclasses.dataclass(frozen=True)
class _Case:
    """Random tokens behind random tokens.

    Attributes:
        mask: of all tokens, [batch, tokens].
        hidden: how many in front it hides.
        keep: the tokens whose logits are wanted.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    past: torch.Tensor
    mask: torch.Tensor
    hidden: torch.Tensor
    keep: torch.Tensor

    @classmethod
    def of(cls, model: Any, batch: int, held: int, new: int, hidden: int) -> _Case:
        generator = torch.Generator().manual_seed(batch * 10000 + held * 100 + new)
        words = int(model.config.get_text_config().vocab_size)
        ids = torch.randint(words, (batch, held + new), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, :hidden] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            before = max(held, 1)
            result = model(
                input_ids=ids[:, :before],
                attention_mask=mask[:, :before],
                position_ids=positions[:, :before],
                use_cache=True,
                return_dict=True,
            )
        past = torch.stack(_parts(_cache_of(result)))[:, :, :, :held].contiguous()
        hides = torch.zeros(batch, dtype=torch.int64)
        hides[0] = hidden
        # Of the last ones; of a prompt with padding, those that are no padding.
        keep = torch.arange(max(0, new - 3, hidden - held), new)
        # Copies: export would ask what a view is a view of.
        return cls(ids[:, held:].clone(), positions[:, held:].clone(), past, mask, hides, keep)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The arguments of ``_NewestTokens``."""
        return self.ids, self.positions, self.past, self.hidden, self.keep

    def seen(self, model: Any, cache_of: Any) -> _Returned:
        """What the decoder returns, with its own masks."""
        cache = cache_of(self.past.clone())
        given = (self.ids, self.positions, cache, self.mask, self.keep)
        with torch.no_grad():
            named = dict(zip(_arguments(model), given, strict=True))
            result = model(**named, use_cache=True, return_dict=True)
        more = [k for k, v in vars(result).items() if v is not None and k not in _RESULTS]
        if more or _cache_of(result) is not cache:
            raise UnsupportedError(f"it returns {', '.join(more) or 'another cache'}")
        return _Returned((result.logits, *_parts(cache)), type(result))


_RESULTS = ("logits", *CACHE_NAMES)


def _cache_of(result: Any) -> Any:
    """The cache in what a decoder returned."""
    return next((c for n in CACHE_NAMES if (c := getattr(result, n, None)) is not None), None)


def _free_sizes(_: Sequence[torch.Tensor]) -> Any:
    auto = torch.export.Dim.AUTO
    return ({0: auto, 1: auto}, {0: auto, 1: auto}, {1: auto, 3: auto}, {0: auto}, {0: auto})


@contextlib.contextmanager
def _told_attention(model: Any) -> Iterator[None]:
    """A block in which the decoder attends by the mask that it is given."""
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attention)
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


def _attention(
    module: nn.Module, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Any, None]:
    """Attention as transformers calls it: whatever else it is asked for, the proof tells."""
    shares = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=shares)
    return out.transpose(1, 2).contiguous(), None


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
    model: nn.Module,
    step: TokenStep,
    cache_of: Any,
    cases: Sequence[_Case],
    exact: Sequence[_Returned],
) -> None:
    """Raise UnsupportedError if the step is clearly noisier than the layers one by one."""
    wanted, layers, fused = [], [], []
    for case, seen in zip(cases, exact, strict=True):
        given = (case.ids, case.positions, case.past, case.hidden, case.keep)
        room = torch.cat([case.past, case.past.new_zeros((*case.past.shape[:3], 16, step.size))], 3)
        (logits,) = step.compiled.run(
            (*given[:2], room, *given[3:], torch.tensor([case.past.shape[3]], dtype=torch.int64))
        )
        tokens = case.mask.shape[1]
        # What padding leaves in the cache is nobody's.
        unseen = case.mask[:, None, :, None] == 0
        wanted += [x.masked_fill(unseen, 0) if x.dim() == 4 else x for x in seen.tensors]
        fused += [logits, *(x[:, :, :tokens].masked_fill(unseen, 0) for x in room)]
        plain = case.seen(model, cache_of).tensors
        layers += [x.masked_fill(unseen, 0) if x.dim() == 4 else x for x in plain]
    if any(a.shape != b.shape for a, b in zip(wanted, fused, strict=True)):
        raise UnsupportedError("the cache it leaves is of another shape")
    check_noise(wanted, layers, fused)

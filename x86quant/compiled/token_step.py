"""``TokenStep``: the newest tokens of a decoder in one native run, with the cache that it is given.

The cache stays transformers' own ``DynamicCache`` or ``StaticCache``, or an ``Int8Cache``. Its keys
and values come to lie in one buffer, in a cache that grows with room for more tokens; what the
cache shows are views of it. A run writes behind what is held.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from x86quant import extension
from x86quant.compiled.module import CompiledModule
from x86quant.lowering.row_passes.decoding import with_int8_cache
from x86quant.ops.attention import newest_sees

#: A growing cache gets room for so many tokens more at least, and for so many times what it holds.
_LEAST_ROOM, _ROOM = 128, 2
#: Arguments that a call may have beside the ids, and which values leave the result as it is.
_PLAIN_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "use_cache": (True, None),
    "return_dict": (True, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
}
#: What transformers calls a cache in calls and in results: since 5.24, and before.
CACHE_NAMES = ("cache", "past_key_values")
_READ_ARGUMENTS = frozenset(
    {"input_ids", "position_ids", *CACHE_NAMES, "attention_mask", "logits_to_keep"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStep:
    """A graph that stands for a decoder's forward where tokens follow those of a cache.

    Attributes:
        compiled: from ids and positions [batch, tokens], the cache [2 layers, batch, heads, room,
            size], how many tokens in front nobody sees [batch], the tokens whose logits are wanted
            and how many tokens the cache holds [1] to the logits. It writes the new tokens' keys
            and values.
        result: the class of what the forward returns.
        layers: how many layers there are.
        heads, size: of keys and values.
        zeros_unseen: whether the decoder's own attention gives zeros to a token that sees none, as
            the graph does.
        caches_unasked: whether the decoder makes a cache where a call does not tell ``use_cache``
            and its configuration says yes.
    """

    compiled: CompiledModule
    result: type
    layers: int
    heads: int
    size: int
    zeros_unseen: bool
    caches_unasked: bool = True

    def answer(self, config: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the forward returns, or None if the graph does not stand for this call."""
        ids: Any = kwargs.get("input_ids")
        if args or not _is_ids(ids) or not _leaves_result(config, kwargs):
            return None
        if not (kwargs.get("use_cache") or self.caches_unasked):
            return None
        batch, tokens = ids.shape
        keep = _kept(kwargs.get("logits_to_keep"), tokens)
        given = [kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None]
        if len(given) > 1:
            return None  # the forward says that this is one too many
        cache = given[0] if given else _new_cache(config)
        room = None if keep is None else self._room(cache, batch, tokens)
        if keep is None or room is None:
            return None
        hidden = _hidden(kwargs.get("attention_mask"), batch, tokens, room)
        length = torch.tensor([room.held], dtype=torch.int64)
        positions = _positions(kwargs.get("position_ids"), ids, length)
        if hidden is None or positions is None:
            return None
        if not self.zeros_unseen and tokens > 1 and bool((hidden > room.held).any()):
            return None  # tokens that see none get something else
        (logits,) = room.run(self, ids, positions, hidden, keep, length)
        room.show(cache, tokens)
        return self.result(**{"logits": logits, self._cache_name: cache})

    @functools.cached_property
    def _cache_name(self) -> str:
        """What its results call the cache."""
        return next(f.name for f in dataclasses.fields(self.result) if f.name in CACHE_NAMES)

    @functools.cached_property
    def on_codes(self) -> CompiledModule:
        """``compiled``, with an int8 cache: it takes the scales, too. It shares all tensors."""
        graph = with_int8_cache(self.compiled.graph_module)
        return CompiledModule(graph, self.compiled.reports, self.compiled.float_nodes)

    def __getstate__(self) -> dict[str, Any]:
        made = ("on_codes", "_cache_name")
        return {name: value for name, value in vars(self).items() if name not in made}

    def _room(self, cache: Any, batch: int, tokens: int) -> _Room | None:
        """Where so many tokens behind those of ``cache`` go; None if it is not of this decoder."""
        kind = _ROOMS.get(f"{type(cache).__module__}.{type(cache).__qualname__}")
        if kind is None or getattr(cache, "offloading", False):
            return None
        known = getattr(cache, "_x86quant_room", None)
        shape = (2 * self.layers, batch, self.heads, self.size)
        if isinstance(known, kind) and known.goes_on(cache, shape, tokens):
            return known
        of_layer = getattr(sys.modules[type(cache).__module__], kind.layer)
        if len(cache.layers) != self.layers or any(type(x) is not of_layer for x in cache.layers):
            return None
        return kind.made(cache, shape, tokens)


class _Room:
    """What a cache holds, in a buffer that it shows.

    It is known by the tensors that the cache shows: anything else that is found in the cache (a
    shorter view, another order of the batch, a copy) is copied to a buffer of its own, so that
    two caches never write to one.

    Attributes:
        buffer: [2 layers, batch, heads, room, size].
        held: how many tokens are held.
        shown: how many places of the buffer a mask of the cache has, with so many tokens more.
        layer: the name of the class of the cache's layers.
    """

    layer = ""

    def __init__(self, buffer: torch.Tensor, held: int) -> None:
        self.buffer, self.held = buffer, held
        self._shown: list[torch.Tensor] = []
        self._parts_up_to = extension.fast().parts_up_to

    def run(self, step: TokenStep, ids: Any, positions: Any, *more: Any) -> Any:
        """Add tokens by the graph of ``step`` for such a cache."""
        return step.compiled.run((ids, positions, self.buffer, *more))

    @classmethod
    def made(cls, cache: Any, shape: tuple[int, int, int, int], tokens: int) -> _Room | None:
        """A new room with what ``cache`` holds and space for so many tokens more.

        ``shape`` has no size of the room. None if the cache is another's, or has no space.
        """
        raise NotImplementedError

    def goes_on(self, cache: Any, shape: tuple[int, int, int, int], tokens: int) -> bool:
        """Whether it is what ``cache`` shows, and takes so many tokens more."""
        parts, batch, heads, _, size = self.buffer.shape
        held = [*self._held_by(cache)]
        return (
            (parts, batch, heads, size) == shape
            and parts == 2 * len(cache.layers)
            and len(self._shown) == len(held)
            and all(a is b for a, b in zip(held, self._shown, strict=True))
        )

    @staticmethod
    def _held_by(cache: Any) -> Iterator[Any]:
        """The tensors that ``cache`` shows."""
        return _tensors(cache)

    def places(self, tokens: int) -> int:
        """How many keys a mask of the cache is about, with so many tokens more."""
        raise NotImplementedError

    def show(self, cache: Any, tokens: int) -> None:
        """Let ``cache`` show the tokens behind those that it held."""
        raise NotImplementedError

    def _shown_of(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Of keys and values of each layer, or of their scales, the places that are held."""
        # One call for all layers: by torch's operators it takes some hundredths of a step.
        parts: list[torch.Tensor] | None = self._parts_up_to(whole, self.held)
        return [*whole[:, :, :, : self.held].unbind()] if parts is None else parts

    def _give(self, cache: Any, shown: list[torch.Tensor]) -> None:
        self._shown = shown
        for number, layer in enumerate(cache.layers):
            keys, values = shown[2 * number : 2 * number + 2]
            if not layer.is_initialized:
                layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
            layer.keys, layer.values = keys, values
        cache._x86quant_room = self

    def __deepcopy__(self, memo: Any) -> None:
        # A copied cache has tensors of its own, and gets a buffer when it needs one.
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class _GrowingRoom(_Room):
    """Of a ``DynamicCache``, which shows the tokens that are held."""

    layer = "DynamicLayer"

    @classmethod
    def made(cls, cache: Any, shape: tuple[int, int, int, int], tokens: int) -> _Room | None:
        parts, batch, heads, size = shape
        held = 0
        if any(layer.is_initialized for layer in cache.layers):
            keys = cache.layers[0].keys
            held = keys.shape[2] if isinstance(keys, torch.Tensor) and keys.dim() == 4 else -1
            if not all(_is_part(x, (batch, heads, held, size)) for x in _tensors(cache)):
                return None
        buffer = torch.empty(
            parts, batch, heads, cls._places(held + tokens), size, dtype=torch.float32
        )
        if held:
            for part, tensor in zip(buffer, _tensors(cache), strict=True):
                part[:, :, :held] = tensor
        return cls(buffer, held)

    @staticmethod
    def _places(tokens: int) -> int:
        """How many places there are to be for so many tokens."""
        return -(-_ROOM * tokens // _LEAST_ROOM) * _LEAST_ROOM + _LEAST_ROOM

    def goes_on(self, cache: Any, shape: tuple[int, int, int, int], tokens: int) -> bool:
        fits = self.held + tokens <= self.buffer.shape[3]
        return fits and super().goes_on(cache, shape, tokens)

    def places(self, tokens: int) -> int:
        return self.held + tokens

    def show(self, cache: Any, tokens: int) -> None:
        self.held += tokens
        self._give(cache, self._shown_of(self.buffer))


class _FixedRoom(_Room):
    """Of a ``StaticCache``, which shows all of its room and counts what is held."""

    layer = "StaticLayer"

    @classmethod
    def made(cls, cache: Any, shape: tuple[int, int, int, int], tokens: int) -> _Room | None:
        parts, batch, heads, size = shape
        places = {layer.max_cache_len for layer in cache.layers}
        held = _counted(cache)
        if len(places) != 1 or held is None:
            return None
        (room,) = places
        initialized = {layer.is_initialized for layer in cache.layers}
        if held + tokens > room or len(initialized) != 1:
            return None
        buffer = torch.zeros(parts, batch, heads, room, size, dtype=torch.float32)
        if initialized == {True}:
            if not all(_is_part(x, (batch, heads, room, size)) for x in _tensors(cache)):
                return None
            for part, tensor in zip(buffer, _tensors(cache), strict=True):
                part.copy_(tensor)
        elif held:
            return None
        return cls(buffer, held)

    def goes_on(self, cache: Any, shape: tuple[int, int, int, int], tokens: int) -> bool:
        if not super().goes_on(cache, shape, tokens):
            return False
        held = _counted(cache)  # layer by layer it may have got more, and reset it has none
        if held is None or held + tokens > self.buffer.shape[3]:
            return False
        self.held = held
        return True

    def places(self, tokens: int) -> int:
        return self.buffer.shape[3]

    def show(self, cache: Any, tokens: int) -> None:
        self.held += tokens
        if not self._shown:
            self._give(cache, list(self.buffer.unbind()))
        for layer in cache.layers:
            layer.cumulative_length.add_(tokens)


class _CodesRoom(_GrowingRoom):
    """Of an ``Int8Cache``, which shows the tokens that are held: codes and their scales.

    Attributes:
        scales: [2 layers, batch, heads, room].
    """

    layer = "Int8Layer"

    def __init__(self, buffer: torch.Tensor, scales: torch.Tensor, held: int) -> None:
        super().__init__(buffer, held)
        self.scales = scales

    @classmethod
    def made(cls, cache: Any, shape: tuple[int, int, int, int], tokens: int) -> _Room | None:
        parts, batch, heads, size = shape
        held = cache.get_seq_length()
        if any(layer.is_initialized for layer in cache.layers):
            kinds = (
                (torch.int8, (batch, heads, held, size)),
                (torch.float32, (batch, heads, held)),
            )
            if not all(
                type(x) is torch.Tensor and (x.dtype, x.shape, x.device.type) == (*kind, "cpu")
                for layer in cache.layers
                for pair, kind in zip(_coded(layer), kinds, strict=True)
                for x in pair
            ):
                return None
        places = cls._places(held + tokens)
        buffer = torch.empty(parts, batch, heads, places, size, dtype=torch.int8)
        scales = torch.empty(parts, batch, heads, places, dtype=torch.float32)
        if held:
            for number, layer in enumerate(cache.layers):
                for whole, pair in zip((buffer, scales), _coded(layer), strict=True):
                    for part, tensor in enumerate(pair, 2 * number):
                        whole[part, :, :, :held] = tensor
        return cls(buffer, scales, held)

    def run(self, step: TokenStep, ids: Any, positions: Any, *more: Any) -> Any:
        return step.on_codes.run((ids, positions, self.buffer, *more, self.scales))

    @staticmethod
    def _held_by(cache: Any) -> Iterator[Any]:
        return (x for layer in cache.layers for pair in _coded(layer) for x in pair)

    def show(self, cache: Any, tokens: int) -> None:
        self.held += tokens
        codes, scales = self._shown_of(self.buffer), self._shown_of(self.scales)
        for number, layer in enumerate(cache.layers):
            layer.key_codes, layer.value_codes = codes[2 * number : 2 * number + 2]
            layer.key_scales, layer.value_scales = scales[2 * number : 2 * number + 2]
            layer.is_initialized = True
        self._shown = [*self._held_by(cache)]
        cache._x86quant_room = self


_ROOMS: dict[str, type[_Room]] = {
    "x86quant.huggingface.int8_cache.Int8Cache": _CodesRoom,
    "transformers.cache_utils.DynamicCache": _GrowingRoom,
    "transformers.cache_utils.StaticCache": _FixedRoom,
}


def _tensors(cache: Any) -> Iterator[Any]:
    """Keys and values of each layer."""
    for layer in cache.layers:
        yield layer.keys
        yield layer.values


def _coded(layer: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Codes and scales of a layer, of keys and values each."""
    return (layer.key_codes, layer.value_codes), (layer.key_scales, layer.value_scales)


def _counted(cache: Any) -> int | None:
    """How many tokens a static cache holds; None if its layers differ."""
    counts = {int(layer.cumulative_length) for layer in cache.layers}
    return counts.pop() if len(counts) == 1 else None


def _new_cache(config: Any) -> Any:
    """What transformers makes where no cache is given."""
    transformers = sys.modules.get("transformers.cache_utils")
    return None if transformers is None else transformers.DynamicCache(config=config)


def _is_ids(ids: Any) -> bool:
    return (
        type(ids) is torch.Tensor
        and ids.dtype is torch.int64
        and (ids.dim() == 2 and ids.numel() > 0 and ids.device.type == "cpu")
    )


def _leaves_result(config: Any, kwargs: Mapping[str, Any]) -> bool:
    for name, value in kwargs.items():
        if name in _READ_ARGUMENTS:
            continue
        plain = _PLAIN_ARGUMENTS.get(name, (None,))
        if isinstance(value, torch.Tensor) or not any(
            value is x or (type(value) is type(x) and value == x) for x in plain
        ):
            return False
    named = kwargs.get("return_dict") or getattr(config, "return_dict", True)
    cached = kwargs.get("use_cache")
    return bool(named) and bool(getattr(config, "use_cache", False) if cached is None else cached)


def _kept(wanted: Any, tokens: int) -> torch.Tensor | None:
    """Which tokens' logits ``logits_to_keep`` wants: all by 0, else so many of the last ones."""
    if wanted is None:
        wanted = 0
    if type(wanted) is not int or wanted < 0:
        return None
    return _counting(max(tokens - wanted, 0) if wanted else 0, tokens)


@functools.lru_cache(maxsize=16)
def _counting(first: int, end: int) -> torch.Tensor:
    """The numbers from ``first`` on, for reading alone."""
    return torch.arange(first, end, device="cpu")


@functools.lru_cache(maxsize=16)
def _nothing_hidden(batch: int) -> torch.Tensor:
    """Zeros, for reading alone."""
    return torch.zeros(batch, dtype=torch.int64, device="cpu")


def _is_part(x: Any, shape: tuple[int, ...]) -> bool:
    return (
        type(x) is torch.Tensor
        and x.shape == shape
        and x.dtype is torch.float32
        and x.device.type == "cpu"
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def _hidden(mask: Any, batch: int, tokens: int, room: _Room) -> torch.Tensor | None:
    """How many tokens in front each sequence hides; None if ``mask`` says anything else."""
    if type(mask) is dict and [*mask] == ["full_attention"]:  # by the kinds of layers
        mask = mask["full_attention"]
    if mask is None:
        return _nothing_hidden(batch)
    after = room.held + tokens
    if type(mask) is not torch.Tensor or mask.device.type != "cpu":
        return None
    if mask.dim() == 4:
        return _hidden_in_square(mask, batch, tokens, room)
    if mask.shape != (batch, after):
        return None
    if bool(mask.all()):
        return _nothing_hidden(batch)
    seen = mask.bool()
    # The first that is seen; the newest must be, and so must all between.
    hidden = seen.int().argmax(1)
    alike = seen == (torch.arange(after) >= hidden[:, None])
    return hidden if bool(alike.all()) else None


def _hidden_in_square(
    mask: torch.Tensor, batch: int, tokens: int, room: _Room
) -> torch.Tensor | None:
    """The same of a mask [batch, 1, tokens, keys], which must also hide what comes later."""
    after = room.held + tokens
    if mask.dtype is not torch.bool or mask.shape != (batch, 1, tokens, room.places(tokens)):
        return None
    hidden = mask[:, 0, -1].int().argmax(1)
    if bool(mask[..., after:].any()):
        return None
    held = mask[:, 0, 0, :after]
    alike = torch.equal(mask[..., :after], newest_sees(hidden, mask[:, 0], held))
    return hidden if alike else None


def _positions(given: Any, ids: torch.Tensor, length: torch.Tensor) -> torch.Tensor | None:
    """The positions of ``ids`` behind ``length`` tokens; None if ``given`` are none."""
    if given is None:
        if ids.numel() == 1:
            return length[None]
        given = (length + _counting(0, ids.shape[1]))[None]
    if type(given) is not torch.Tensor or given.dtype is not torch.int64 or given.dim() != 2:
        return None
    if given.shape[1] != ids.shape[1] or given.shape[0] not in (1, ids.shape[0]):
        return None
    return given.expand(ids.shape)

"""``TokenStep``: the newest token of a decoder in one native run, with the cache that it is given.

The cache stays transformers' own ``DynamicCache``. Its keys and values come to lie in one buffer
with room for more tokens; what the cache shows are views of it. A run writes behind what is held,
and the cache shows one token more.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from x86quant.compiled.module import CompiledModule

#: A cache gets room for so many tokens more at least, and for so many times what it holds.
_LEAST_ROOM, _ROOM = 128, 2
#: Arguments that a call may have beside the ids, and which values leave the result as it is.
_PLAIN_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "use_cache": (True,),
    "return_dict": (True, None),
    "logits_to_keep": (0, 1, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
}
_TENSOR_ARGUMENTS = frozenset({"input_ids", "position_ids", "past_key_values", "attention_mask"})


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStep:
    """A graph that stands for a decoder's forward where one token follows those of a cache.

    Attributes:
        compiled: from ids, positions [batch, 1], the cache [2 layers, batch, heads, room, size] and
            how many tokens it holds to the logits. It writes the new token's keys and values.
        result: the class of what the forward returns.
        heads, size: of keys and values.
        layers: how many layers there are.
    """

    compiled: CompiledModule
    result: type
    layers: int
    heads: int
    size: int

    def answer(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the forward returns, or None if the graph does not stand for this call."""
        cache = kwargs.get("past_key_values")
        ids: Any = kwargs.get("input_ids")
        if args or not _is_ids(ids) or not _leaves_result(kwargs):
            return None
        room = _Room.shown_by(cache)
        if room is None or not self._fits(room, ids.shape[0]):
            held = self._held(cache, ids.shape[0])
            if held is None:
                return None
            room = _Room(held)
        length = room.held
        if not _sees_all(kwargs.get("attention_mask"), ids.shape[0], length + 1):
            return None
        positions = _positions(kwargs.get("position_ids"), ids, length)
        if positions is None:
            return None
        (logits,) = self.compiled.run((ids, positions, room.buffer, room.length))
        room.show_one_more(cache)
        return self.result(logits=logits, past_key_values=cache)

    def _fits(self, room: _Room, batch: int) -> bool:
        """Whether ``room`` is for this decoder: a cache may be another's."""
        parts, sequences, heads, _, size = room.buffer.shape
        wanted = (2 * self.layers, batch, self.heads, self.size)
        return (parts, sequences, heads, size) == wanted

    def _held(self, cache: Any, batch: int) -> list[torch.Tensor] | None:
        """Keys and values of each layer; None if ``cache`` is not one that grows by a token."""
        transformers = sys.modules.get("transformers.cache_utils")
        if transformers is None or type(cache) is not transformers.DynamicCache:
            return None
        layers = cache.layers
        if len(layers) != self.layers or getattr(cache, "offloading", False):
            return None
        held = []
        for layer in layers:
            if type(layer) is not transformers.DynamicLayer or not layer.is_initialized:
                return None
            held += [layer.keys, layer.values]
        first = held[0]
        shape = (batch, self.heads, first.shape[2] if first.dim() == 4 else 0, self.size)
        fits = shape[2] > 0 and all(_is_part(x, shape) for x in held)
        return held if fits else None


class _Room:
    """What a cache holds, in a buffer with room for more.

    It is known by the tensors that the cache shows: anything else that is found in the cache (a
    shorter view, another order of the batch, a copy) is copied to a buffer of its own, so that
    two caches never write to one.

    Attributes:
        buffer: [2 layers, batch, heads, room, size].
        held: how many tokens are held.
    """

    def __init__(self, held: Sequence[torch.Tensor]) -> None:
        batch, heads, length, size = held[0].shape
        room = -(-_ROOM * length // _LEAST_ROOM) * _LEAST_ROOM + _LEAST_ROOM
        self.buffer = torch.empty(len(held), batch, heads, room, size)
        for part, tensor in zip(self.buffer, held, strict=True):
            part[:, :, :length] = tensor
        self.held = length
        self._shown: list[torch.Tensor] = []
        self._kind: type = type(None)

    @classmethod
    def shown_by(cls, cache: Any) -> _Room | None:
        """The room of all that ``cache`` shows, if it has space for one token more."""
        room = getattr(cache, "_x86quant_room", None)
        if not isinstance(room, cls) or room.held >= room.buffer.shape[3]:
            return None
        layers = cache.layers
        if 2 * len(layers) != len(room._shown) or type(cache) is not room._kind:
            return None
        shown = iter(room._shown)
        for layer in layers:
            if layer.keys is not next(shown) or layer.values is not next(shown):
                return None
        return room

    @property
    def length(self) -> torch.Tensor:
        """How many tokens are held, int64 [1]."""
        return torch.tensor([self.held])

    def show_one_more(self, cache: Any) -> None:
        """Let ``cache`` show the token behind those that it held."""
        self.held += 1
        self._shown = list(self.buffer[:, :, :, : self.held].unbind())
        for number, layer in enumerate(cache.layers):
            layer.keys, layer.values = self._shown[2 * number : 2 * number + 2]
        self._kind = type(cache)
        cache._x86quant_room = self

    def __deepcopy__(self, memo: Any) -> None:
        # A copied cache has tensors of its own, and gets a buffer when it needs one.
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _is_ids(ids: Any) -> bool:
    return (
        type(ids) is torch.Tensor
        and ids.dtype is torch.int64
        and ids.dim() == 2
        and (ids.shape[1] == 1 and ids.shape[0] > 0 and ids.device.type == "cpu")
    )


def _leaves_result(kwargs: Mapping[str, Any]) -> bool:
    for name, value in kwargs.items():
        if name in _TENSOR_ARGUMENTS:
            continue
        plain = _PLAIN_ARGUMENTS.get(name, (None,))
        if isinstance(value, torch.Tensor) or not any(
            value is x or (type(value) is type(x) and value == x) for x in plain
        ):
            return False
    return kwargs.get("use_cache") is True


def _is_part(x: Any, shape: tuple[int, ...]) -> bool:
    return (
        type(x) is torch.Tensor
        and x.shape == shape
        and x.dtype is torch.float32
        and x.device.type == "cpu"
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def _sees_all(mask: Any, batch: int, tokens: int) -> bool:
    """Whether ``mask`` hides nothing from the newest token."""
    if mask is None:
        return True
    if type(mask) is not torch.Tensor or mask.shape != (batch, tokens):
        return False
    return bool(mask.all())


def _positions(given: Any, ids: torch.Tensor, length: int) -> torch.Tensor | None:
    """The positions of ``ids``; None if ``given`` are none."""
    if given is None:
        return torch.full_like(ids, length)
    if type(given) is not torch.Tensor or given.dtype is not torch.int64:
        return None
    if given.dim() != 2 or given.shape[1] != 1 or given.shape[0] not in (1, ids.shape[0]):
        return None
    return given.expand(ids.shape)

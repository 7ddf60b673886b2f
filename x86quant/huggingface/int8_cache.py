"""``Int8Cache``: keys and values of a decoder in int8, for ``generate`` of transformers.

    cache = x86quant.Int8Cache(model.config)
    model.generate(ids, past_key_values=cache)

Each token's features of a head become codes from -127 to 127 with a scale of their own when they
are written. Decoders that x86quant runs natively read the codes where they lie; any other model of
transformers gets them as floats, layer by layer.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, get_layer_types_and_kwargs

from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.ops.cache_codes import cache_codes, from_cache_codes

_PARTS = ("key_codes", "value_codes", "key_scales", "value_scales")


class Int8Layer(DynamicLayer):  # type: ignore[misc]
    """One layer of an ``Int8Cache``.

    Attributes:
        key_codes, value_codes: int8 [batch, heads, tokens, size]; None until there are tokens.
        key_scales, value_scales: float32 [batch, heads, tokens].
        dtype: of the keys and values that were given last, and are given back.
    """

    key_codes: Any
    value_codes: Any
    key_scales: Any
    value_scales: Any

    def __init__(self) -> None:
        super().__init__()
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._drop()

    def _drop(self) -> None:
        for name in _PARTS:
            setattr(self, name, None)
        self.is_initialized = False

    @property
    def keys(self) -> Any:
        """The keys as floats, made anew each time; None until there are tokens."""
        return self._floats(self.key_codes, self.key_scales)

    @keys.setter
    def keys(self, given: Any) -> None:
        self._refuse(given)

    @property
    def values(self) -> Any:
        """The values as floats, made anew each time; None until there are tokens."""
        return self._floats(self.value_codes, self.value_scales)

    @values.setter
    def values(self, given: Any) -> None:
        self._refuse(given)

    @staticmethod
    def _refuse(given: Any) -> None:
        if given is not None:  # which transformers sets where there are none
            raise InvalidInputError(
                "keys and values of an Int8Cache are codes: write tokens with update()"
            )

    def _floats(self, codes: Any, scales: Any) -> Any:
        return None if codes is None else from_cache_codes(codes, scales).to(self.dtype)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Begin with no tokens, of heads like these."""
        self.dtype, self.device = key_states.dtype, key_states.device
        for name, states in (("key", key_states), ("value", value_states)):
            codes, scales = cache_codes(states[:, :, :0])
            setattr(self, f"{name}_codes", codes)
            setattr(self, f"{name}_scales", scales)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens; returns the keys and values of all, as floats.

        Raises:
            InvalidInputError: they do not follow those that are held, or want gradients.
        """
        self._check(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.dtype = key_states.dtype
        for name, states in (("key", key_states), ("value", value_states)):
            codes, scales = cache_codes(states)
            for part, new, dim in (("codes", codes, -2), ("scales", scales, -1)):
                joined = torch.cat([getattr(self, f"{name}_{part}"), new], dim)
                setattr(self, f"{name}_{part}", joined)
        return self.keys, self.values

    def _check(self, *new: torch.Tensor) -> None:
        for states, held in zip(new, (self.key_codes, self.value_codes), strict=True):
            if states.dim() != 4 or not states.is_floating_point():
                raise InvalidInputError(
                    "an Int8Cache takes floats [batch, heads, tokens, size], "
                    f"got {states.dtype} {tuple(states.shape)}"
                )
            if states.requires_grad and torch.is_grad_enabled():
                raise InvalidInputError(
                    "an Int8Cache has no gradients: call the model under torch.no_grad()"
                )
            if held is None:
                continue
            batch, heads, _, size = states.shape
            if (batch, heads, size) != (*held.shape[:2], held.shape[3]):
                raise InvalidInputError(
                    f"an Int8Cache of {held.shape[0]} sequences with {held.shape[1]} heads of "
                    f"{held.shape[3]} features cannot take {tuple(states.shape)}: it is of "
                    "another batch or model; begin with a new one"
                )

    def get_seq_length(self) -> int:
        """How many tokens are held."""
        return 0 if self.key_codes is None else int(self.key_codes.shape[2])

    def offload(self) -> None:
        """Nothing: it is on the CPU."""

    def prefetch(self) -> None:
        """Nothing: it is on the CPU."""

    def reset(self) -> None:
        """Forget all tokens."""
        self._drop()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise InvalidInputError(
                f"crop takes how many tokens to remove as a negative number, got {tokens_to_remove}"
            )
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        left = max(self.get_seq_length() + tokens_to_remove, 0)
        for name in _PARTS:
            setattr(self, name, getattr(self, name)[:, :, :left])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let sequence i be what ``beam_idx[i]`` was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """So many of each sequence, side by side."""
        if self.get_seq_length() > 0:
            for name in _PARTS:
                setattr(self, name, getattr(self, name).repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order."""
        if self.get_seq_length() > 0:
            for name in _PARTS:
                setattr(self, name, getattr(self, name)[indices])


class Int8Cache(Cache):  # type: ignore[misc]
    """A growing cache in int8: a quarter of the memory of floats, and a scale a token and head.

    Args:
        config: of the model that will fill it.

    Raises:
        UnsupportedError: not every layer of the model attends to all tokens.
    """

    def __init__(self, config: Any) -> None:
        decoder = config.get_text_config(decoder=True)
        kinds, _ = get_layer_types_and_kwargs(decoder)
        others = sorted({*kinds} - {"full_attention"})
        if others:
            raise UnsupportedError(
                f"an Int8Cache keeps all tokens, and this model has layers with {', '.join(others)}"
            )
        super().__init__(layers=[Int8Layer() for _ in kinds])

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and scales of the tokens that are held."""
        parts = (getattr(layer, name) for layer in self.layers for name in _PARTS)
        return sum(x.nbytes for x in parts if x is not None)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens to a layer; returns its keys and values of all tokens, as floats."""
        if layer_idx >= len(self.layers):
            raise InvalidInputError(
                f"an Int8Cache made for {len(self.layers)} layers has no layer {layer_idx}: "
                "make it of the configuration of the model that fills it"
            )
        keys, values = self.layers[layer_idx].update(key_states, value_states)
        return keys, values

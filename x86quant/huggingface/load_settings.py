"""``X86QuantConfig``: what transformers is to quantize as it loads a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.quantizers import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from x86quant.dynamic import check_bits
from x86quant.errors import InvalidInputError
from x86quant.huggingface.checkpoint_formats import FORMATS, OURS, format_of
from x86quant.quantization.settings import Switch

METHOD = OURS
_SCHEMES = ("dynamic", "weight_only")


@register_quantization_config(METHOD)
class X86QuantConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How the linears of a model become int8; given to ``from_pretrained``, kept in its config.

    Attributes:
        bits: of a linear's weight: 8, or 4 with a scale for each group of 32 input features.
        scheme: "dynamic" quantizes each token as it comes, "weight_only" keeps them in float.
        modules_to_not_convert: modules that stay in float: names, last parts of names ("o_proj"),
            names of containers, or of classes. None means none. The head of a model that ties it to
            an embedding becomes int8 beside the table, which stays as it is.
        embeddings: whether embedding tables become int8 too, but for those that are tied to what
            stays in float.
        fuse_blocks: whether the model runs as native graphs, made when it is loaded: whole
            encoders, and prompts and new tokens of decoders. "auto" is for models of many
            weights, which are worth some seconds.
        checkpoint: whose files the weights come from, a name in ``checkpoint_formats.FORMATS``.
    """

    def __init__(
        self,
        bits: int = 8,
        scheme: str = "dynamic",
        modules_to_not_convert: Sequence[str] | None = None,
        embeddings: bool = False,
        fuse_blocks: Switch = "auto",
        checkpoint: str = METHOD,
        quant_method: str = METHOD,
        weight_bits: int | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise InvalidInputError(
                f"X86QuantConfig has no option {', '.join(sorted(unknown))}; it has weight_bits, "
                "scheme, modules_to_not_convert, embeddings and fuse_blocks"
            )
        self.quant_method = quant_method
        self.bits = bits if weight_bits is None else weight_bits  # as ``quantize`` calls them
        self.scheme = scheme
        self.modules_to_not_convert = modules_to_not_convert
        self.embeddings = embeddings
        self.fuse_blocks = fuse_blocks
        self.checkpoint = checkpoint
        self.check()

    def check(self) -> None:
        """Raise InvalidInputError at options that mean nothing."""
        if self.quant_method != METHOD:
            raise InvalidInputError(
                f"X86QuantConfig is for the method {METHOD!r}, not {self.quant_method!r}"
            )
        check_bits(self.bits)
        if self.scheme == "mixed":
            raise InvalidInputError(
                "this model has int8 layers of several kinds, which only x86quant.save can write: "
                "save it again with that"
            )
        if self.scheme not in _SCHEMES:
            raise InvalidInputError(
                f"scheme must be {' or '.join(map(repr, _SCHEMES))}, not {self.scheme!r}"
            )
        names = self.modules_to_not_convert
        if names is not None:
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise InvalidInputError(
                    f"modules_to_not_convert must be a list of names, not {names!r}"
                )
            self.modules_to_not_convert = list(names)  # JSON knows no tuples
        if not isinstance(self.embeddings, bool):
            raise InvalidInputError(f"embeddings must be True or False, not {self.embeddings!r}")
        if self.fuse_blocks != "auto" and not isinstance(self.fuse_blocks, bool):
            raise InvalidInputError(
                f'fuse_blocks must be True, False or "auto", not {self.fuse_blocks!r}'
            )
        if self.checkpoint not in FORMATS:
            raise InvalidInputError(
                f"checkpoint must be {' or '.join(map(repr, FORMATS))}, not {self.checkpoint!r}"
            )

    @classmethod
    def from_others(cls, settings: Mapping[str, Any]) -> X86QuantConfig:
        """For files by another library, whose ``quantization_config`` is ``settings``.

        Raises:
            UnsupportedError: their format is one that cannot be read; says what is missing.
        """
        return cls(checkpoint=format_of(settings))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, X86QuantConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

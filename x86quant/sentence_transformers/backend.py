"""What ``backend="x86quant"`` does: weights become int8 while they load, and the whole runs native.

The transformer is loaded as ``x86quant.huggingface`` loads any. Native graphs are made of the whole
model, tokens to embeddings, since only the whole tells whether rows of padding are read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import sentence_transformers
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder

from x86quant.calling.call import Call
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.huggingface import X86QuantConfig
from x86quant.huggingface.load_model import stored_settings
from x86quant.huggingface.native_graphs import give_graphs
from x86quant.quantization.batches import Calibration
from x86quant.quantization.sentences import takes_pairs
from x86quant.quantization.settings import Switch

BACKEND = "x86quant"
#: What this was tested with.
_TESTED = "6.2"
#: Tokens of the texts on which graphs are proved. The first is traced.
_LENGTHS = (12, 7, 20)
#: Pairs in a call of a reranker, whose result is one number: the noise of a few says little.
_PAIRS = 16


def register() -> None:
    """Let sentence-transformers know the back end.

    Raises:
        UnsupportedError: the version that is installed loads models in another way.
    """
    try:
        from sentence_transformers.base.modules import Transformer

        names = inspect.signature(Transformer._load_model).parameters
    except (ImportError, AttributeError):
        names = {}  # type: ignore[assignment]
    if not {"config", "backend"} <= names.keys():
        raise UnsupportedError(
            f"x86quant.sentence_transformers is tested with sentence-transformers {_TESTED}, and "
            f"{sentence_transformers.__version__} is installed, which loads models in another way: "
            f"pip install 'sentence-transformers=={_TESTED}.*', or quantize the loaded model by "
            "x86quant.quantize"
        )
    Transformer._load_model = _loading_int8(Transformer._load_model)
    for kind in (SentenceTransformer, CrossEncoder, SparseEncoder):
        kind.__init__ = _made_native(kind.__init__)


def _loading_int8(load_model: Callable[..., Any]) -> Callable[..., Any]:
    """``Transformer._load_model`` that knows one back end more."""
    signature = inspect.signature(load_model)

    @functools.wraps(load_model)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        if call.arguments["backend"] != BACKEND:
            return load_model(*args, **kwargs)
        config = call.arguments["config"]
        options = call.arguments.setdefault("model_kwargs", {})
        settings = _settings(config, options.pop("quantization_config", None))
        alone = {**settings.to_dict(), "fuse_blocks": False}  # graphs are those of the whole
        if stored_settings(config) is None:
            options["quantization_config"] = X86QuantConfig(**alone)
        else:
            config.quantization_config = alone
        call.arguments["backend"] = "torch"
        model = load_model(*call.args, **call.kwargs)
        model.config.quantization_config.fuse_blocks = settings.fuse_blocks
        return model

    return loaded


def _settings(config: Any, given: Any) -> X86QuantConfig:
    """The options of a model: those in its files, or else those given."""
    if not isinstance(given, X86QuantConfig | None):
        raise InvalidInputError(
            f'backend="{BACKEND}" takes quantization_config=x86quant.X86QuantConfig(...), not '
            f"{type(given).__name__}"
        )
    stored = stored_settings(config)
    if stored is None:
        return given or X86QuantConfig()
    settings = X86QuantConfig(**stored)
    if given is not None:
        settings.fuse_blocks = given.fuse_blocks  # the one that files do not settle
        if given != settings and given != X86QuantConfig(fuse_blocks=given.fuse_blocks):
            raise InvalidInputError(
                "the model in this folder is quantized already, as its config.json says: of "
                "quantization_config only fuse_blocks can be given"
            )
    return settings


def _made_native(init: Callable[..., None]) -> Callable[..., None]:
    """An ``__init__`` that ends with native graphs of the whole, where the back end is ours."""

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        ours = [m for m in self.modules() if m is not self and _is_ours(m)]
        if ours:
            if self.device.type != "cpu":
                raise InvalidInputError(
                    f'backend="{BACKEND}" runs on the CPU, not on {self.device}: give device="cpu"'
                )
            fuse_blocks: Switch = ours[0].model.config.quantization_config.fuse_blocks
            give_graphs(self, fuse_blocks, made_up_calls)

    return made


def _is_ours(module: Any) -> bool:
    return getattr(module, "backend", None) == BACKEND


def made_up_calls(model: Any) -> list[Call]:
    """Calls of ``model`` as its own methods make them, of texts of random tokens."""
    generator = torch.Generator().manual_seed(0)
    tokenizer = model.tokenizer

    def text(length: int) -> str:
        ids = torch.randint(len(tokenizer), (length,), generator=generator)
        words: str = tokenizer.decode(ids, skip_special_tokens=True)
        return words

    data: list[Any] = [text(length) for length in _LENGTHS]
    if takes_pairs(model):
        pairs = ([(text(n), text(n + 3)) for _ in range(_PAIRS)] for n in _LENGTHS)
        data = [dict(model.preprocess(batch)) for batch in pairs]
    return list(Calibration(data, model).sample)

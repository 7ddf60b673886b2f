"""``load``: an int8 or 4-bit model from a folder, ours or one by another library."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import transformers

from x86quant.errors import InvalidInputError
from x86quant.huggingface.compressed_format import cache_note
from x86quant.huggingface.load_settings import METHOD, X86QuantConfig
from x86quant.quantization.settings import Switch


def load(
    folder: str | os.PathLike[str],
    model_class: Any = None,
    *,
    fuse_blocks: Switch | None = None,
    **options: Any,
) -> Any:
    """The int8 model that ``folder`` holds.

    Args:
        folder: what ``save_pretrained`` of a model loaded with ``X86QuantConfig`` wrote, or a
            checkpoint by compressed-tensors (4 and 8 bits, with float or int8 activations), GPTQ,
            AWQ, AutoRound or torchao, whose codes are taken as they are.
            Or a GGUF file, of which the linears keep their codes.
        model_class: such as ``transformers.AutoModel``; by default the class that was saved.
        fuse_blocks: as in ``X86QuantConfig``; by default what the folder says, or "auto".
        options: passed to its ``from_pretrained``.

    Raises:
        InvalidInputError: the folder holds no quantized model, or lacks weights.
        UnsupportedError: it is in a format that cannot be read; says which.
    """
    if os.fspath(folder).endswith(".gguf"):
        from x86quant.huggingface.gguf_model import load_gguf  # which reads transformers' names

        return load_gguf(folder, "auto" if fuse_blocks is None else fuse_blocks)
    config = options.pop("config", None) or transformers.AutoConfig.from_pretrained(folder)
    asked = _as_dict(getattr(config, "quantization_config", None)) or {}
    settings = stored_settings(config)
    if settings is None:
        raise InvalidInputError(
            f"{os.fspath(folder)} holds a float model: give its from_pretrained "
            "quantization_config=x86quant.X86QuantConfig()"
        )
    if fuse_blocks is not None:
        settings = {**settings, "fuse_blocks": fuse_blocks}
    config.quantization_config = settings
    if model_class is None:
        names = config.architectures or ["AutoModel"]
        model_class = getattr(transformers, names[0], transformers.AutoModel)
    model = model_class.from_pretrained(folder, config=config, **options)
    if (note := cache_note(asked)) is not None:
        done = model.quantization
        model.quantization = dataclasses.replace(done, notes=(*done.notes, note))
    return model


def stored_settings(config: Any) -> dict[str, Any] | None:
    """The options of ``X86QuantConfig`` for files with this ``config``; None for a float model.

    Raises:
        UnsupportedError: they are in a format that cannot be read; says which.
    """
    found = _as_dict(getattr(config, "quantization_config", None))
    if found is None:
        return None
    if found.get("quant_method") != METHOD:
        found = X86QuantConfig.from_others(found).to_dict()
    return found


def _as_dict(settings: Any) -> dict[str, Any] | None:
    return settings if settings is None or isinstance(settings, dict) else settings.to_dict()

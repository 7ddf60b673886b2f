"""Models of the transformers package: their class and configuration as plain data.

A name in a file is looked up in ``transformers`` itself and must be one of its model classes; no
module is imported by a name from a file. A configuration is data too, but some of its entries make
transformers download or run code: a file that has one of these is refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from typing import Any

import torch
from torch import nn

from x86quant.dynamic.experts import open_experts
from x86quant.errors import ArtifactError, first_line
from x86quant.terminal.silence import silent

#: Entries that make transformers fetch code or weights, at any depth.
_FORBIDDEN = frozenset(
    {
        "auto_map", "backbone", "custom_pipelines", "quantization_config", "timm_config",
        "trust_remote_code", "use_pretrained_backbone", "use_timm_backbone",
        "use_kernels", "kernel_config",
    }
)  # fmt: skip
#: By types of configurations: the entry with the name of a model of timm, which may be an address.
_NAMES_OF_TIMM = {"timm_backbone": "backbone", "timm_wrapper": "architecture"}
#: Said of a backbone, since transformers once took its weights from the net unless it was told.
_NO_DOWNLOAD = {"use_pretrained_backbone": False}
_ATTENTIONS = ("eager", "sdpa", "flex_attention")
_EXPERTS = ("eager", "batched_mm", "grouped_mm")
_MAX_DEPTH = 16
#: What transformers raises once it is asked for a class that lacks what it needs.
_IMPORT_ERRORS = (ImportError, RuntimeError)


def is_one(model: nn.Module) -> bool:
    """Whether transformers itself can make a model of the class of ``model`` from its config."""
    package = sys.modules.get("transformers")
    try:
        return package is not None and _find(package, type(model).__name__) is type(model)
    except _IMPORT_ERRORS:
        return False


def write(model: nn.Module, classes: dict[str, str]) -> dict[str, Any] | None:
    """The configuration of ``model`` as JSON; None if transformers is not to make it of that.

    Some models put other modules into themselves when they are called: ``classes`` are the names
    of those that must be there, by path.
    """
    try:
        written = _written(model)
        made = build_anywhere(type(model).__name__, written)
    except ArtifactError:
        return None
    open_experts(made, classes)
    found = dict(made.named_modules(remove_duplicate=False))
    fits = all(type(found.get(path)).__name__ == name for path, name in classes.items())
    return written if fits else None


def why_given(model: nn.Module) -> str:
    """Why ``load`` needs a model of the class of ``model``, if transformers is not to make it."""
    try:
        _written(model)
    except ArtifactError as error:
        return str(error)
    return "its configuration makes other modules: it changed them, as when it was called"


def _written(model: nn.Module) -> dict[str, Any]:
    config: Any = model.config
    found = json.loads(config.to_json_string(use_diff=False))
    _drop_empty(found)
    found.pop("_name_or_path", None)
    _check(found, 0)
    attention = _attention_of(config)
    if not _is_attention(attention):
        raise ArtifactError(
            f"its attention {str(attention)[:80]!r} is not one of transformers' own"
        )
    return {"values": found, "attention": attention}


def _attention_of(config: Any) -> Any:
    """How a model of ``config`` attends; by names of parts, under "" its own, if these differ."""
    own = getattr(config, "_attn_implementation", None)
    parts = {
        name: _attention_of(part)
        for name in getattr(config, "sub_configs", ())
        if (part := getattr(config, name, None)) is not None
    }
    return own if all(part == own for part in parts.values()) else {"": own, **parts}


def _is_attention(value: Any, depth: int = 0) -> bool:
    """Whether ``value`` is one that :func:`_attention_of` returns, and runs transformers' own."""
    if isinstance(value, dict):
        return depth < _MAX_DEPTH and all(_is_attention(x, depth + 1) for x in value.values())
    return value is None or value in _ATTENTIONS


def build_anywhere(name: str, config: object) -> nn.Module:
    """A model as of :func:`build`, without memory of its own where its code takes that."""
    try:
        return build(name, config, "meta")
    except ArtifactError:
        return build(name, config, "cpu")


def build(name: str, config: object, device: str) -> nn.Module:
    """A model of the transformers class ``name``, on ``device``; its weights mean nothing.

    Raises:
        ArtifactError: transformers is not there, has no such class, or cannot make it.
    """
    if not isinstance(config, dict) or config.keys() != {"values", "attention"}:
        raise ArtifactError("its configuration does not consist of values and attention")
    values, attention = config["values"], config["attention"]
    if not isinstance(values, dict) or not _is_attention(attention):
        raise ArtifactError("its configuration is not one that save writes")
    _check(values, 0)
    if importlib.util.find_spec("transformers") is None:
        raise ArtifactError(
            f"it holds a {name} of transformers, which is not installed: install it, or give "
            f"load(path, model=...) such a model"
        )
    transformers: Any = importlib.import_module("transformers")
    try:
        cls = _find(transformers, name)
    except _IMPORT_ERRORS as error:
        raise ArtifactError(
            f"this transformers {transformers.__version__} cannot import its {name}: "
            f"{first_line(error.__cause__ or error)}"
        ) from error
    if cls is None:
        raise ArtifactError(
            f"this transformers {transformers.__version__} has no model class {name[:80]!r}"
        )
    try:
        with silent(), torch.device(device):
            made = cls.config_class.from_dict(values)
            if attention is not None:
                made._attn_implementation = attention
            model: nn.Module = cls(made)
    # Classes of transformers raise anything for values that make no sense.
    except Exception as error:
        raise ArtifactError(
            f"transformers {transformers.__version__} cannot make a {name} of its configuration: "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from error
    return model.eval()


def _find(package: Any, name: str) -> Any | None:
    """The model class ``name`` of transformers, or None.

    Raises:
        ImportError, RuntimeError: there is one, which lacks what it needs.
    """
    if not name.isidentifier() or not isinstance(package.__dict__.get("__all__", ()), list | tuple):
        return None
    found, base = getattr(package, name, None), package.PreTrainedModel
    is_model = isinstance(found, type) and issubclass(found, base) and found is not base
    if not is_model or not found.__module__.startswith("transformers.models."):
        return None
    return found if getattr(found, "config_class", None) is not None else None


def _drop_empty(value: Any) -> None:
    """Leave out forbidden entries that say nothing: configurations have them by default.

    That layers are int8, and which, is in the file itself.
    """
    if isinstance(value, dict):
        for key in [k for k in value if k in _FORBIDDEN and not value[k]]:
            del value[key]
        if value.get("model_type") == "timm_backbone":
            value |= _NO_DOWNLOAD
        settings = value.get("quantization_config")
        if isinstance(settings, dict) and settings.get("quant_method") == "x86quant":
            del value["quantization_config"]
        for item in value.values():
            _drop_empty(item)
    elif isinstance(value, list):
        for item in value:
            _drop_empty(item)


def _check(value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ArtifactError("its configuration is nested too deeply")
    if isinstance(value, dict):
        allowed = _allowed_of_timm(value)
        for key, item in value.items():
            if (key in _FORBIDDEN and key not in allowed) or _is_address(key, item):
                raise ArtifactError(
                    f"its configuration has {key}, which may make transformers run foreign code"
                )
            if "implementation" in key and item not in (None, *_ATTENTIONS, *_EXPERTS):
                raise ArtifactError(f"its configuration asks for {key} {str(item)[:80]!r}")
            _check(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check(item, depth + 1)


def _is_address(key: str, item: Any) -> bool:
    """Whether an entry names a backbone that is to be fetched, instead of describing it."""
    return key == "backbone_config" and item is not None and not isinstance(item, dict)


def _allowed_of_timm(config: dict[str, Any]) -> frozenset[str]:
    """Entries of a configuration that may stand in it, since it is of a model of timm's own.

    Raises:
        ArtifactError: its model may be one that timm would fetch.
    """
    kind = config.get("model_type")
    entry = _NAMES_OF_TIMM.get(kind) if isinstance(kind, str) else None
    if entry is None:
        return frozenset()
    name = config.get(entry)
    if not isinstance(name, str) or not re.fullmatch(r"\w+(\.\w+)?", name, re.ASCII):
        raise ArtifactError(
            f"its configuration names {str(name)[:80]!r}, which is no model of timm's own"
        )
    if entry == "backbone" and _NO_DOWNLOAD.items() <= config.items():
        return frozenset({entry, *_NO_DOWNLOAD})
    return frozenset()

"""A decoder from a GGUF file: its own codes in the linears, which never were floats here.

What a tensor is called, and what the model looks like, transformers and the package gguf know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import modeling_gguf_pytorch_utils as gguf_names

from x86quant.dynamic import (
    DynamicLinear,
    WeightOnlyEmbedding,
    is_linear,
    note_in_config,
    why_float,
)
from x86quant.dynamic.experts import is_experts, replace_tensor
from x86quant.dynamic.layers import is_conv1d
from x86quant.errors import InvalidInputError, UnsupportedError, X86QuantError, first_line
from x86quant.huggingface.gguf_families import (
    FACTORS,
    Family,
    changed_back,
    check_sizes,
    complete_config,
    family_of,
    row_order,
    scale_positions,
)
from x86quant.huggingface.gguf_file import GgufFile, GgufTensor, read_parts
from x86quant.huggingface.gguf_weights import group_weights, is_matrix_of_codes, real_numbers
from x86quant.huggingface.mapped_files import give_back
from x86quant.huggingface.native_graphs import give_graphs
from x86quant.quantization.settings import Switch

_HEAD = "lm_head.weight"


def load_gguf(path: str | os.PathLike[str], fuse_blocks: Switch = "auto") -> Any:
    """The model in the file at ``path``; each linear in codes computes in 4 or 8 bits.

    Raises:
        InvalidInputError: the file is damaged, or lacks tensors of the model.
        UnsupportedError: its architecture, or a type of its tensors, is none that can be read.
    """
    file = Path(path)
    stored = read_parts(file)  # before others look at it
    try:
        family = family_of(stored.metadata)
        check_sizes(stored.metadata, [x.shape for x in stored.tensors.values()])
        model = _model_of(file, family, stored)
    except X86QuantError as error:
        raise type(error)(f"{file}: {error}") from error
    places = _places(model, stored.metadata["general.architecture"], stored.tensors, file)
    known = {name for name, _ in model.named_parameters()}
    tied = model.config.tie_word_embeddings and _HEAD in known - places.keys()
    table = _table_name(model) if tied else ""
    missing = sorted(known - places.keys() - ({_HEAD} if table in places else set()))
    if missing:
        raise InvalidInputError(
            f"{file} lacks {len(missing)} tensors of the model: {', '.join(missing[:4])}"
        )
    # Weights come first, and make the layers that biases belong to.
    for name, tensors in sorted(places.items(), key=lambda place: place[0].endswith(".bias")):
        try:
            _put(model, family, name, tensors)
            if name == table:
                _put_head(model, family, name, tensors)
        except X86QuantError as error:
            raise type(error)(f"{file}: {name}: {error}") from error
        give_back(x.blocks for x in tensors)
    model.requires_grad_(False).eval()
    note_in_config(model, fuse_blocks)
    give_graphs(model, fuse_blocks)
    return model


def _model_of(file: Path, family: Family, stored: GgufFile) -> Any:
    """The model that ``stored`` describes, without weights."""
    try:
        config: Any = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        complete_config(config, stored.metadata)
        if (factors := stored.tensors.get(FACTORS)) is not None:
            scale_positions(config, real_numbers(factors))
        # transformers looks into the first part alone.
        config.tie_word_embeddings = family.tied or "output.weight" not in stored.tensors
        return _empty(config)
    except X86QuantError:
        raise
    except Exception as error:  # transformers raises anything for values that make no sense
        raise InvalidInputError(
            f"transformers cannot make a model of what it says: {first_line(error)[:200]}"
        ) from error


def _places(
    model: Any, architecture: str, tensors: Mapping[str, GgufTensor], file: Path
) -> dict[str, list[GgufTensor]]:
    """What in the file each parameter of ``model`` is: of experts two, gates and what they gate.

    Raises:
        UnsupportedError: the file has tensors that the model has not, so that it is another model.
    """
    kind = gguf_names.TENSOR_PROCESSORS.get(architecture, gguf_names.TensorProcessor)
    names = gguf_names.get_gguf_hf_weights_map(model, kind(), architecture)
    known = dict(model.named_parameters())
    found: dict[str, list[GgufTensor]] = {}
    left = []
    for name, tensor in sorted(tensors.items()):  # gates lie before what they gate
        place = names.get(name, names.get(name.removesuffix(".weight"), ""))
        if place in known:
            found.setdefault(place, []).append(tensor)
        elif name != FACTORS:
            left.append(name)
    if left:
        raise UnsupportedError(
            f"{file} has {len(left)} tensors that transformers' {type(model).__name__} has not: "
            f"{', '.join(left[:4])}; it is of another form of {model.config.model_type}"
        )
    return found


def _table_name(model: Any) -> str:
    table = model.get_input_embeddings()
    return next(f"{path}.weight" for path, m in model.named_modules() if m is table)


def _empty(config: Any) -> Any:
    """The model whose parameters have no memory; other tensors are what it computes them to be."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, value: Any) -> None:
        register(module, name, None if value is None else nn.Parameter(value.to("meta"), False))

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    return model


def _put(model: Any, family: Family, name: str, tensors: Sequence[GgufTensor]) -> None:
    """Let ``tensors`` be the parameter ``name`` of ``model``."""
    path, last = name.rpartition(".")[::2]
    module = model.get_submodule(path)
    if is_experts(module):
        _put_experts(module, last, tensors)
        return
    if len(tensors) > 1:
        raise InvalidInputError("two tensors of the file are this one")
    (tensor,) = tensors
    own: Any = getattr(module, last)
    order = row_order(family, model.config, name, tensor.shape[0])
    if isinstance(module, DynamicLinear):  # its bias, behind its weight
        if tuple(own.shape) != tensor.shape:
            raise InvalidInputError(f"it is {tensor.shape}, and the model's {tuple(own.shape)}")
        real = real_numbers(tensor)
        module.bias = real if order is None else real[order]
        return
    turned = last == "weight" and is_conv1d(module)
    shape = tuple(own.shape)[::-1] if turned else tuple(own.shape)
    one = (1, *tensor.shape) == shape  # a linear of one output is a row
    if shape != tensor.shape and not one:
        raise InvalidInputError(f"it is {tensor.shape}, and the model's {shape}")
    in_codes = last == "weight" and is_matrix_of_codes(tensor) and why_float(module) is None
    if in_codes and isinstance(module, nn.Embedding):
        found = group_weights(tensor)
        model.set_submodule(path, WeightOnlyEmbedding(found.weight, found.weight_scale, path))
        return
    if in_codes and is_linear(module):
        found = group_weights(tensor)
        weight, scale = found.weight, found.weight_scale
        if order is not None:
            weight, scale = weight[order], scale[order]
        bias = None if module.bias is None else torch.zeros(module.bias.shape, dtype=torch.float32)
        model.set_submodule(path, DynamicLinear(weight, scale, bias, None, turned))
        return
    real = changed_back(family, name, real_numbers(tensor)).reshape(shape)
    real = real if order is None else real[order]
    setattr(module, last, nn.Parameter(real.t().contiguous() if turned else real, False))


def _put_head(model: Any, family: Family, name: str, tensors: Sequence[GgufTensor]) -> None:
    """Let the head be what the table ``name`` is, of which the file has ``tensors``."""
    table, head = model.get_submodule(name.rpartition(".")[0]), model.lm_head
    if not isinstance(table, WeightOnlyEmbedding) or why_float(head) is not None:
        _put(model, family, _HEAD, tensors)
        return
    bias = None if head.bias is None else torch.zeros(head.bias.shape, dtype=torch.float32)
    model.lm_head = DynamicLinear(table.int8_weight, table.weight_scale, bias)


def _put_experts(module: nn.Module, name: str, tensors: Sequence[GgufTensor]) -> None:
    """Let ``tensors`` [experts, rows, features] be one of ``module``, one below the other."""
    own = module.get_parameter(name)
    sizes = {(x.shape[0], x.shape[-1], len(x.shape)) for x in tensors}
    rows = sum(x.shape[1] for x in tensors if len(x.shape) == 3)
    if sizes != {(own.shape[0], own.shape[2], 3)} or rows != own.shape[1]:
        raise InvalidInputError(
            f"it is {' and '.join(str(x.shape) for x in tensors)}, and the model's "
            f"{tuple(own.shape)}"
        )
    parts = [list(_experts_of(x)) for x in tensors]
    if not all(is_matrix_of_codes(x[0]) for x in parts):
        if any(is_matrix_of_codes(x[0]) for x in parts):
            raise UnsupportedError(
                "gates are floats where what they gate has codes, or the other way"
            )
        real = [torch.cat([real_numbers(x) for x in one]) for one in zip(*parts, strict=True)]
        setattr(module, name, nn.Parameter(torch.stack(real), False))
        return
    linears = []
    for one in zip(*parts, strict=True):
        found = [group_weights(x) for x in one]
        forms = {(x.weight.dtype, x.weight_scale.shape[1:]) for x in found}
        if len(forms) > 1:
            raise UnsupportedError(
                f"gates and what they gate are of types that do not go together: "
                f"{' and '.join(x.kind.name for x in one)}"
            )
        scales = [x.weight_scale for x in found]
        if len({x.dtype for x in scales}) > 1:
            scales = [x.float() for x in scales]
        linears.append(DynamicLinear(torch.cat([x.weight for x in found]), torch.cat(scales)))
    replace_tensor(module, name, nn.ModuleList(linears))


def _experts_of(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The matrix of each expert in ``tensor``."""
    for blocks in tensor.blocks.chunk(tensor.shape[0]):
        yield GgufTensor(tensor.kind, tensor.shape[1:], blocks)

"""Linears and tables that torchao quantized, as transformers writes them with ``TorchAoConfig``.

Each part of torchao's tensor called ``weight`` is a tensor ``_weight_PART``, and the metadata of a
file say of each weight, in JSON, of which class it was and which parts it has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from safetensors import safe_open

from x86quant.dynamic.torchao_weights import StoredTensor, why_not_read
from x86quant.errors import UnsupportedError
from x86quant.huggingface.group_formats import GroupWeights, Tensors

METHOD = "torchao"
CODES, SCALES, ZEROS = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_PARTS = tuple(name.removeprefix("_weight_") for name in (CODES, SCALES, ZEROS))
_PLAIN = "Tensor"


def read(tensors: Tensors, features: int) -> GroupWeights:
    """Codes and scales of one layer, whose class ``check_files`` knows; its codes say which."""
    codes = tensors[CODES]
    kind = "Int8Tensor" if codes.shape[-1] == features else "Int4Tensor"
    shape = (*codes.shape[:-1], features)
    stored = StoredTensor(kind, shape, codes, tensors[SCALES], tensors.get(ZEROS))
    return GroupWeights(*stored.codes())


def check_files(files: Iterable[str]) -> None:
    """Raise UnsupportedError at files with a tensor of torchao's that is no plain weight."""
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name, said in sorted((stored.metadata() or {}).items()):  # in no order
                if "." in name:
                    _check(name, said)


def _check(name: str, said: str) -> None:
    try:
        about = json.loads(said)
    except ValueError:
        about = None
    if not isinstance(about, dict) or not isinstance(about.get("_type"), str):
        raise UnsupportedError(
            f"what the file says of {name} is not in torchao's form: save the model again, by "
            "transformers with TorchAoConfig"
        )
    kind, parts = about["_type"], about.get("_tensor_data_names") or ()
    if kind == _PLAIN:
        return
    path, last = name.rpartition(".")[::2]
    if last != "weight":
        raise UnsupportedError(
            f"{name} is torchao's {kind}; in codes, weights of linears and tables can be read"
        )
    if (why := why_not_read(kind)) is not None:
        raise UnsupportedError(
            f"{path}: its weight is torchao's {kind}, {why}: load the float model with "
            "X86QuantConfig"
        )
    more = [part for part in parts if part not in _PARTS]
    if more:
        raise UnsupportedError(
            f"{path}: its weight is torchao's {kind}, with {', '.join(more)} beside codes and "
            "scales: load the model by transformers and give it to x86quant.to_dynamic"
        )

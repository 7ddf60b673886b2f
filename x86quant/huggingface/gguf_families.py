"""Which families of models in GGUF files are read, and which of their tensors lie otherwise.

llama.cpp's converter changes some tensors of some families, and transformers changes them back
after it has made floats of them. Here codes stay codes: rows move whole, and only norms are
computed with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from x86quant.errors import InvalidInputError, UnsupportedError


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """What llama.cpp's converter changes in one.

    Attributes:
        pairs: rows of queries and keys, which it turns as pairs of neighbours and transformers as
            halves of a head.
        norms_more: what it adds to the weights of norms.
        fused_heads: rows of queries, keys and values in one, which lie by kind there and by head
            here.
        tied: whether its head is the embedding table whatever the file has.
    """

    pairs: bool = False
    norms_more: float = 0.0
    fused_heads: bool = False
    tied: bool = False


#: By what a file calls its architecture.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(pairs=True),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen2moe": Family(),
    "qwen3moe": Family(),
    "phi3": Family(),
    "starcoder2": Family(),
    "stablelm": Family(),
    "gpt2": Family(),
    "bloom": Family(fused_heads=True, tied=True),
    "falcon": Family(tied=True),
    "nemotron": Family(norms_more=1.0),
    "gemma2": Family(norms_more=1.0),
    "gemma3": Family(norms_more=1.0),
}
#: The tensor that says what positions are scaled by: no parameter of the model.
FACTORS = "rope_freqs.weight"


def family_of(metadata: Mapping[str, Any]) -> Family:
    """That of the file which says ``metadata`` of itself.

    Raises:
        UnsupportedError: it is none that is read, or of another form; says what.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedError(
            f"it holds a model of the kind {str(name)[:80]!r}; what can be read are "
            f"{', '.join(FAMILIES)}"
        )
    scaling = metadata.get(f"{name}.rope.scaling.type", "none")
    if scaling != "none":
        raise UnsupportedError(
            f"its positions are scaled ({str(scaling)[:80]!r}), which transformers does not take "
            "from GGUF files: load the model of which the file was made"
        )
    if name == "falcon" and metadata.get("falcon.attention.head_count_kv", 1) != 1:
        raise UnsupportedError("falcon with more than one key head cannot be read from GGUF files")
    return FAMILIES[name]


#: What a file says of sizes, none of which is larger than the largest of a tensor.
_LENGTHS = (
    "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size",
    "expert_count", "expert_used_count", "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
)  # fmt: skip


def check_sizes(metadata: Mapping[str, Any], shapes: Collection[tuple[int, ...]]) -> None:
    """Raise InvalidInputError where a file says sizes that its tensors' ``shapes`` cannot have.

    transformers would make a model of them, however large.
    """
    name = metadata["general.architecture"]
    largest = max((max(shape) for shape in shapes), default=0)
    for key, most in {"block_count": len(shapes), **dict.fromkeys(_LENGTHS, largest)}.items():
        found = metadata.get(f"{name}.{key}", 1)
        if not isinstance(found, int) or not 0 < found <= most:
            raise InvalidInputError(
                f"it says that {name}.{key} is {str(found)[:80]}, which no tensor in it agrees "
                "with: the file is damaged"
            )


def complete_config(config: Any, metadata: Mapping[str, Any]) -> None:
    """Let ``config`` say what transformers does not read of the sizes of experts and heads."""
    name = metadata["general.architecture"]
    for key, attribute in {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "attention.key_length": "head_dim",
    }.items():
        found = metadata.get(f"{name}.{key}")
        if isinstance(found, int) and hasattr(config, attribute):
            setattr(config, attribute, found)


def scale_positions(config: Any, factors: torch.Tensor) -> None:
    """Let ``config`` say what the tensor ``rope_freqs`` of a file does: it divides frequencies.

    Raises:
        UnsupportedError: they are not those of a Llama 3.
    """
    if bool((factors == 1).all()):
        return
    plain = config.rope_parameters
    base = _plain_frequencies(config)
    for factor in (8.0, 16.0, 32.0):
        config.rope_parameters = {
            **plain, "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
        if len(scaled) == len(factors) and torch.allclose(base / scaled, factors, rtol=1e-4):
            return
    raise UnsupportedError("the factors of its positions (rope_freqs) are none of a Llama 3")


def _plain_frequencies(config: Any) -> torch.Tensor:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    steps = torch.arange(0, size, 2, dtype=torch.float32) / size
    theta: float = config.rope_parameters["rope_theta"]
    found: torch.Tensor = 1.0 / theta**steps
    return found


def row_order(family: Family, config: Any, name: str, rows: int) -> torch.Tensor | None:
    """Which row of the file each row of the parameter ``name`` is; None if it is its own."""
    if family.fused_heads and ".query_key_value." in name:
        _check_heads(rows, 3 * config.n_head)
        return torch.arange(rows).reshape(3, config.n_head, -1).transpose(0, 1).reshape(rows)
    heads = {
        ".q_proj.": getattr(config, "num_attention_heads", None),
        ".k_proj.": getattr(config, "num_key_value_heads", None),
    }
    found = next((count for part, count in heads.items() if part in name), None)
    if not family.pairs or found is None:
        return None
    _check_heads(rows, 2 * found)
    return torch.arange(rows).reshape(found, -1, 2).transpose(1, 2).reshape(rows)


def _check_heads(rows: int, parts: int) -> None:
    if rows % parts:
        raise InvalidInputError(
            f"its {rows} rows are no {parts} equal parts of heads: the file is damaged"
        )


def changed_back(family: Family, name: str, values: torch.Tensor) -> torch.Tensor:
    """The float ``values`` of the parameter ``name``, as transformers has them."""
    is_norm = family.norms_more and name.endswith("norm.weight")
    return values - family.norms_more if is_norm else values

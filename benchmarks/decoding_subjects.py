"""Ways to run a decoder that ``benchmarks.decoding`` compares: ours, and its peers."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import x86quant
import x86quant.dynamic
from benchmarks.decoding_llama import LlamaDecoder
from x86quant.torchvision_import import import_torchvision

PEERS = ("fp32", "stock", "weight-only", "layers", "torch-int8")
LOADED_PEERS = ("loaded", "loaded-layers", "four-bits")
LLAMA_PEERS = {"llama.cpp-q8_0": "Q8_0", "llama.cpp-q4_0": "Q4_0"}
PROMPT_PEERS = ("openvino",)


@dataclass
class Subject:
    """One way to run the decoder.

    Attributes:
        name: in the table.
        weight_bytes: that a token reads.
        generate: decodes so many tokens after ids; None where only steps are measured.
        step: prepares a cache behind ids and returns a call that adds one token; None where only
            prompts are measured.
        times: seconds of a token, by what was measured.
        cache: that of the steps; None before there are any.
    """

    name: str
    weight_bytes: int
    generate: Callable[[torch.Tensor, int], Any] | None
    step: Callable[[torch.Tensor], Callable[[], Any]] | None
    times: dict[str, list[float]] = field(default_factory=dict)
    cache: Any = None

    @property
    def cache_bytes(self) -> int:
        """What the tokens in the cache of the steps take."""
        if self.cache is None or isinstance(self.cache, x86quant.Int8Cache):
            return 0 if self.cache is None else self.cache.nbytes
        return sum(x.nbytes for layer in self.cache.layers for x in (layer.keys, layer.values))

    def note(self, what: str, seconds: float) -> None:
        """Keep one measurement."""
        self.times.setdefault(what, []).append(seconds)

    def median(self, what: str) -> float:
        """In seconds; NaN where there is none."""
        return statistics.median(self.times.get(what, [float("nan")]))


def decoder(kind: str, positions: int = 0) -> Any:
    """A decoder of about 125M parameters, with random weights, for so many tokens at least."""
    import_torchvision()
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    if kind == "gpt2":
        model: Any = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_positions=max(1024, positions))
        )
    else:
        sizes = {
            "vocab_size": 32000,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "intermediate_size": 2048,
            "max_position_embeddings": max(2048, positions),
        }
        known = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
        own = {"head_dim": 64} if kind == "qwen3" else {}
        models = {"llama": transformers.LlamaForCausalLM, "qwen3": transformers.Qwen3ForCausalLM}
        model = models[kind](known[kind](**sizes, **own))
    model.generation_config.eos_token_id = None  # it never stops early
    model.generation_config.pad_token_id = 0
    return model.eval()


def weight_bytes(model: nn.Module) -> int:
    """What a token reads: all weights of products once, tables by a row each, which is nothing."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    found = {
        x.data_ptr(): x.numel() * x.element_size()
        for x in (*model.parameters(), *model.buffers())
        if id(x) not in tables - heads
    }
    for module in model.modules():  # of stock dynamic layers, whose weights are no tensors
        if isinstance(module, torch.ao.nn.quantized.dynamic.Linear):
            found[id(module)] = module.in_features * module.out_features
    return sum(found.values())


def _by_transformers(name: str, model: Any, cache_kind: str = "float") -> Subject:
    def empty() -> Any:
        return x86quant.Int8Cache(model.config) if cache_kind == "int8" else None

    def generate(ids: torch.Tensor, tokens: int) -> Any:
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        if cache_kind == "int8":
            options["past_key_values"] = empty()
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    def step(ids: torch.Tensor) -> Callable[[], Any]:
        with torch.no_grad():
            cache = model(
                input_ids=ids,
                past_key_values=empty(),
                use_cache=True,
                return_dict=True,
                logits_to_keep=1,
            ).past_key_values
        subject.cache = cache
        token = ids[:, -1:]

        def add() -> Any:
            with torch.no_grad():
                return model(
                    input_ids=token, past_key_values=cache, use_cache=True, return_dict=True
                ).logits

        return add

    subject = Subject(name, weight_bytes(model), generate, step)
    return subject


class _LastLogits(nn.Module):
    """A decoder from a prompt to the logits of its last token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> Any:
        mask = torch.ones_like(input_ids)  # without one it looks for several sequences in a row
        return self.model(
            input_ids=input_ids, attention_mask=mask, use_cache=False, logits_to_keep=1
        ).logits


def _openvino(model: nn.Module, ids: list[torch.Tensor]) -> Subject:
    """Its int8 form, converted for each length of a prompt."""
    from x86quant.bench.backends import Task
    from x86quant.bench.backends.openvino_backend import OpenvinoBackend
    from x86quant.given_model import Arguments

    runs: dict[int, Callable[[], Any]] = {}
    for prompt in ids:
        data = [Arguments((prompt.roll(n, 1),), {}) for n in range(3)]
        task = Task(_LastLogits(model), "float", data, data[0], torch.get_num_threads())
        runs[prompt.shape[1]] = OpenvinoBackend("openvino").prepare(task).bind(data[0])
    return Subject("openvino", 0, lambda given, _: runs[given.shape[1]](), None)


class _Int8WeightOnly(nn.Module):
    """A linear with torch's own int8 weights and bfloat16 scales, for float activations."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        layer = x86quant.dynamic.WeightOnlyLinear.from_float(linear)
        self.register_buffer("codes", layer.int8_weight.contiguous())
        self.register_buffer("scale", layer.weight_scale)
        self.register_buffer("bias", layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch._weight_int8pack_mm(rows, self.codes, self.scale)
        out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], -1)


def _torch_int8(model: nn.Module) -> Subject:
    """torch's int8 weight-only product under torch.compile, with a static cache."""
    from transformers import StaticCache

    changed: Any = copy.deepcopy(model)
    for name, module in list(changed.named_modules()):
        if x86quant.dynamic.is_linear(module):
            parent, _, child = name.rpartition(".")
            setattr(changed.get_submodule(parent), child, _Int8WeightOnly(module))
    compiled = torch.compile(changed.forward, dynamic=False)

    def step(ids: torch.Tensor) -> Callable[[], Any]:
        cache = StaticCache(config=changed.config, max_cache_len=ids.shape[1] + 256)
        token = ids[:, -1:]
        with torch.no_grad():
            changed(input_ids=ids, past_key_values=cache, use_cache=True)
        at = [ids.shape[1]]

        def add() -> Any:
            # The same place again and again: reading is what costs.
            for layer in cache.layers:
                layer.cumulative_length.fill_(at[0])
            with torch.no_grad():
                positions = torch.full((1, 1), at[0])
                return compiled(
                    input_ids=token, past_key_values=cache, position_ids=positions, use_cache=True
                ).logits

        for _ in range(3):
            add()
        return add

    return Subject("torch-int8", weight_bytes(changed), None, step)


def subjects(
    model: Any, peers: list[str], prompts: list[torch.Tensor], caches: list[str]
) -> list[Subject]:
    """Ours first, with each kind of cache, then the peers."""
    ids = [{"input_ids": torch.randint(3, 1000, (1, n)), "use_cache": False} for n in (16, 24, 12)]
    options: dict[str, Any] = {"progress": False, "speed_check": False, "fuse_blocks": True}
    ours = x86quant.quantize(model, ids, **options)
    names = {"float": "x86quant", "int8": "int8 cache"}
    found = [_by_transformers(names[cache], ours, cache) for cache in caches]
    make: dict[str, Callable[[], Subject]] = {
        "fp32": lambda: _by_transformers("fp32", model),
        "loaded": lambda: _by_transformers("loaded", loaded(model, True)),
        "loaded-layers": lambda: _by_transformers("loaded-layers", loaded(model, False)),
        "four-bits": lambda: _by_transformers("four-bits", loaded(model, True, 4)),
        "layers": lambda: _by_transformers("layers", x86quant.to_dynamic(model)),
        "weight-only": lambda: _by_transformers(
            "weight-only", x86quant.to_dynamic(model, weight_only=True)
        ),
        "stock": lambda: _by_transformers("stock", _stock(model)),
        "torch-int8": lambda: _torch_int8(model),
        "openvino": lambda: _openvino(model, prompts),
    }
    for name, kind in LLAMA_PEERS.items():
        make[name] = partial(_llama, name, model, kind)
    return [*found, *(make[name]() for name in peers)]


def _llama(name: str, model: Any, kind: str) -> Subject:
    with tempfile.TemporaryDirectory() as folder:
        decoder = LlamaDecoder(model, kind, model.config.max_position_embeddings, Path(folder))
    print(f"{name}: {decoder.describe()}")

    def step(ids: torch.Tensor) -> Callable[[], Any]:
        decoder.clear()
        token = ids[0].tolist()[-1:]
        decoder.add(ids[0].tolist())
        return lambda: decoder.add(token)

    def generate(ids: torch.Tensor, tokens: int) -> Any:
        return decoder.generate(ids[0].tolist(), tokens)

    return Subject(name, decoder.weight_bytes, generate, step)


def loaded(model: Any, fuse_blocks: bool, bits: int = 8) -> Any:
    """Saved in float, and in so many bits while it is loaded; says what loading took."""
    config = x86quant.X86QuantConfig(fuse_blocks=fuse_blocks, weight_bits=bits)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        start = time.perf_counter()
        found = type(model).from_pretrained(folder, quantization_config=config)
        took = time.perf_counter() - start
    print(f"loaded in {took:.1f} s with fuse_blocks={fuse_blocks}")
    found.generation_config = model.generation_config
    return found


def _stock(model: nn.Module) -> nn.Module:
    """torch's dynamic quantization, which knows nn.Linear alone."""
    changed = copy.deepcopy(model)
    for name, module in list(changed.named_modules()):
        if x86quant.dynamic.is_linear(module) and not isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            linear = nn.Linear(module.weight.shape[0], module.weight.shape[1])
            linear.weight.data, linear.bias.data = module.weight.data.t(), module.bias.data
            setattr(changed.get_submodule(parent), child, linear)
    stock: nn.Module = torch.ao.quantization.quantize_dynamic(changed, {nn.Linear}, torch.qint8)
    return stock

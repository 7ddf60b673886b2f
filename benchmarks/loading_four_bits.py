"""How much memory it takes to load a decoder whose file has 4 bits a weight.

    python -m benchmarks.loading_four_bits

The model is a Llama of 1.1 billion random weights (2048 wide, 22 layers, 32 heads of queries and 4
of keys, 5632 features between, 32,000 words), written straight as codes: as GGUF in Q4_0, table and
head too, and as GPTQ in groups of 128, table and head in float16. Each is loaded in a process of
its own, and a token is computed. ``peak`` is how far memory rose until the model was there, above
what the imports had taken, ``token`` until the end of the first token, for which weights are
packed, and ``held`` what is left then; all count pages of mapped files.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.environment import print_environment
from benchmarks.gguf_files import finish
from benchmarks.gptq_files import save_llama_config
from benchmarks.loading import megabytes
from x86quant.torchvision_import import import_torchvision

KINDS = ("gguf", "gptq")
_WIDE, _LAYERS, _HEADS, _KEYS, _BETWEEN, _WORDS = 2048, 22, 32, 4, 5632, 32000
_OF_KEYS = _WIDE // _HEADS * _KEYS
#: The linears of a layer, by their names in transformers and in GGUF: outputs and inputs.
_LINEARS = {
    "self_attn.q_proj": ("attn_q", _WIDE, _WIDE),
    "self_attn.k_proj": ("attn_k", _OF_KEYS, _WIDE),
    "self_attn.v_proj": ("attn_v", _OF_KEYS, _WIDE),
    "self_attn.o_proj": ("attn_output", _WIDE, _WIDE),
    "mlp.gate_proj": ("ffn_gate", _BETWEEN, _WIDE),
    "mlp.up_proj": ("ffn_up", _BETWEEN, _WIDE),
    "mlp.down_proj": ("ffn_down", _WIDE, _BETWEEN),
}


def write_gguf(path: Path) -> None:
    """The model as GGUF, by the package gguf."""
    import gguf

    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(_WIDE)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_BETWEEN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KEYS)
    writer.add_rope_dimension_count(_WIDE // _HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(_WORDS)

    def add(name: str, outputs: int, features: int) -> None:
        blocks = draw.integers(0, 256, (outputs, features // 32, 18), dtype=np.uint8)
        scales = np.full((outputs, features // 32), 0.004, np.float16)
        blocks[..., :2] = scales[..., None].view(np.uint8)
        rows = blocks.reshape(outputs, -1)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    add("token_embd", _WORDS, _WIDE)
    add("output", _WORDS, _WIDE)
    writer.add_tensor("output_norm.weight", np.ones(_WIDE, np.float32))
    for layer in range(_LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(_WIDE, np.float32))
        for name, outputs, features in _LINEARS.values():
            add(f"blk.{layer}.{name}", outputs, features)
    finish(writer)


def write_gptq(folder: Path) -> None:
    """The model as a folder of a GPTQ library, version 1."""
    folder.mkdir()
    save_llama_config(
        folder, 128, False, vocab_size=_WORDS, hidden_size=_WIDE, num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS, num_key_value_heads=_KEYS, intermediate_size=_BETWEEN,
    )  # fmt: skip
    half = torch.float16
    tensors = {
        "model.embed_tokens.weight": torch.randn(_WORDS, _WIDE).to(half),
        "lm_head.weight": torch.randn(_WORDS, _WIDE).mul(0.02).to(half),
        "model.norm.weight": torch.ones(_WIDE, dtype=half),
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = torch.ones(_WIDE, dtype=half)
        for name, (_, outputs, features) in _LINEARS.items():
            codes = torch.randint(-(2**31), 2**31 - 1, (features // 8, outputs), dtype=torch.int32)
            groups = features // 128
            tensors[f"{at}.{name}.qweight"] = codes
            tensors[f"{at}.{name}.scales"] = torch.full((groups, outputs), 0.004, dtype=half)
            zeros = torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32)
            tensors[f"{at}.{name}.qzeros"] = zeros
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def measure(path: Path, fuse_blocks: bool) -> dict[str, float]:
    """Megabytes and seconds of loading ``path`` in this process, which has loaded nothing yet."""
    import_torchvision()
    import transformers

    from x86quant import huggingface

    transformers.utils.logging.disable_progress_bar()
    getattr(transformers, "LlamaForCausalLM")  # noqa: B009 - it is imported when it is asked for
    if path.suffix == ".gguf":
        from x86quant.huggingface import gguf_model  # noqa: F401
    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
    before = megabytes("VmRSS")
    start = time.perf_counter()
    model: Any = huggingface.load(path, fuse_blocks=fuse_blocks)
    found = {"load s": time.perf_counter() - start, "peak MB": megabytes("VmHWM") - before}
    model(torch.tensor([[1]]), use_cache=False)
    gc.collect()
    found["token MB"] = megabytes("VmHWM") - before
    found["held MB"] = megabytes("VmRSS") - before
    return found


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--fuse-blocks", action="store_true", help="make native graphs, too")
    parser.add_argument("--folder", type=Path, help="where to keep the files for another time")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.fuse_blocks)))
        return 0
    print_environment()
    columns = ("file MB", "load s", "peak MB", "of file", "token MB", "held MB")
    print(("{:6}" + "{:>9}" * len(columns)).format("", *columns))
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        for kind in options.kinds:
            path = folder / ("model.gguf" if kind == "gguf" else "gptq")
            if not path.exists():
                (write_gguf if kind == "gguf" else write_gptq)(path)
            weights = path if kind == "gguf" else path / "model.safetensors"
            size = weights.stat().st_size / 2**20
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.loading_four_bits"]
            command += ["--measure", str(path), *["--fuse-blocks"] * options.fuse_blocks]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found = json.loads(said.splitlines()[-1])
            print(
                f"{kind:6}{size:9.0f}{found['load s']:9.1f}{found['peak MB']:9.0f}"
                f"{found['peak MB'] / size:9.2f}{found['token MB']:9.0f}{found['held MB']:9.0f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

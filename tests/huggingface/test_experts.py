"""Mixtures of experts of transformers: a linear of ours for each, and only the chosen run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import x86quant
from x86quant.dynamic import DynamicLinear
from x86quant.dynamic.experts import is_experts
from x86quant.errors import InvalidInputError, UnsupportedError

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

_SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "num_experts_per_tok": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_MORE: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 6, "moe_intermediate_size": 32},
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 32, "head_dim": 16},
    "Olmoe": {"num_experts": 6},
    "GptOss": {"num_local_experts": 4, "head_dim": 16},
    "GraniteMoe": {"num_local_experts": 4},
    "DeepseekV3": {
        "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16,
    },
}  # fmt: skip
IDS = torch.tensor([[5, 9, 33, 2, 8], [7, 7, 1, 60, 4]])


def mixture(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **_MORE[kind]})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # biases and norms, too
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model.requires_grad_(False)


def as_float(model: Any) -> Any:
    """``model`` with plain linears of the numbers that its codes stand for."""
    for path, module in list(model.named_modules()):
        if isinstance(module, DynamicLinear):
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            plain.weight.data = module.weight.dequantize()
            if module.bias is not None:
                plain.bias.data = module.bias
            model.set_submodule(path, plain)
    return model


def with_weights(model: Any, values: Any) -> Any:
    """The float ``model`` with the numbers of ``values``, which :func:`as_float` made."""
    for path, module in model.named_modules():
        other = values.get_submodule(path)
        if is_experts(module):
            for name, linears in (("gate_up_proj", "up_linears"), ("down_proj", "down_linears")):
                stacked = torch.stack([x.weight.data for x in getattr(other, linears)])
                own = getattr(module, name)
                own.data = stacked.transpose(1, 2) if module.is_transposed else stacked
        elif isinstance(module, nn.Linear):
            module.weight.data = other.weight.data
    return model


@pytest.mark.parametrize("kind", _MORE)
def test_experts_compute_what_transformers_own_functions_do(kind: str) -> None:
    found = x86quant.to_dynamic(mixture(kind), weight_bits=4)
    assert not [n for n, p in found.named_parameters() if p.dim() == 3]
    same = as_float(found)
    expected = with_weights(mixture(kind), same)
    for implementation in ("eager", "grouped_mm"):
        expected.set_experts_implementation(implementation)
        for ids in (IDS, IDS[:1, :1]):
            torch.testing.assert_close(same(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", _MORE)
def test_loaded_saved_and_kept_in_a_file(kind: str, bits: int, tmp_path: Path) -> None:
    model = mixture(kind)
    model.save_pretrained(tmp_path / "float")
    made = x86quant.to_dynamic(model, weight_bits=bits)
    expected = made(IDS).logits
    settings = x86quant.X86QuantConfig(weight_bits=bits)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float", quantization_config=settings
    )
    loaded.save_pretrained(tmp_path / "saved")
    made.save_pretrained(tmp_path / "made")
    x86quant.save(made, tmp_path / "net.x86q", example_inputs={"input_ids": IDS})
    again = [
        loaded,
        x86quant.huggingface.load(tmp_path / "saved"),
        x86quant.huggingface.load(tmp_path / "made"),
        x86quant.load(tmp_path / "net.x86q"),
    ]
    for one in again:
        assert torch.equal(one(input_ids=IDS).logits, expected)
        assert not [n for n, p in one.named_parameters() if p.dim() == 3 or p.is_meta]


def test_only_chosen_experts_run_and_on_their_rows_alone() -> None:
    model = x86quant.to_dynamic(mixture("Mixtral"))
    rows: dict[str, int] = {}
    for path, module in model.named_modules():
        if isinstance(module, DynamicLinear) and "up_linears" in path:
            module.register_forward_hook(
                lambda _, given, __, path=path: rows.update({path: given[0].shape[0]})
            )
    model(IDS[:1, :1])
    assert list(rows.values()) == [1] * 4  # two experts in each of two layers
    rows.clear()
    model(IDS)
    assert sum(rows.values()) == 2 * 2 * IDS.numel()


def test_generates_with_caches_what_it_says_of_the_whole_text() -> None:
    model = x86quant.to_dynamic(mixture("Mixtral"), weight_bits=4)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    plain = model.generate(IDS[:1], use_cache=False, **options)
    assert torch.equal(model.generate(IDS[:1], **options), plain)
    assert torch.equal(model.generate(IDS[:1], cache_implementation="static", **options), plain)


def test_quantize_takes_experts_and_all_pages_name_them(tmp_path: Path) -> None:
    model = mixture("Mixtral")
    data = [{"input_ids": torch.randint(3, 64, (2, 8))} for _ in range(2)]
    found = x86quant.quantize(model, data, weight_bits=4, speed_check=False)
    name = "model.layers.1.mlp.experts.down_linears.3"
    assert isinstance(found.get_submodule(name), DynamicLinear)
    assert name in str(x86quant.explain(found))
    assert name in str(x86quant.profile(found, (data[0]["input_ids"],)))
    page = tmp_path / "page.html"
    x86quant.report(found, page, (data[0]["input_ids"],))
    assert name in page.read_text()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_codes_of_experts_are_chosen_by_the_data(kind: str) -> None:
    model = mixture(kind)
    draw = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(3, 64, (8, 32), generator=draw)} for _ in range(4)]
    found = x86quant.quantize(
        model, data, mode="dynamic", weight_bits=4, speed_check=False, smooth_quant=False,
        progress=False,
    )  # fmt: skip
    plain = x86quant.to_dynamic(model, weight_bits=4)
    names = [n for n, m in plain.named_modules() if "_linears." in n]
    changed = [
        name
        for name in names
        if not torch.equal(
            found.get_submodule(name).int8_weight, plain.get_submodule(name).int8_weight
        )
    ]
    assert len(changed) > len(names) // 2
    assert "linears have codes of 4 bits chosen by the data" in str(found.quantization)
    assert hasattr(model.model.layers[0].mlp.experts, "gate_up_proj")
    # Each by what it was given: its own rows, of which others look like those.
    rows: dict[str, Any] = {}
    same = as_float(x86quant.to_dynamic(model))
    other = torch.randint(3, 64, (8, 32), generator=draw)
    for name in changed:
        same.get_submodule(name).register_forward_hook(
            lambda _, given, __, name=name: rows.update({name: given[0]})
        )
    same(other)
    errors = torch.zeros(2)
    for name, x in rows.items():
        exact = same.get_submodule(name).weight
        for i, one in enumerate((found, plain)):
            off = one.get_submodule(name).weight.dequantize() - exact
            errors[i] += (x @ off.t()).square().sum() / (x @ exact.t()).square().sum()
    assert float(errors[0]) < 0.95 * float(errors[1])


def test_experts_that_are_to_stay_float_stay() -> None:
    model = mixture("Mixtral")
    kept = "model.layers.0.mlp.experts"
    found = x86quant.to_dynamic(model, keep=lambda name, _: name == kept)
    assert found.get_submodule(kept).gate_up_proj.dim() == 3
    assert hasattr(found.get_submodule("model.layers.1.mlp.experts"), "up_linears")
    assert hasattr(model.get_submodule(kept), "gate_up_proj")
    found(IDS)


def test_linears_of_experts_in_a_list_are_linears_like_others() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor, chosen: int) -> Any:
            return self.experts[chosen](x)

    found = x86quant.to_dynamic(Layer(), weight_bits=4)
    assert all(isinstance(x, DynamicLinear) for x in found.experts)
    found(torch.randn(2, 64), 1)


def test_an_expert_with_nan_is_named(tmp_path: Path) -> None:
    model = mixture("Mixtral")
    model.model.layers[1].mlp.experts.down_proj.data[2, 3, 4] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match=r"layers\.1\.mlp\.experts\.down_proj.*NaN"):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=x86quant.X86QuantConfig()
        )


def test_a_process_without_us_does_not_make_up_experts(tmp_path: Path) -> None:
    x86quant.to_dynamic(mixture("Mixtral")).save_pretrained(tmp_path)
    code = (
        "from x86quant.torchvision_import import import_torchvision; import_torchvision()\n"
        f"import transformers; transformers.MixtralForCausalLM.from_pretrained({str(tmp_path)!r})"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode != 0
    assert "ignore_mismatched_sizes" in run.stderr


def test_a_single_expert_in_codes_is_refused(tmp_path: Path) -> None:
    """transformers would take the experts for missing, and make some at random."""
    model = mixture("Mixtral")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    model.config.save_pretrained(tmp_path)
    at = "model.layers.0.block_sparse_moe.experts.0.w1"
    tensors = {
        f"{at}.qweight": torch.zeros(8, 96, dtype=torch.int32),
        f"{at}.qzeros": torch.zeros(2, 12, dtype=torch.int32),
        f"{at}.scales": torch.ones(2, 96, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"experts\.1\.w1 is not in codes"):
        x86quant.huggingface.load(tmp_path, transformers.MixtralForCausalLM)

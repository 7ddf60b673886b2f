"""Families of models in GGUF files: what is read means what transformers makes of the same file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import x86quant
from benchmarks.gguf_files import finish
from x86quant.dynamic.experts import is_experts
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.huggingface.gguf_file import read_gguf, read_parts

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from tests.huggingface import gguf_models  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def theirs_of(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


def parameter_of(model: Any, name: str) -> torch.Tensor:
    """The numbers that ``model`` has in the place of the float parameter ``name``."""
    path, last = name.rpartition(".")[::2]
    module = model.get_submodule(path)
    if is_experts(module) and not hasattr(module, last):
        linears = module.down_linears if last == "down_proj" else module.up_linears
        return torch.stack([x.weight.dequantize() for x in linears])
    return torch.as_tensor(getattr(module, last)) + 0


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
@pytest.mark.parametrize("family", gguf_models.MODELS)
def test_a_family_means_what_transformers_makes_of_it(
    family: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    written = gguf_models.write_model(path, family, kind)
    ours = x86quant.huggingface.load(path, fuse_blocks=False)
    # The package has no names for mistral, so that transformers ends in an error.
    theirs = written if family == "mistral" else theirs_of(path)
    if family == "mistral" and kind != "F16":
        pytest.skip("there is nothing to compare with")
    for name, parameter in theirs.named_parameters():
        exact = (
            {"rtol": 1e-5, "atol": 1e-6} if theirs is not written else {"rtol": 1e-3, "atol": 1e-3}
        )
        torch.testing.assert_close(parameter_of(ours, name), parameter, **exact)
    in_codes = [m for m in ours.modules() if isinstance(m, x86quant.DynamicLinear)]
    assert bool(in_codes) == (kind != "F16")
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, found = theirs(ids).logits, ours(ids).logits
        if kind == "F16":  # and the file is what was written
            if theirs is not written:
                torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
            near = torch.cosine_similarity(written(ids).logits.flatten(), found.flatten(), 0)
            assert float(near) > 0.9999
    # Of experts, small differences choose others.
    least = 0.98 if family.endswith("moe") else 0.999
    assert float(torch.cosine_similarity(want.flatten(), found.flatten(), 0)) > least


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen2moe"])
def test_a_tied_head_is_the_table(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write_model(path, family, "Q8_0", tied=True)
    theirs, ours = theirs_of(path), x86quant.huggingface.load(path, fuse_blocks=False)
    head = theirs.get_output_embeddings().weight
    assert head is theirs.get_input_embeddings().weight
    torch.testing.assert_close(parameter_of(ours, "lm_head.weight"), head, rtol=1e-5, atol=1e-6)
    table = ours.get_input_embeddings()
    if family != "gemma3":  # whose table scales what it looks up, and becomes float
        assert ours.lm_head.int8_weight is table.int8_weight
        ours.save_pretrained(tmp_path / "saved")
        again = x86quant.huggingface.load(tmp_path / "saved")
        assert again.lm_head.int8_weight is again.get_input_embeddings().int8_weight


def test_a_model_of_experts_keeps_their_codes_and_can_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write_model(path, "qwen3moe", "Q4_0")
    ours = x86quant.huggingface.load(path)
    assert not [name for name, p in ours.named_parameters() if p.dim() == 3]
    ids = torch.tensor([[3, 4, 5, 6]])
    ours.save_pretrained(tmp_path / "saved")
    again = x86quant.huggingface.load(tmp_path / "saved")
    assert torch.equal(again(ids).logits, ours(ids).logits)
    x86quant.save(ours, tmp_path / "net.x86q", example_inputs={"input_ids": ids})
    assert torch.equal(x86quant.load(tmp_path / "net.x86q")(input_ids=ids).logits, ours(ids).logits)


# --- parts of a model ----------------------------------------------------------------------------


def write_parts(folder: Path, count: int) -> Path:
    """A llama in ``count`` files; the path of the first."""
    model = gguf_models.random_model("llama")
    arrays = list(gguf_models.arrays_of("llama", model).items())
    for number in range(count):
        path = folder / f"model-{number + 1:05d}-of-{count:05d}.gguf"
        writer = (
            gguf_models.new_writer(path, "llama", model.config)
            if number == 0
            else gguf.GGUFWriter(path, "llama")
        )
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(arrays))
        for name, values in arrays[number::count]:
            writer.add_tensor(name, values)
        finish(writer)
    return folder / f"model-00001-of-{count:05d}.gguf"


def test_parts_are_one_model(tmp_path: Path) -> None:
    first = write_parts(tmp_path, 3)
    ours = x86quant.huggingface.load(first)
    expected = gguf_models.random_model("llama")
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(parameter_of(ours, name), parameter, rtol=0, atol=0)


def test_parts_that_are_missing_or_others(tmp_path: Path) -> None:
    first = write_parts(tmp_path, 3)
    second = tmp_path / "model-00002-of-00003.gguf"
    third = tmp_path / "model-00003-of-00003.gguf"
    with pytest.raises(InvalidInputError, match="not the first of its parts"):
        x86quant.huggingface.load(second)
    kept = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(InvalidInputError, match="another model"):
        x86quant.huggingface.load(first)
    second.write_bytes(kept)
    third.unlink()
    with pytest.raises(InvalidInputError, match=r"00003-of-00003.gguf is missing"):
        x86quant.huggingface.load(first)


def part(path: Path, names: Sequence[str], **settings: Any) -> Path:
    """A file of small tensors, with settings of its place among others."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in settings.items():
        writer.add_key_value(
            key.replace("__", "."), value,
            gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.INT32,
        )  # fmt: skip
    for name in names:
        writer.add_tensor(name, torch.zeros(4, 32).numpy())
    finish(writer)
    return path


def parts(folder: Path, *, second: Sequence[str] = ("b",), no: int = 1, **more: Any) -> Path:
    """Two files of a model; the path of the first."""
    settings = {"split__no": 0, "split__count": 2, **more}
    part(folder / "m-00002-of-00002.gguf", second, split__no=no)
    return part(folder / "m-00001-of-00002.gguf", ["a"], **settings)


def test_tensors_of_all_parts(tmp_path: Path) -> None:
    assert [*read_parts(parts(tmp_path)).tensors] == ["a", "b"]
    assert [*read_parts(parts(tmp_path, split__tensors__count=2)).tensors] == ["a", "b"]
    for count in (0, 1):
        assert [*read_parts(part(tmp_path / "x", ["a"], split__count=count)).tensors] == ["a"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"no": 0}, "another model, or the wrong one"),
        ({"no": 2}, "another model, or the wrong one"),
        ({"second": ("b", "a")}, "another model, or the wrong one"),
        ({"split__no": 1}, "not the first of its parts"),
        ({"split__count": 3}, "m-00002-of-00003.gguf is missing"),
        ({"split__count": -1}, "is a part of -1, and its name is not"),
        ({"split__count": 1025}, "is a part of 1025, and its name is not"),
        ({"split__count": "2"}, "is a part of 2, and its name is not"),
        ({"split__tensors__count": 3}, "do not have all of its tensors"),
    ],
)
def test_parts_that_do_not_belong_together(
    settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=why):
        read_parts(parts(tmp_path, **settings))


def test_names_of_parts(tmp_path: Path) -> None:
    first = parts(tmp_path)
    named = first.rename(tmp_path / "model.gguf")
    with pytest.raises(InvalidInputError, match="is a part of 2, and its name is not that of one"):
        read_parts(named)
    # By its settings it is the first, by its name it is not.
    with pytest.raises(InvalidInputError, match="not the first of its parts"):
        read_parts(named.rename(tmp_path / "m-00002-of-00002.gguf"))


@pytest.mark.parametrize("alignment", ["32", 0, 4, 24, -8])
def test_alignments_that_are_none(alignment: Any, tmp_path: Path) -> None:
    path = part(tmp_path / "x", ["a"], general__alignment=alignment)
    with pytest.raises(InvalidInputError, match=re.escape(f"general.alignment is {alignment!r}")):
        read_gguf(path)
    assert [*read_gguf(part(path, ["a"], general__alignment=32)).tensors] == ["a"]


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mamba", "t5", "gpt-oss", "command-r", "lfm2", "deepseek2"])
def test_families_that_are_not_read_are_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, kind)
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy())
    finish(writer)
    with pytest.raises(UnsupportedError, match=f"{kind}.*what can be read are llama"):
        x86quant.huggingface.load(path)


def test_models_that_transformers_would_read_as_others(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = gguf_models.random_model("llama")
    arrays = gguf_models.arrays_of("llama", model)

    def write(more: dict[str, Any], **said: Any) -> None:
        writer = gguf_models.new_writer(path, "llama", model.config)
        for key, value in said.items():
            writer.add_string(key.replace("__", "."), value)
        for name, values in {**arrays, **more}.items():
            writer.add_tensor(name, values)
        finish(writer)

    kept = arrays.pop("blk.1.ffn_up.weight")
    write({})
    with pytest.raises(InvalidInputError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"):
        x86quant.huggingface.load(path)
    arrays["blk.1.ffn_up.weight"] = kept
    write({"blk.1.attn_q.bias": torch.zeros(64).numpy()})
    with pytest.raises(UnsupportedError, match=r"has not: blk\.1\.attn_q\.bias"):
        x86quant.huggingface.load(path)
    write({}, llama__rope__scaling__type="yarn")
    with pytest.raises(UnsupportedError, match=r"positions are scaled \('yarn'\)"):
        x86quant.huggingface.load(path)
    write({"rope_freqs.weight": torch.linspace(1, 3, 8).numpy()})
    with pytest.raises(UnsupportedError, match="none of a Llama 3"):
        x86quant.huggingface.load(path)


def test_the_positions_of_a_llama_3(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = gguf_models.random_model("llama")
    scaled = {
        **model.config.rope_parameters, "rope_type": "llama3", "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    plain = model.model.rotary_emb.inv_freq
    model.config.rope_parameters = scaled
    there = type(model)(model.config)
    there.load_state_dict(model.state_dict())
    factors = plain / there.model.rotary_emb.inv_freq
    assert float(factors.max()) == pytest.approx(8)
    writer = gguf_models.new_writer(path, "llama", model.config)
    for name, values in gguf_models.arrays_of("llama", model).items():
        writer.add_tensor(name, values)
    writer.add_tensor("rope_freqs.weight", factors.numpy())
    finish(writer)
    ours = x86quant.huggingface.load(path)
    torch.testing.assert_close(
        ours.model.rotary_emb.inv_freq, there.model.rotary_emb.inv_freq, rtol=1e-5, atol=0
    )


def test_files_that_were_changed_are_read_or_refused(tmp_path: Path) -> None:
    """A part of ``python -m benchmarks.fuzz_readers``, from another seed."""
    from benchmarks.fuzz_readers import changed
    from benchmarks.readers import reader

    one = reader("gguf-model", tmp_path)
    found = [one.read(changed(one, seed)).name for seed in range(10**6, 10**6 + 60)]
    assert found.count("FIRST") < 50  # else nothing behind the head is tried

"""Calls that calibration did not show, and files of models calibrated with several forms."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.quantization.any_model import sqnr
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.errors import TRACEBACK_VARIABLE, InvalidInputError, X86QuantWarning
from x86quant.quantization.graphs import token_steps
from x86quant.quantization.static import part_search
from x86quant.quantization.tracing.tracing import by_export


def quantized(model: nn.Module, batches: list[Any], **options: Any) -> Any:
    return x86quant.quantize(model.eval(), batches, speed_check=False, progress=False, **options)


class Masked(nn.Module):
    """Takes a mask, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.b(F.relu(self.a(x)))
        return y if mask is None else y * mask


def test_a_call_without_the_optional_mask_runs_in_float() -> None:
    model = Masked()
    result = quantized(model, [{"x": torch.randn(4, 16), "mask": torch.rand(4, 1)}] * 4)
    assert isinstance(result, GuardedModule)
    x = torch.randn(4, 16)
    with pytest.warns(X86QuantWarning, match="runs in float"):
        assert torch.equal(result(x), model(x))
    assert result.outside == 1


class Words(nn.Module):
    """Looks ids up."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.c, self.h = nn.Embedding(50, 16), nn.Conv1d(16, 32, 3), nn.Linear(32, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.h(F.relu(self.c(self.e(ids).transpose(1, 2))).amax(-1))


def test_ids_may_be_of_either_type_that_torch_takes() -> None:
    result = quantized(Words(), [torch.randint(50, (2, 20)) for _ in range(4)])
    assert isinstance(result, CompiledModule)
    ids = torch.randint(50, (2, 20))
    assert torch.equal(result(ids.int()), result(ids))


class Chunks(nn.Module):
    """Carries the end of each chunk on to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Conv1d(1, 64, 5), nn.Conv1d(64, 1, 1)

    def forward(
        self, x: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = x.new_zeros(x.shape[0], 1, 4) if state is None else state
        a = torch.cat([before, x], -1)
        return self.o(F.relu(self.a(a))), a[..., -4:]


@pytest.mark.parametrize("with_class", [False, True])
def test_a_file_has_a_graph_for_each_form_of_calls(with_class: bool, tmp_path: Path) -> None:
    first, state = torch.randn(1, 1, 160), torch.randn(1, 1, 4)
    result = quantized(Chunks(), [{"x": first}, *[{"x": first, "state": state}] * 2])
    path = tmp_path / "chunks.x86q"
    with warnings.catch_warnings():
        warnings.simplefilter("error", X86QuantWarning)  # the class would be needed
        x86quant.save(result, path)
    loaded = x86quant.load(path, model=Chunks() if with_class else None)
    for given in ((first,), (first, state)):
        found, expected = loaded(*given), result(*given)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    with pytest.raises((InvalidInputError, TypeError), match="unexpected keyword argument"):
        loaded(first, other=state)


class Reads(Chunks):
    """Computes with a value of the state, which no graph can."""

    def forward(
        self, x: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if state is not None and float(state.sum()) > 1e6:
            x = x * 2
        return super().forward(x, state)


def test_forms_of_calls_that_a_file_lacks_are_named(tmp_path: Path) -> None:
    first, state = torch.randn(1, 1, 160), torch.randn(1, 1, 4)
    result = quantized(Reads(), [{"x": first}, *[{"x": first, "state": state}] * 2])
    path = tmp_path / "chunks.x86q"
    with pytest.warns(X86QuantWarning, match=r"of another form \(state was None"):
        x86quant.save(result, path)
    loaded = x86quant.load(path, model=Reads())
    for given in ((first,), (first, state)):
        assert torch.equal(loaded(*given)[0], result(*given)[0])


class Padded(nn.Module):
    """Asks for a size, and has a convolution that says its padding by name."""

    def __init__(self, padding: str) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 16, 3, padding=padding)
        self.c = nn.Conv2d(16, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.a(x))
        y = y[:, : max(4, y.shape[1])]
        return self.c(F.relu(self.b(y)))


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name_goes_through_export(
    padding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_search, "WAYS", {"torch.export": by_export})
    model = Padded(padding)
    result = quantized(model, [torch.randn(2, 3, 14, 14) for _ in range(3)])
    assert set(result.quantization.traced_by.values()) == {"torch.export"}
    assert not result.float_nodes
    x = torch.randn(2, 3, 14, 14)
    assert sqnr(model(x), result(x)) > 25
    x86quant.save(result, tmp_path / "padded.x86q")
    assert torch.equal(x86quant.load(tmp_path / "padded.x86q")(x), result(x))


def test_a_failure_of_ours_in_a_token_step_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2)
    model = x86quant.to_dynamic(transformers.GPT2LMHeadModel(config).eval())

    def fails(*_: Any) -> None:
        raise math_error

    math_error = ZeroDivisionError("ours")
    monkeypatch.setattr(token_steps, "_cache_maker", fails)
    monkeypatch.setattr(token_steps, "is_own", lambda _: True)
    with pytest.warns(X86QuantWarning, match=r"each new token .* nobody foresaw"):
        assert token_steps.with_token_step(model) == ()
    monkeypatch.setattr(token_steps, "is_own", lambda _: False)
    assert token_steps.with_token_step(model) == ()


def test_a_decoder_whose_cache_holds_states_runs_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TRACEBACK_VARIABLE, raising=False)  # as users have it
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Lfm2Config"):
        pytest.skip("this transformers has no LFM2")
    config = transformers.Lfm2Config(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, full_attn_idxs=[1],
    )  # fmt: skip
    model = x86quant.to_dynamic(transformers.Lfm2ForCausalLM(config).eval())
    with warnings.catch_warnings():
        warnings.simplefilter("error", X86QuantWarning)
        assert token_steps.with_token_step(model) == ()

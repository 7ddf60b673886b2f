"""Models in half precision, as checkpoints are loaded by default, and in double."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.compiled.block_graphs import blocks_of
from x86quant.dynamic import DynamicLinear
from x86quant.errors import InvalidInputError
from x86quant.quantization import quantize

OTHERS = [torch.bfloat16, torch.float16, torch.float64]


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 64, 10),
    ).eval()  # fmt: skip


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def images(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 3, 8, 8).to(dtype) for _ in range(3)]


def sequences(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 6, 64).to(dtype) for _ in range(3)]


def db(found: torch.Tensor, exact: torch.Tensor) -> float:
    exact = exact.double()
    return float(10 * torch.log10(exact.square().sum() / (found - exact).square().sum()))


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize(("make", "data"), [(convolutions, images), (encoder, sequences)])
def test_it_takes_and_returns_what_the_model_did(make: Any, data: Any, dtype: torch.dtype) -> None:
    model = make().to(dtype)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = quantize(model, data(dtype), speed_check=False)
    for name, x in model.state_dict().items():
        assert x.dtype == before[name].dtype
        assert torch.equal(x, before[name])
    x = data(dtype)[0]
    with torch.no_grad():
        exact = model(x)
    assert found(x).dtype == dtype
    assert db(found(x), exact) > 25
    assert torch.equal(found(x.float()), found(x)) or dtype is torch.float64
    assert str(dtype).removeprefix("torch.") in found.quantization.notes[-1]


@pytest.mark.parametrize(("make", "data"), [(convolutions, images), (encoder, sequences)])
def test_a_file_keeps_the_type(make: Any, data: Any, tmp_path: Any) -> None:
    x = data(torch.bfloat16)[0]
    found = quantize(make().bfloat16(), data(torch.bfloat16), speed_check=False)
    x86quant.save(found, tmp_path / "model")
    loaded = x86quant.load(tmp_path / "model")
    assert loaded(x).dtype == torch.bfloat16
    assert torch.equal(loaded(x), found(x))
    # ... and its graph computes in float32 as before.
    assert torch.equal(loaded(x.float()), loaded(x))


def test_the_type_of_a_file_must_be_known(tmp_path: Any) -> None:
    from x86quant.artifacts.file.stored_tensors import TensorWriter
    from x86quant.artifacts.records import forms

    found = quantize(convolutions().bfloat16(), images(torch.bfloat16))
    record = forms.write(found, TensorWriter())
    assert record["float_type"] == "bfloat16"
    for forged in ("int8", "float8_e4m3fn", "nn", 3):
        with pytest.raises(x86quant.ArtifactError, match="unknown floating type"):
            forms._of_type(forged, None)  # type: ignore[arg-type]


def test_a_metric_is_shown_inputs_of_that_type() -> None:
    for make, data in ((convolutions, images), (encoder, sequences)):
        model, x = make().bfloat16(), data(torch.bfloat16)[0]
        seen: list[torch.dtype] = []

        def metric(tried: nn.Module, x: torch.Tensor = x, seen: list[Any] = seen) -> float:
            seen.append(tried(x).dtype)
            return 1.0

        found = quantize(model, data(torch.bfloat16), metric=metric, speed_check=False)
        assert len(seen) > 1
        assert set(seen) == {torch.bfloat16}
        assert found(x).dtype == torch.bfloat16


def test_without_float_inputs_results_are_float32_and_graphs_run() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
        vocab_size=50,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval().bfloat16()
    batches = [{"input_ids": torch.randint(0, 50, (2, 8))} for _ in range(3)]
    found = quantize(model, batches, fuse_blocks=True, speed_check=False)
    assert not found._forward_pre_hooks
    assert any(blocks_of(module) is not None for module in found.modules())
    result = found(**batches[0]).last_hidden_state
    assert result.dtype == torch.float32
    with torch.no_grad():
        assert db(result, model(**batches[0]).last_hidden_state) > 20


def test_graphs_of_a_model_that_takes_halves_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = quantize(
        encoder().bfloat16(), sequences(torch.bfloat16), fuse_blocks=True, speed_check=False
    )
    assert any(blocks_of(module) is not None for module in found.modules())
    x = sequences(torch.bfloat16)[0]
    expected = found(x)

    def fail(*_: Any) -> None:
        raise AssertionError("the layers ran one by one")

    monkeypatch.setattr(DynamicLinear, "forward", fail)
    assert torch.equal(found(x), expected)


def test_codes_without_scales_are_refused() -> None:
    model = nn.Linear(16, 16)
    model.weight.data = model.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(InvalidInputError, match=r"weight is torch\.float8_e4m3fn"):
        quantize(model, [torch.randn(2, 16)])


# ------------------------------------------------------------------------- to_dynamic


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 64), nn.Linear(64, 40, bias=False)
        self.norm, self.head.weight = nn.LayerNorm(64), self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(ids)))


@pytest.mark.parametrize("embeddings", [False, True, "tied", 8])
@pytest.mark.parametrize("dtype", OTHERS)
def test_layers_fit_in_where_the_others_are(dtype: torch.dtype, embeddings: Any) -> None:
    torch.manual_seed(0)
    model = Tied().to(dtype).eval()
    ids = torch.randint(0, 40, (2, 5))
    found = x86quant.to_dynamic(model, embeddings=embeddings, weight_bits=8)
    kinds = {x.dtype for x in model.state_dict().values()}
    assert kinds == {dtype}
    assert found.norm.weight.dtype == dtype
    if embeddings is False:
        assert found.table.weight.dtype == dtype
    with torch.no_grad():
        assert found(ids).dtype == dtype
        assert db(found(ids), model(ids)) > 25


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.MultiheadAttention(64, 4, batch_first=True), (2, 5, 64)),
        (nn.LSTM(64, 256), (5, 2, 64)),
        (nn.GRU(64, 256), (5, 2, 64)),
    ],
)
def test_attentions_and_recurrent_layers_do_too(layer: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = copy.deepcopy(layer).bfloat16().eval()
    x = torch.randn(shape).bfloat16()
    args = (x, x, x) if isinstance(layer, nn.MultiheadAttention) else (x,)
    found = x86quant.to_dynamic(model)
    assert type(found) is not type(model)
    with torch.no_grad():
        result, exact = found(*args)[0], model(*args)[0]
    assert result.dtype == torch.bfloat16
    assert db(result, exact) > 20


def test_a_type_said_twice_leaves_scales_alone() -> None:
    layer = x86quant.to_dynamic(nn.Linear(64, 64))
    x = torch.randn(2, 64)
    exact = layer(x)
    layer.to(torch.bfloat16).to(torch.bfloat16)
    assert layer.weight_scale.dtype == torch.float32
    assert torch.equal(layer(x), exact)
    layer.half().half().float().float()
    assert layer.weight_scale.dtype == torch.float32
    assert torch.equal(layer(x), exact)

"""Saving models whose class is needed: filled into it, or refused in a sentence."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.artifacts.own_classes import Classy, classy, loaded_from
from tests.corruption import assembled, parts
from tests.models import bert
from x86quant.artifacts import describe
from x86quant.artifacts.writer import to_bytes
from x86quant.errors import ArtifactError, X86QuantWarning


def test_a_class_of_the_user_is_filled(tmp_path: Path) -> None:
    quantized, ids, data = classy()
    (tmp_path / "a").write_bytes(data)
    assert describe(tmp_path / "a").needs == "Classy"
    skeleton = Classy()
    before = copy.deepcopy(skeleton.state_dict())
    loaded = x86quant.load(tmp_path / "a", model=skeleton)
    assert type(loaded) is Classy
    assert torch.equal(loaded(ids).out, quantized(ids).out)
    assert torch.equal(loaded(ids[:1, :3]).out, quantized(ids[:1, :3]).out)
    assert all(torch.equal(before[key], value) for key, value in skeleton.state_dict().items())


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    _, _, data = classy()
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"give load\(path, model=...\) a Classy"):
        x86quant.load(tmp_path / "a")
    with pytest.raises(ArtifactError, match="must be a Classy, not Linear"):
        x86quant.load(tmp_path / "a", model=nn.Linear(2, 2))
    with pytest.raises(ArtifactError, match=r"shift is .*with the same arguments"):
        x86quant.load(tmp_path / "a", model=Classy(12))
    other = Classy()
    other.inner.append(nn.ReLU())
    with pytest.raises(ArtifactError, match=r"the file has not the module .inner\.3."):
        x86quant.load(tmp_path / "a", model=other)
    hooked = Classy()
    hooked.embed.register_forward_hook(lambda *_: None)
    with pytest.raises(ArtifactError, match="embed has 1 hooks, had 0"):
        x86quant.load(tmp_path / "a", model=hooked)


def test_models_of_transformers_need_no_class() -> None:
    model, call = bert()
    quantized = x86quant.quantize(model, [call, call], progress=False, speed_check=False)
    data = to_bytes(quantized)
    loaded = loaded_from(data)
    assert type(loaded) is type(model)
    for ids in (call["input_ids"], torch.randint(0, 50, (1, 11))):
        for extra in ({}, {"attention_mask": torch.ones_like(ids)}):
            one, other = quantized(ids, **extra), loaded(ids, **extra)
            assert torch.equal(one.last_hidden_state, other.last_hidden_state)
            assert torch.equal(one.pooler_output, other.pooler_output)


def test_models_that_changed_their_modules_are_given_to_load() -> None:
    """As BigBird does at its first call: its configuration makes the ones it had."""
    model, call = bert()
    model.encoder.layer[0].extra = nn.Dropout()
    quantized = x86quant.quantize(model, [call, call], progress=False, speed_check=False)
    with pytest.warns(X86QuantWarning, match="its configuration makes other modules"):
        data = to_bytes(quantized)
    with pytest.raises(ArtifactError, match="not its code"):
        loaded_from(data)
    one, other = quantized(**call), loaded_from(data, model)(**call)
    assert torch.equal(one.last_hidden_state, other.last_hidden_state)


_BACKBONES: dict[str, dict[str, Any]] = {
    "transformers' own": {
        "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 8, 16],
        "depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage4"],
    },
    "timm's": {"model_type": "timm_backbone", "backbone": "resnet10t", "out_indices": [4]},
}  # fmt: skip


def _with_backbone(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 1), ("ffn_dim", 16), ("attention_heads", 2))}  # fmt: skip
    config = transformers.DetrConfig(
        d_model=16, num_queries=3, backbone_config=dict(_BACKBONES[kind]), **sizes
    )
    return x86quant.to_dynamic(transformers.DetrModel(config).eval())


@pytest.mark.parametrize("kind", _BACKBONES)
def test_detectors_of_transformers_need_no_class_whatever_their_backbone_is(kind: str) -> None:
    model: Any = _with_backbone(kind)
    x = torch.randn(1, 3, 64, 64)
    one, other = model(x), loaded_from(to_bytes(model))(x)
    assert torch.equal(one.last_hidden_state, other.last_hidden_state)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("transformers' own", lambda c: c.update(backbone_config="some/repository"), "foreign"),
        ("transformers' own", lambda c: c.update(backbone="resnet50"), "has backbone, which"),
        ("timm's", lambda c: c["backbone_config"].update(backbone="hf-hub:x/y"), "model of timm"),
        ("timm's", lambda c: c["backbone_config"].update(backbone="../weights"), "model of timm"),
        (
            "timm's",
            lambda c: c["backbone_config"].update(use_pretrained_backbone=True),
            "foreign code",
        ),
        ("timm's", lambda c: c["backbone_config"].pop("use_pretrained_backbone"), "has backbone"),
        (
            "transformers' own",
            lambda c: c.update(backbone_config={
                "model_type": "timm_wrapper", "architecture": "hf-hub:x/y"
            }),
            "model of timm",
        ),
    ],
)  # fmt: skip
def test_a_backbone_is_not_fetched(kind: str, change: Any, message: str) -> None:
    manifest, header, tensors = parts(to_bytes(_with_backbone(kind)))
    change(manifest["model"]["config"]["values"])
    with pytest.raises(ArtifactError, match=message):
        loaded_from(assembled(manifest, header, tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update({"class": "os"}), "no model class 'os'"),
        (lambda r: r.update({"class": "PreTrainedModel"}), "no model class"),
        (lambda r: r.update({"class": "AutoModel"}), "no model class"),
        (lambda r: r["config"]["values"].update(auto_map={"AutoModel": "x--y.Z"}), "auto_map"),
        (lambda r: r["config"].update(attention="kernels-community/x"), "not one that save"),
        (
            lambda r: r["config"]["values"].update(_attn_implementation="some/kernel"),
            "asks for _attn_implementation",
        ),
        (lambda r: r["config"]["values"].update(hidden_size="x"), "cannot make a BertModel"),
        (lambda r: r["config"]["values"].update(hidden_size=32), "with the same arguments"),
    ],
)
def test_a_configuration_runs_nothing(change: Any, message: str) -> None:
    model, _ = bert()
    quantized = x86quant.to_dynamic(model)
    manifest, header, tensors = parts(to_bytes(quantized))
    change(manifest["model"])
    with pytest.raises(ArtifactError, match=message):
        loaded_from(assembled(manifest, header, tensors))


def test_a_class_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a torchaudio was built beside another torch."""
    data = to_bytes(x86quant.to_dynamic(bert()[0]))
    package = sys.modules["transformers"]
    before = type(package).__getattr__

    def broken(self: Any, name: str) -> Any:
        if name != "BertModel":
            return before(self, name)
        cause = OSError("Could not load this library: _torchaudio.so")
        raise ModuleNotFoundError("Could not import module 'BertModel'.") from cause

    monkeypatch.delitem(package.__dict__, "BertModel", raising=False)
    monkeypatch.setattr(type(package), "__getattr__", broken)
    with pytest.raises(ArtifactError, match=r"cannot import its BertModel: OSError: .*_torchaudio"):
        loaded_from(data)


class Counting(nn.Module):
    """Its result depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.a(x) * self.calls


class Noisy(Counting):
    """Draws random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.a(x), 0.5, training=True)


class Consuming(Counting):
    """Writes into what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.a(x)


@pytest.mark.parametrize("kind", [Counting, Noisy, Consuming])
def test_what_is_no_function_of_its_inputs_needs_its_class(kind: type[Counting]) -> None:
    torch.manual_seed(0)
    calls = [(torch.randn(8, 4),) for _ in range(3)]
    model = x86quant.quantize(kind().eval(), calls, progress=False, speed_check=False)
    with pytest.warns(X86QuantWarning, match=rf"load it with .*model={kind.__name__}"):
        data = to_bytes(model)
    loaded = loaded_from(data, kind().eval())
    loaded.calls = getattr(model, "calls", 0)
    for _ in range(3):
        x = torch.randn(8, 4)
        results = []
        for each in (model, loaded):
            torch.manual_seed(1)
            results.append(each(x.clone()))
        assert torch.equal(*results)

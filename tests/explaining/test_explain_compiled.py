"""``explain`` of a compiled model: every step, its kernel, its rule, and what runs in float."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import x86quant
from tests.lowering.test_lowering import IMAGE, MODELS, Residual, stock
from tests.runtime.compiled_models import compiled
from x86quant import extension
from x86quant.errors import ExtensionError
from x86quant.explaining.explanation import CompiledExplanation

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")


def explained(module: x86quant.CompiledModule) -> CompiledExplanation:
    explanation = x86quant.explain(module)
    assert isinstance(explanation, CompiledExplanation)
    return explanation


@pytest.mark.parametrize("name", MODELS)
def test_every_step_is_listed_in_order(name: str) -> None:
    build, shape, _, _ = MODELS[name]
    module = compiled(build(), *shape)
    explanation = explained(module)
    native = [(c.op, c.kernel) for c in explanation if c.kernel != "torch"]
    assert native == [(s.op, s.kernel) for g in module.segments for s in g.plans[-1].steps]
    floats = [layer.layer for layer in explanation if "torch float op" in layer.reason]
    assert sorted(floats) == sorted(node.layer for node in module.float_nodes)


def test_layers_have_the_names_of_the_source_and_rules_of_the_table() -> None:
    by_layer = {c.layer: c for c in explained(compiled(Residual(), *IMAGE)) if c.routed}
    assert {"stem.0", "left", "right", "squeeze", "head"} <= by_layer.keys()
    for layer in by_layer.values():
        assert layer.kernel == "native"
        assert layer.rule
        assert layer.reason
        assert layer.steps
    shape = by_layer["stem.0"].shape  # "…, 2 parts" follows where there are two threads
    assert shape.startswith("conv2d 4→8 k3×3 p1×1: 2×4×10×9 → 2×8×10×9")


def test_an_override_shows_as_the_rule() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 6)
    converted = stock(nn.Sequential(nn.Conv2d(4, 8, 1)), x)
    with x86quant.override("native", op="conv2d"):
        module = x86quant.compile(converted, (x,))
        (conv,) = (layer for layer in explained(module) if layer.op == "conv")
    assert conv.rule == "override"


def test_what_is_fused_names_its_pass() -> None:
    fused = {c.layer: c.fused for c in explained(compiled(Residual(), *IMAGE)) if c.routed}
    assert fused["stem.0"] == ("clamp 0.. (fuse_clamp)",)
    assert "sum with left (fuse_residual)" in fused["right"]
    assert fused["squeeze"] == ("table (fuse_table)",)
    assert fused["head"] == ()


def test_what_does_not_run_is_listed_with_its_reason() -> None:
    explanation = explained(compiled(Residual(), *IMAGE))
    reasons = {(node.op, node.reason) for node in explanation.elided}
    assert ("cat", "its inputs are written in place") in reasons
    assert ("transpose", "a view: no copy") in reasons
    assert {report.name for report in explanation.passes} >= {"fuse_residual", "fuse_table"}


def test_other_inputs_give_other_shapes() -> None:
    module = compiled(Residual(), *IMAGE)
    explanation = x86quant.explain(module, (torch.zeros(1, 4, 12, 12),))
    assert explanation[1].shape.endswith("1×4×12×12 → 1×8×12×12")


def test_float_fallback_says_why() -> None:
    module = compiled(nn.Sequential(nn.Linear(7, 9), nn.Softmax(1), nn.Linear(9, 3)), 2, 7)
    (softmax,) = (layer for layer in explained(module) if layer.kernel == "torch")
    assert softmax.op == "softmax"
    assert softmax.reason == "torch float op: x86quant has no int8 op for it"


def test_without_the_compiled_part_ops_run_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ExtensionError("it is missing")

    monkeypatch.setattr(extension, "load", missing)
    with pytest.warns(x86quant.X86QuantWarning, match="plain torch"):
        module = compiled(Residual(), *IMAGE)
    layers = {layer.layer: layer for layer in explained(module)}
    assert layers["stem.0"].kernel == "plain"
    assert "runs as plain torch" in layers["stem.0"].reason
    with pytest.raises(ExtensionError, match="it is missing"):
        x86quant.profile(module, (torch.randn(IMAGE),))


def test_it_prints_and_round_trips_as_json() -> None:
    explanation = explained(compiled(Residual(), *IMAGE))
    text = str(explanation)
    for wanted in (
        "stem.0",
        f"{x86quant.current_rules().name}#",
        "fuse_residual",
        "written in place",
    ):
        assert wanted in text
    data = json.loads(explanation.to_json())
    assert data.keys() == {"layers", "passes", "elided"}
    assert [layer["layer"] for layer in data["layers"]] == [c.layer for c in explanation]
    assert [p["name"] for p in data["passes"]] == [r.name for r in explanation.passes]


def test_unknown_input_shapes_ask_for_inputs() -> None:
    module = compiled(Residual(), *IMAGE)
    for node in module.graph_module.graph.nodes:
        node.meta.pop("shape", None)
    with pytest.raises(x86quant.InvalidInputError, match="pass the inputs"):
        x86quant.explain(module)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(x86quant.InvalidInputError, match="empty"):
        x86quant.explain(compiled(Residual(), *IMAGE), (torch.zeros(0, 4, 10, 9),))

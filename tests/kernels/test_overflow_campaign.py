"""A short overflow campaign of fixed seed, and that a longer one would see what overflows."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import overflow_campaign as campaign
from x86quant.hardware.cpu import cpu
from x86quant.kernels import fbgemm, graph_kernels, reasons

LAYERS = 160


@pytest.mark.parametrize("first", range(0, LAYERS, 40))
def test_no_legal_kernel_overflows(first: int) -> None:
    outcome = campaign.Outcome()
    for layer in campaign.layers(0, first, 40):
        campaign.check(layer, outcome)
    assert outcome.wrong == []
    assert outcome.layers == 40
    ran = {("stock", name) for name in ("fbgemm", "onednn", "native", "qnnpack")}
    graph = {name for name, k in graph_kernels().items() if not k.missing_features(cpu())}
    assert ran | {("graph", name) for name in graph} <= set(outcome.runs)


@pytest.mark.parametrize("weights", ["all 127", "all -128", "alternating pairs", "just unsafe"])
def test_an_overflow_is_seen(monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    """FBGEMM's depthwise kernels add products in 16 bits on every CPU: let them run regardless."""
    monkeypatch.setattr(reasons, "pair_saturation", lambda spec, layout: [])
    outcome = campaign.Outcome()
    depthwise = (
        layer
        for layer in campaign.layers(0, 0, 4000)
        if layer.weights == weights and layer.activations == "all 255"
        if fbgemm.path(layer.spec) == "depthwise"
    )
    for layer in itertools.islice(depthwise, 3):
        campaign.check(layer, outcome)
    assert outcome.layers == 3
    assert any("stock fbgemm" in wrong for wrong in outcome.wrong)


def test_a_layer_is_the_same_whichever_is_first() -> None:
    (alone,) = campaign.layers(0, 7, 1)
    *_, last = campaign.layers(0, 0, 8)
    assert alone == last
    (other,) = campaign.layers(1, 7, 1)
    assert alone != other

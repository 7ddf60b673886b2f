"""Small transformers are timed as the graphs that they run as, not layer by layer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.calling.differences import difference
from x86quant.compiled.block_graphs import blocks_of, layers_alone
from x86quant.errors import X86QuantWarning
from x86quant.quantization import layer_times, speed
from x86quant.quantization.graphs import given_graphs


class _Reader(nn.Module):
    """Patches of a line beside a token of their own, and queries that look at them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(1, 32, (8, 4), (8, 4))
        self.token = nn.Parameter(torch.randn(1, 1, 32))
        layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.queries = nn.Parameter(torch.randn(1, 3, 32))
        self.look = nn.MultiheadAttention(32, 2, batch_first=True)
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.patches(x).flatten(2).transpose(1, 2)
        seen = self.encoder(torch.cat([self.token.expand(len(x), -1, -1), seen], 1))
        read: torch.Tensor = self.look(self.queries.expand(len(x), -1, -1), seen, seen)[0]
        return self.head(read)  # type: ignore[no-any-return]


def _lines(rows: int) -> torch.Tensor:
    return torch.randn(rows, 1, 8, 24, generator=torch.Generator().manual_seed(rows))


def _made(**arguments: Any) -> Any:
    return x86quant.quantize(_Reader().eval(), [_lines(4), _lines(4)], progress=False, **arguments)


def test_queries_of_their_own_and_lengths_are_one_graph_for_any_number_of_rows() -> None:
    made = _made(fuse_blocks=True)
    blocks = blocks_of(made)
    assert blocks is not None
    for rows in (1, 3, 4):
        x = _lines(rows)
        with torch.no_grad():
            assert blocks.graph_for((x,), {}) is not None
            found = made(x)
            with layers_alone(made):
                layers = made(x)
        assert (found - layers).norm() < 0.02 * layers.norm()


def test_queries_of_their_own_share_the_memory_of_the_attention(tmp_path: Path) -> None:
    made = _made(fuse_blocks=True)
    blocks = blocks_of(made)
    assert blocks is not None
    whole = made.look.in_proj.int8_weight.untyped_storage().data_ptr()
    (graph,) = blocks.graphs
    own = graph.compiled.graph_module.buffers()
    assert any(b.untyped_storage().data_ptr() == whole for b in own)  # not of keys and values
    with pytest.warns(X86QuantWarning, match="does not hold for inputs of .* raises at others"):
        x86quant.save(made, tmp_path / "made", example_inputs=(_lines(4),))  # of shorter lines
    loaded = x86quant.load(tmp_path / "made")
    assert difference(made(_lines(3)), loaded(_lines(3))) is None


def test_a_file_is_not_asked_for_sizes_that_the_model_does_not_take(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x = torch.randn(2, 16, 32)
    made = x86quant.quantize(model, [x, x.flip(1)], fuse_blocks=True, progress=False)
    assert blocks_of(made) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", X86QuantWarning)  # of inputs of (2, 16, 16)
        x86quant.save(made, tmp_path / "made", example_inputs=(x,))
    assert difference(made(x), x86quant.load(tmp_path / "made")(x)) is None


def _times(monkeypatch: pytest.MonkeyPatch, as_graphs: float | None) -> None:
    """Layer by layer int8 takes twice the time of float, as graphs what ``as_graphs`` says."""

    def slower(_: Any, int8: Any, *__: Any, **___: Any) -> float | None:
        if not isinstance(int8, nn.Module):
            return None  # of a graph beside its layers
        return 2.0 if blocks_of(int8) is None else as_graphs

    monkeypatch.setattr(layer_times, "much_slower", lambda *_: {})
    monkeypatch.setattr(speed, "slower", slower)
    monkeypatch.setattr(speed, "can_tell", lambda: True)


def test_what_is_slower_by_layers_and_quicker_as_graphs_stays_int8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _times(monkeypatch, None)
    made = _made()
    assert "head" in made.quantization.int8_layers
    assert blocks_of(made) is not None
    assert "blocks run as fused graphs: the whole model" in made.quantization.notes


def test_what_is_slower_as_graphs_too_is_the_float_model(monkeypatch: pytest.MonkeyPatch) -> None:
    _times(monkeypatch, 1.5)
    made = _made()
    assert made.quantization.int8_layers == ()
    assert blocks_of(made) is None
    assert difference(_Reader().eval()(_lines(4)), made(_lines(4))) is None


@pytest.mark.parametrize("effort", ["fast", "default", "best"])
def test_little_work_has_graphs_but_where_it_is_to_be_quick(
    effort: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _times(monkeypatch, None)
    if effort == "fast":
        monkeypatch.setattr(speed, "slower", lambda *_, **__: None)
    made = _made(effort=effort)
    assert (blocks_of(made) is not None) == (effort != "fast")


def test_much_work_has_graphs_at_any_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    _times(monkeypatch, None)
    monkeypatch.setattr(given_graphs, "_ENOUGH_WORK", 1)
    assert blocks_of(_made(effort="fast")) is not None


class _Patches(nn.Module):
    """Overlapping pieces of a series, whose number and the number of rows are one size in torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.widen = nn.Linear(16, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(7 * 32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = self.widen(x[..., 0].unfold(1, 16, 8))
        return self.head(self.encoder(pieces).flatten(1))  # type: ignore[no-any-return]


def test_a_single_row_has_a_graph_of_its_own_where_that_of_several_does_not_hold() -> None:
    data = [torch.randn(4, 64, 1) for _ in range(2)]
    made: Any = x86quant.quantize(_Patches().eval(), data, progress=False, fuse_blocks=True)
    blocks = blocks_of(made)
    assert blocks is not None
    several, single = blocks.graphs
    assert several.guard.refusal([torch.randn(1, 64, 1)])
    x = torch.randn(1, 64, 1)
    found = blocks.graph_for((x,), {})
    assert found is not None
    assert found[0] is single
    with torch.no_grad(), layers_alone(made):
        layers = made(x)
    assert (made(x) - layers).norm() < 0.02 * layers.norm()

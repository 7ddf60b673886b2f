"""Layers that are random, recurrent, shared, recursive or of no usual kind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.quantization.any_model import Net, Recurrent, images, quantized, sqnr


class Random(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.b(y + torch.randn(8, 1, 1) + torch.randn_like(y))


def test_random_models_stay_random():
    model = Random(lambda _, x: x)
    result = quantized(model, images())
    x = images(seed=1)
    assert not torch.equal(result(x), result(x))
    torch.manual_seed(5)
    exact = model(x)
    torch.manual_seed(5)
    assert sqnr(exact, result(x)) > 25


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_between_int8_parts(kind):
    model = Recurrent(kind)
    torch.manual_seed(1)
    result = quantized(model, torch.randn(16, 4, 30))
    assert {"conv", "head"} <= set(result.quantization.int8_layers)
    for x in (torch.randn(1, 4, 7), torch.randn(3, 4, 21)):
        assert sqnr(model(x), result(x)) > 25


class Masked(Net):
    def forward(  # type: ignore[override]
        self, x: torch.Tensor, keep: torch.Tensor
    ) -> torch.Tensor:
        y = self.a(x)
        y = y * (y > 0) * keep
        kinds = F.one_hot(keep.long().sum((1, 2, 3)) % 3, 3).float()
        return self.b(y).mean((2, 3)) + kinds.sum(1, keepdim=True)


def test_masks_of_booleans():
    model = Masked(lambda _, x: x)
    x, keep = images(), images(seed=4)[:, :1] > 0
    result = quantized(model, [(x, keep)])
    assert sqnr(model(x, keep), result(x, keep)) > 25
    assert "a" in result.quantization.int8_layers


class Graph(nn.Module):
    """Messages between nodes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)
        self.eval()

    def forward(self, h: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.first(h))
        gathered = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
        return self.second(h + gathered)


def test_graph_networks():
    model = Graph()
    h, edges = torch.randn(10, 6), torch.randint(0, 10, (2, 30))
    result = quantized(model, [(h, edges)])
    assert sqnr(model(h, edges), result(h, edges)) > 25
    assert result.quantization.int8_layers


class Tables(nn.Module):
    """Embeddings before linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.bag = nn.Embedding(5000, 32), nn.EmbeddingBag(5000, 32)
        self.linear, self.head = nn.Linear(64, 64), nn.Linear(64, 3)
        self.eval()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.words(tokens).mean(1), self.bag(tokens)], 1)
        return self.head(F.relu(self.linear(both)))


def test_embeddings_are_looked_up_in_float():
    model = Tables()
    tokens = torch.randint(0, 5000, (8, 5))
    result = quantized(model, tokens)
    assert sqnr(model(tokens), result(tokens)) > 25
    for node in result.graph_module.graph.nodes:  # nothing reads a whole table but the lookup
        value = node.meta.get("shape")
        assert value is None or 5000 not in tuple(value)


class Shared(nn.Module):
    """One head in a loop, one layer with a ReLU after one of its calls only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.twice = nn.Linear(16, 16), nn.Linear(16, 16)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.head(x))
        return F.relu(self.twice(x)) + self.twice(x * 2)


def test_shared_layers():
    model = Shared()
    x = torch.randn(16, 16)
    result = quantized(model, x)
    assert sqnr(model(x), result(x)) > 20


class Recursive(nn.Module):
    """A linear fed with its own result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step = nn.Linear(16, 16)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.shape[0], 16)
        for number in range(6):
            h = torch.tanh(self.step(h) + x[:, number])
        return h


def test_bias_correction_is_dropped_where_it_harms():
    model = Recursive()
    x = torch.randn(64, 6, 16)
    best = max(
        sqnr(model(x), quantized(model, [x[:32], x[32:]], bias_correction=on)(x))
        for on in (True, False)
    )
    assert sqnr(model(x), quantized(model, [x[:32], x[32:]])(x)) > best - 1


class Standardised(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


def test_standardised_weights():
    torch.manual_seed(0)
    model = nn.Sequential(Standardised(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    result = quantized(model, images())
    assert sqnr(model(images(seed=1)), result(images(seed=1))) > 25


def test_batch_norms_without_statistics():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    result = quantized(model, images())
    assert sqnr(model(images(seed=1)), result(images(seed=1))) > 25


def test_instance_norms_with_statistics_are_told_as_float():
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(8, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 4, 3))
    model(images())  # what it has seen in training
    result = quantized(model.eval(), images())
    assert result.quantization.int8_layers == ("0", "3")
    assert sqnr(model(images(seed=1)), result(images(seed=1))) > 25


def test_inner_precisions():
    model = Net(lambda _, x: x.double().exp().float() + x.half().float())
    result = quantized(model, images())
    assert sqnr(model(images(seed=1)), result(images(seed=1))) > 25

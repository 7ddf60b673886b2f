"""The accuracy kit: each step keeps the function, does what it promises, and can be selected."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.calling.call import Call
from x86quant.compiled import CompiledModule
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.quantization.kit import equalization, smoothing
from x86quant.quantization.kit.bias_correction import BiasCorrection
from x86quant.quantization.kit.float_run import FloatRun
from x86quant.quantization.preparing import prepare
from x86quant.quantization.search import Trial, rank
from x86quant.quantization.settings import Settings
from x86quant.quantization.static.static_part import Ranges, StaticPart
from x86quant.quantization.tracing.tracing import trace

pytestmark = pytest.mark.usefixtures("any_accuracy")


def conv_chain() -> nn.Module:
    """A plain, a depthwise and a pointwise conv, pooled and flattened into a linear."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12 * 16, 6),
    ).eval()


def spoilt(model: nn.Module, orders: float = 1.5) -> nn.Module:
    """The same function with channels between layers 2 and 4 rescaled by up to 10**±orders."""
    model = copy.deepcopy(model)
    scales = torch.logspace(-orders, orders, 8)[torch.randperm(8)]
    with torch.no_grad():
        model[2].weight *= scales.view(-1, 1, 1, 1)
        model[2].bias *= scales
        model[4].weight /= scales.view(1, -1, 1, 1)
    return model


def images(count: int = 48, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def tokens(count: int = 16, width: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 6, width, generator=torch.Generator().manual_seed(seed))


def sqnr(exact: torch.Tensor, actual: torch.Tensor) -> float:
    exact, actual = exact.detach(), actual.detach()
    return float(20 * torch.log10(exact.norm() / (exact - actual).norm()))


def equalized(model: nn.Module, x: torch.Tensor, always: bool = True):
    graph = trace(copy.deepcopy(model), Call((x,))).graph_module
    ranges = equalization.ChannelRanges(graph)
    with ranges.watching(graph):
        graph(x)
    pairs = equalization.worthwhile(ranges, always=always)
    for pair in pairs:
        equalization.apply(graph, pair)
    return graph, pairs


# --- equalization ---


def test_equalization_keeps_the_function():
    model, x = spoilt(conv_chain()), images()
    graph, pairs = equalized(model, x)
    assert len(pairs) >= 2
    torch.testing.assert_close(graph(x), (model(x),), rtol=1e-4, atol=1e-5)


def test_equalization_narrows_channel_ranges():
    model, x = spoilt(conv_chain()), images()
    graph, _ = equalized(model, x)

    def spread(m: nn.Module) -> float:
        y = x
        for index in range(4):
            y = m[index](y) if isinstance(m, nn.Sequential) else getattr(m, str(index))(y)
        widths = y.detach().amax((0, 2, 3))
        return float(widths.max() / widths.min())

    assert spread(graph) < spread(model) / 10


def test_equalization_finds_pairs_through_pools_and_flatten():
    graph = trace(conv_chain(), Call((images(),))).graph_module
    assert [(p.first, p.second) for p in equalization.find_pairs(graph)] == [
        ("0", "2"),
        ("2", "4"),
        ("4", "8"),
    ]


class Branch(nn.Module):
    def __init__(self, between) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between(self.a(x), self.b)


@pytest.mark.parametrize(
    "between",
    [
        lambda y, b: b(torch.sigmoid(y)),
        lambda y, b: b(y) + y,
        lambda y, b: b(b(y)),
    ],
    ids=["sigmoid", "read twice", "called twice"],
)
def test_equalization_leaves_what_it_would_change(between):
    graph = trace(Branch(between).eval(), Call((images(),))).graph_module
    assert list(equalization.find_pairs(graph)) == []


@pytest.mark.parametrize("equalize", [True, False, "auto"])
def test_observers_see_every_batch_once(equalize: bool | str) -> None:
    """Some before layers are equalized, or after, the others later."""
    model, data = spoilt(conv_chain()), [images(2, seed) for seed in range(5)]
    settings = Settings(equalize=equalize, progress=False)
    prepared = prepare(model, (x for x in data), settings)
    (part,) = prepared.parts
    assert bool(prepared.equalized) is (equalize is not False)
    assert prepared.batches == 5
    values = sum(x.numel() for x in data)
    first = next(m for m in part.prepared.modules() if hasattr(m, "counts"))
    assert int(first.counts.sum()) == values
    assert float(first.max_val) == max(float(x.max()) for x in data)


def test_equalization_is_left_where_it_gains_nothing():
    even = conv_chain()
    with torch.no_grad():  # all channels alike
        for index in (0, 2, 4):
            even[index].weight[:] = even[index].weight[:1, :1]
            even[index].bias[:] = 0.1
    assert x86quant.quantize(even, images()).quantization.equalized == ()
    assert len(x86quant.quantize(spoilt(conv_chain()), images()).quantization.equalized) >= 1


def test_equalization_repairs_a_spoilt_network():
    model, x = spoilt(conv_chain()), images()
    y = model(x)
    without = sqnr(y, x86quant.quantize(model, x, equalize=False)(x))
    repaired = sqnr(y, x86quant.quantize(model, x)(x))
    healthy = sqnr(y, x86quant.quantize(conv_chain(), x)(x))
    assert repaired > without + 10
    assert repaired > healthy - 3


def test_equalization_survives_silent_channels():
    model = spoilt(conv_chain())
    with torch.no_grad():
        model[2].bias[3] = -1e4  # never passes the ReLU
        model[4].weight[:, 3] = 1e3  # so this does not matter
        model[4].weight[:, 5] = 0  # is never read
    x = images()
    graph, _ = equalized(model, x)
    assert all(bool(torch.isfinite(p).all()) for p in graph.parameters())
    torch.testing.assert_close(graph(x), (model(x),), rtol=1e-4, atol=1e-5)
    assert sqnr(model(x), x86quant.quantize(model, x)(x)) > 28


# --- bias correction ---


def test_bias_correction_removes_the_mean_error():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3)).eval()
    x = images().abs()
    part = StaticPart("", trace(copy.deepcopy(model), Call((x,))), Call((x,)), Ranges())
    part.calibrate(Call((x,)))
    before = part.build()(x)
    correction = BiasCorrection(part)
    FloatRun(part, [correction.take]).observe(Call((x,)))
    part.corrections = correction.corrections()
    after = part.build()(x)
    exact = model(x).detach()

    def mean_error(y: torch.Tensor) -> float:
        return float((y - exact).mean((0, 2, 3)).abs().mean())

    assert set(part.corrections) == {"0", "2"}
    assert mean_error(after) < 0.5 * mean_error(before)


def test_bias_correction_gives_layers_a_bias_and_leaves_float_ones():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    x = images().abs()
    result = x86quant.quantize(model, x, float_layers=["2"], bias_correction=True)
    assert result.quantization.corrected == 2
    target = torch.ops.x86quant.float_conv.default
    (kept,) = result.graph_module.graph.find_nodes(op="call_function", target=target)
    assert torch.equal(getattr(result.graph_module, kept.kwargs["bias"].target), model[2].bias)
    assert x86quant.quantize(model, x, bias_correction=False).quantization.corrected == 0


# --- SmoothQuant ---


class PreNorm(nn.Module):
    """Attention and a feed-forward, each behind a norm with one outlier channel."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)
        self.final = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.final(x + self.down(F.gelu(self.up(self.norm2(x)))))


def outliers() -> nn.Module:
    torch.manual_seed(0)
    model = PreNorm().eval()
    with torch.no_grad():
        model.norm1.weight[3] = 60
        model.norm2.weight[5] = 80
        model.up.weight[:, 5] /= 80
    return model


def test_smoothing_keeps_the_function_and_lowers_the_error():
    model, x = outliers(), tokens()
    smooth = copy.deepcopy(model)
    done = smoothing.smooth(smooth, [Call((x,))])
    assert {norm.norm: norm.linears for norm in done} == {
        "norm1": ("attention",),
        "norm2": ("up",),
    }
    torch.testing.assert_close(smooth(x), model(x), rtol=1e-4, atol=1e-4)
    with_it = sqnr(model(x), x86quant.quantize(model, x)(x))
    without = sqnr(model(x), x86quant.quantize(model, x, smooth_quant=False)(x))
    assert with_it > without + 3


def test_smoothing_is_left_where_it_gains_nothing():
    torch.manual_seed(0)
    assert len(x86quant.quantize(outliers(), tokens()).quantization.smoothed) == 2
    balanced = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12)).eval()
    x = tokens(width=12).sign() * torch.rand(16, 6, 12).add(1)
    assert x86quant.quantize(balanced, x, smooth_quant=False).quantization.smoothed == ()


class Norms(nn.Module):
    def __init__(self, use) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(12), nn.Linear(12, 12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.use = use

    def forward(self, x: torch.Tensor):
        return self.use(self, self.norm(x), x)


@pytest.mark.parametrize(
    "use",
    [
        lambda m, y, x: m.linear(y) + y,
        lambda m, y, x: (m.linear(y), y),
        lambda m, y, x: m.linear(F.relu(y)),
        lambda m, y, x: m.attention(y, x, x, need_weights=False)[0],
        lambda m, y, x: m.linear(m.norm(m.linear(y))),
        lambda m, y, x: y @ m.linear.weight,
    ],
    ids=["residual", "returned", "activation", "cross attention", "called twice", "functional"],
)
def test_smoothing_leaves_norms_that_others_read(use):
    assert smoothing.find_consumers(Norms(use).eval(), Call((tokens(),))) == {}


def test_smoothing_watches_torchs_own_transformer_layers():
    layer = nn.TransformerEncoderLayer(12, 2, 24, norm_first=True, batch_first=True).eval()
    assert smoothing.find_consumers(layer, Call((tokens(),))) == {
        "norm1": ("self_attn",),
        "norm2": ("linear1",),
    }
    post = nn.TransformerEncoderLayer(12, 2, 24, norm_first=False, batch_first=True).eval()
    assert smoothing.find_consumers(post, Call((tokens(),))) == {}


# --- quantization-aware training ---


def test_qat_trains_and_converts():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 4),
    )
    x = images()
    labels = x[:, :2].mean((2, 3)).gt(0).long() @ torch.tensor([1, 2])
    prepared = x86quant.prepare_qat(model, (x[:2],))
    optimizer = torch.optim.Adam(prepared.parameters(), 1e-2)
    first = None
    for _ in range(40):
        loss = F.cross_entropy(prepared(x), labels)
        first = loss.item() if first is None else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3 * first
    compiled = x86quant.convert_qat(prepared)
    assert isinstance(compiled, CompiledModule)
    assert compiled.float_nodes == ()
    prepared.eval()
    assert (compiled(x).argmax(1) == prepared(x).argmax(1)).float().mean() > 0.95
    assert model[4].weight.grad is None


def test_qat_keeps_layers_in_float():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    prepared = x86quant.prepare_qat(model, (images(2),), float_layers=["2"])
    prepared(images())
    assert [n.layer for n in x86quant.convert_qat(prepared).float_nodes] == ["2"]


def test_qat_names_what_is_wrong():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    with pytest.raises(InvalidInputError, match="must be a tuple"):
        x86quant.prepare_qat(model, images(2))
    with pytest.raises(InvalidInputError, match="no module '7'"):
        x86quant.prepare_qat(model, (images(2),), float_layers=["7"])
    with pytest.raises(InvalidInputError, match="prepare_qat returned"):
        x86quant.convert_qat(model)
    with pytest.raises(InvalidInputError, match="never ran"):
        x86quant.convert_qat(x86quant.prepare_qat(model, (images(2),)))

    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(UnsupportedError, match="cannot trace Deciding"):
        x86quant.prepare_qat(Deciding(), (images(2),))


# --- sensitivity and search ---


@pytest.fixture(scope="module")
def one_bad_layer() -> nn.Module:
    """Only layer 4 suffers in int8: its input has channels of very different ranges."""
    return spoilt(conv_chain(), orders=2.5)


def agreement(model: nn.Module) -> float:
    """How near to the float model, in dB, which only counts up to 40."""
    x = images(seed=5)
    return min(sqnr(spoilt_reference(x), model(x)), 40.0)


def spoilt_reference(x: torch.Tensor) -> torch.Tensor:
    return conv_chain()(x)  # rescaling did not change the function


def test_sensitivity_ranks_the_worst_layer_first(one_bad_layer):
    report = x86quant.sensitivity(one_bad_layer, images(), metric=agreement, equalize=False)
    names = [layer.name for layer in report]
    assert set(names[:2]) == {"2", "4"}
    assert report["4"].sqnr_db < report["0"].sqnr_db - 10
    assert report["4"].drop > report["0"].drop
    assert report.float_metric == 40
    assert all(layer.float_us > 0 for layer in report)
    text = str(report)
    assert text.splitlines()[0].split()[:2] == ["layer", "kind"]
    assert "Conv2d" in text
    assert '"float_metric": 40.0' in report.to_json()


@pytest.mark.parametrize("layer", ["0", "4", "8"])
def test_sensitivity_foretells_what_the_layer_does_in_int8(layer):
    model, x = conv_chain(), images(32)
    report = x86quant.sensitivity(model, x, equalize=False)
    others = [name for name in ("0", "2", "4", "8") if name != layer]
    real = x86quant.quantize(model, x, equalize=False, bias_correction=False, float_layers=others)
    assert report[layer].sqnr_db == pytest.approx(sqnr(model(x), real(x)), abs=1.0)


def test_with_all_layers_in_float_nothing_is_rounded():
    model, x = conv_chain(), images(32)
    result = x86quant.quantize(model, x, float_layers=["0", "2", "4", "8"])
    torch.testing.assert_close(result(x), model(x).detach())


def test_sensitivity_of_some_layers_and_of_dynamic_ones(one_bad_layer):
    report = x86quant.sensitivity(one_bad_layer, images(), layers=["0"])
    assert [layer.name for layer in report] == ["0"]
    assert report.float_metric is None
    report = x86quant.sensitivity(outliers(), tokens())
    assert {layer.name for layer in report} == {"attention", "up", "down"}
    with pytest.raises(KeyError):
        report["nowhere"]


def test_sensitivity_needs_data(one_bad_layer):
    with pytest.raises(InvalidInputError, match="needs data"):
        x86quant.sensitivity(one_bad_layer, None)


def search(model: nn.Module, **arguments):
    return x86quant.quantize(model, images(), equalize=False, metric=agreement, **arguments)


def test_the_search_keeps_few_layers_in_float(one_bad_layer, caplog):
    with caplog.at_level(logging.INFO, logger="x86quant.quantization"):
        result = search(one_bad_layer, max_drop=15.0)
    found = result.quantization.search
    assert found.met
    assert agreement(result) == pytest.approx(found.best.score)
    assert found.best.score >= 25
    assert not found.steps[0].met
    assert 1 <= len(found.best.float_layers) <= 2
    assert set(found.best.float_layers) <= {"2", "4"}
    assert set(result.quantization.float_layers) == set(found.best.float_layers)
    assert caplog.text.count("trial") >= len(found.steps)
    assert "target met" in str(result.quantization)


def test_the_search_returns_the_best_even_if_it_misses(one_bad_layer):
    result = search(one_bad_layer, max_drop=0.0, max_trials=2)
    found = result.quantization.search
    assert not found.met
    assert not found.finished
    assert len(found.steps) == 2
    assert found.best.score == max(step.score for step in found.steps)
    assert "target not met" in str(found)
    assert isinstance(result, CompiledModule)


def test_of_models_that_meet_the_target_few_and_cheap_float_layers_win():
    best = Trial(("a",), 0.9, 5.0, True)
    for worse in (
        Trial(("a", "b"), 0.95, 2.0, True),
        Trial(("b",), 0.9, 6.0, True),
        Trial((), 0.99, 0.0, False),
    ):
        assert rank(best) > rank(worse)
    assert rank(Trial((), 0.8, 9.0, False)) > rank(Trial((), 0.7, 1.0, False))


def test_the_search_stops_at_once_if_nothing_is_lost():
    result = x86quant.quantize(conv_chain(), images(), metric=agreement, max_drop=20)
    found = result.quantization.search
    assert found.met
    assert len(found.steps) == 1
    assert found.best.float_layers == ()


def test_the_search_works_on_dynamic_layers_and_hands_over_data():
    model, x = outliers(), tokens()
    y = model(x).detach()

    def near(m: nn.Module, data: torch.Tensor) -> float:
        return min(sqnr(y, m(data)), 60.0)

    result = x86quant.quantize(
        model, x, metric=near, evaluation=x, max_drop=1.0, smooth_quant=False
    )
    assert result.quantization.search.met
    assert {"attention", "up"} <= set(result.quantization.float_layers)


def test_layers_asked_for_are_no_part_of_the_search(one_bad_layer):
    result = search(one_bad_layer, max_drop=15.0, float_layers=["4"])
    assert result.quantization.float_layers["4"] == "as asked"
    assert "4" not in result.quantization.search.best.float_layers


def test_few_calibration_values_show_less_than_the_range_to_come() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    data = [torch.randn(8, 16) for _ in range(3)]
    int8 = x86quant.quantize(model, data, progress=False)
    x = torch.randn(200, 16)
    with torch.no_grad():
        exact = model(x)
        noise = exact - int8(x)
    # Where the range is the data's, it is 17.7 dB.
    assert 10 * torch.log10(exact.square().sum() / noise.square().sum()) > 25


def test_what_no_codes_link_to_a_product_stays_float() -> None:
    class TimeEmbedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            angles = t * 0.37  # up to 370: rounded to 8 bits, its sine would be noise
            return self.b(torch.relu(self.a(x)) + torch.sin(angles))

    torch.manual_seed(0)
    model = TimeEmbedded().eval()
    data = [(torch.randn(32, 16), 1000 * torch.rand(32, 1)) for _ in range(4)]
    int8 = x86quant.quantize(model, data, progress=False)
    assert int8.quantization.int8_layers == ("a", "add", "b")
    with torch.no_grad():
        exact = model(*data[0])
        noise = exact - int8(*data[0])
    assert 10 * torch.log10(exact.square().sum() / noise.square().sum()) > 30


def test_a_step_that_makes_most_of_the_noise_stays_float() -> None:
    class SmallBesideLarge(nn.Module):
        """What is left of a sum after its larger part is taken away."""

        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(16, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            large = self.large(x)
            return self.head((large + self.small(x) / 50) - large)

    torch.manual_seed(0)
    model = SmallBesideLarge().eval()
    data = [torch.randn(256, 16) for _ in range(4)]
    int8 = x86quant.quantize(model, data, progress=False)
    assert {"large", "small"} <= set(int8.quantization.int8_layers)
    assert "most of the noise" in int8.quantization.float_layers["add"]
    assert min(int8.quantization.sqnr_db) > 25


def test_sums_with_floats_behind_the_last_layer_stay_float():
    class Embedding(nn.Module):
        """What a vision transformer does before its first block."""

        def __init__(self, last: nn.Module) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 16, 4, stride=4), last
            self.token = nn.Parameter(torch.randn(1, 1, 16))
            self.position = nn.Parameter(torch.randn(1, 17, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = self.conv(x).flatten(2).transpose(1, 2)
            tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], 1)
            return self.last(tokens + self.position)

    torch.manual_seed(0)
    data = [torch.randn(4, 3, 16, 16) for _ in range(3)]
    for last, feeds_a_layer in ((nn.Identity(), False), (nn.Linear(16, 16), True)):
        int8 = x86quant.quantize(Embedding(last).eval(), data, progress=False, speed_check=False)
        ours = {
            node.target._opname
            for node in int8.graph_module.graph.nodes
            if str(node.target).startswith("x86quant")
        }
        assert bool(ours & {"cat", "add"}) == feeds_a_layer
        assert ours & {"conv", "conv_real"}


def test_sqnr_is_judged_by_ranges_that_were_chosen_without_the_data():
    """Ranges cover what they were chosen by: new data that reaches further is clipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    data = [torch.randn(64, 8) * scale for scale in (1, 1, 1, 2)]
    options = {"observer": "minmax", "progress": False, "speed_check": False}
    int8 = x86quant.quantize(model, data, **options)
    with torch.no_grad():
        good = sqnr(model(data[3]), int8(data[3]))
    assert min(int8.quantization.sqnr_db) < good - 8
    even = x86quant.quantize(model, data[:3], **options)
    assert min(even.quantization.sqnr_db) > 25


def test_smoothing_of_a_static_model_is_kept_only_where_it_helps(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)).eval()
    with torch.no_grad():
        model[0].weight[3] = 60.0
        model[1].weight[:, 3] = 1 / 60
    data = [tokens(seed=seed) for seed in range(4)]
    kept = x86quant.quantize(model, data, mode="static", progress=False)
    assert [norm.norm for norm in kept.quantization.smoothed] == ["0"]
    seen = []

    def worse(plain, smoothed, *rest):
        seen.append(rest)
        return False

    monkeypatch.setattr("x86quant.quantization.preparing.smoothing_helps", worse)
    assert not x86quant.quantize(model, data, mode="static", progress=False).quantization.smoothed
    assert x86quant.quantize(
        model, data, mode="static", smooth_quant=True, progress=False
    ).quantization.smoothed
    assert len(seen) == 1


def test_calls_that_run_in_float_do_not_flatter_int8():
    class ByWidth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x) * (2.0 if x.shape[2] > 10 else 1.0)

    torch.manual_seed(0)
    data = [torch.randn(32, 4, width) for width in (16, 8, 16, 8, 16, 8)]
    prepared = prepare(ByWidth().eval(), data, Settings(progress=False))
    (part,) = prepared.parts
    assert not part.path
    judged = (*prepared.halves.unseen, *prepared.halves.held_back)
    assert judged
    assert all(part.inputs(call) is not None for call in judged)

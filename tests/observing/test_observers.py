"""Observers: exact histograms whatever the order, ranges that do what their names say."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.ao.quantization import MinMaxObserver, QConfig, QConfigMapping
from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx

import x86quant
from x86quant.errors import InvalidInputError
from x86quant.stock.observers import (
    OBSERVERS,
    WEIGHT_OBSERVERS,
    KLObserver,
    MSEObserver,
    PercentileObserver,
    PerChannelMSEObserver,
    StreamingHistogramObserver,
)

HISTOGRAMS = [PercentileObserver, MSEObserver, KLObserver]


def normal(count: int = 20000, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def with_outlier() -> torch.Tensor:
    x = normal(1_000_000)
    x[7] = 60.0
    return x


def observed(observer: nn.Module, *batches: torch.Tensor) -> tuple[float, int]:
    for batch in batches:
        observer(batch)
    scale, zero_point = observer.calculate_qparams()
    return float(scale), int(zero_point)


def rounding_error(x: torch.Tensor, scale: float, zero_point: int) -> float:
    rounded = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, 0, 255)
    return float((rounded - x).square().mean())


#: Of very different magnitudes, but none so small beside another that it vanishes in float32.
NUMBERS = st.builds(math.ldexp, st.integers(-999, 999), st.integers(-40, 40))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(NUMBERS, min_size=1, max_size=40),
        min_size=1,
        max_size=6,
    ),
    st.randoms(),
)
def test_the_histogram_does_not_depend_on_the_order_of_the_data(batches, random):
    tensors = [torch.tensor(batch, dtype=torch.float32) for batch in batches]
    forward, shuffled = StreamingHistogramObserver(64), StreamingHistogramObserver(64)
    for x in tensors:
        forward(x)
    random.shuffle(tensors)
    for x in tensors:
        shuffled(x)
    assert int(forward.counts.sum()) == sum(len(x) for x in tensors)
    assert torch.equal(forward.place, shuffled.place)
    assert torch.equal(forward.counts, shuffled.counts)


def test_the_smallest_numbers_have_bins() -> None:
    observer = StreamingHistogramObserver(64)
    observer(torch.tensor([torch.finfo(torch.float32).tiny, 0.0, -1e-38]))
    assert int(observer.counts.sum()) == 3
    assert torch.isfinite(observer.values()).all()


def test_every_value_lies_in_its_bin():
    observer = StreamingHistogramObserver(128)
    x = normal(1000)
    for part in x.split(100):
        observer(part)
    exponent, start = observer.place.tolist()
    numbers = torch.floor(x / 2.0**exponent).long() - start
    assert torch.equal(observer.counts, torch.bincount(numbers, minlength=128))


def test_memory_does_not_grow():
    observer = MSEObserver()
    observer(normal())
    before = sum(b.nbytes for b in observer.buffers())
    for seed in range(20):
        observer(normal(seed=seed) * 10.0**seed)
    assert sum(b.nbytes for b in observer.buffers()) == before


@pytest.mark.parametrize("kind", HISTOGRAMS)
def test_an_outlier_does_not_set_the_range(kind):
    widest, _ = observed(MinMaxObserver(dtype=torch.quint8), with_outlier())
    scale, _ = observed(kind(), with_outlier())
    assert scale < 0.7 * widest


@pytest.mark.parametrize("name", OBSERVERS)
def test_uniform_data_keep_their_whole_range(name):
    x = torch.rand(20000, generator=torch.Generator().manual_seed(0)) * 4 - 1
    scale, zero_point = observed(OBSERVERS[name](dtype=torch.quint8), *x.split(1000))
    assert scale == pytest.approx(4 / 255, rel=0.05)
    assert zero_point == pytest.approx(64, abs=3)


def test_mse_has_the_least_error_of_all():
    for x in (with_outlier(), normal().relu(), normal() ** 3):
        mine = rounding_error(x, *observed(MSEObserver(), *x.split(999)))
        for name in ("minmax", "percentile", "kl"):
            other = rounding_error(x, *observed(OBSERVERS[name](dtype=torch.quint8), x))
            assert mine <= other * 1.02, name


@pytest.mark.parametrize(("sign", "tries"), [(None, 5), (1, 1), (-1, 1)])
def test_mse_moves_both_ends_where_there_are_two(sign, tries, monkeypatch):
    """Where all values are of one sign, the first search has tried what later ones would."""
    seen = []
    errors = MSEObserver._errors

    def watched(self, lows, highs):
        seen.append(errors(self, lows, highs))
        return seen[-1]

    monkeypatch.setattr(MSEObserver, "_errors", watched)
    x = with_outlier() if sign is None else with_outlier().abs() * sign
    observer = MSEObserver()
    observer(x)
    low, high = observer.range()
    assert len(seen) == tries
    shares = torch.linspace(1.0, 0.02, 50).double()
    for lows, highs in (
        (shares * x.min(), shares * 0 + high),
        (shares * 0 + low, shares * x.max()),
    ):
        least = errors(observer, torch.tensor([low]), torch.tensor([high]))
        assert least <= errors(observer, lows, highs).min() * (1 + 1e-6)


def test_percentile_leaves_out_what_it_says():
    x = torch.arange(10000.0)
    scale, _ = observed(PercentileObserver(99.0), x)
    assert scale * 255 == pytest.approx(9900, rel=0.002)
    scale, _ = observed(PercentileObserver(100.0), x)
    assert scale * 255 == pytest.approx(9999, rel=1e-4)
    with pytest.raises(InvalidInputError, match="percentile"):
        PercentileObserver(40)


def test_percentile_works_on_both_sides():
    scale, zero_point = observed(PercentileObserver(99.0), torch.arange(-10000.0, 10000.0))
    assert scale * (0 - zero_point) == pytest.approx(-9800, rel=0.01)
    assert scale * (255 - zero_point) == pytest.approx(9800, rel=0.01)


@pytest.mark.parametrize("kind", HISTOGRAMS)
def test_constant_and_tiny_data_are_fine(kind):
    for x in (
        torch.zeros(10),
        torch.full((4,), 1e-30),
        torch.full((4,), 6e-39),
        torch.full((4,), -3.0),
        torch.ones(1),
    ):
        scale, zero_point = observed(kind(), x)
        assert math.isfinite(scale)
        assert scale > 0
        real = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, 0, 255)
        assert (real - x).abs().max() <= max(scale, 1e-6)


@pytest.mark.parametrize("kind", HISTOGRAMS)
def test_bad_data_are_named(kind):
    with pytest.raises(InvalidInputError, match="NaN or infinity"):
        kind()(torch.tensor([1.0, math.inf]))
    with pytest.raises(InvalidInputError, match="saw no data"):
        kind().calculate_qparams()
    observer = kind()
    observer(torch.zeros(0, 3))
    with pytest.raises(InvalidInputError, match="saw no data"):
        observer.calculate_qparams()


def test_seven_bits_use_seven_bits():
    eight, _ = observed(MSEObserver(), normal())
    seven, _ = observed(MSEObserver(quant_min=0, quant_max=127), normal())
    assert 1.5 * eight < seven < 2.1 * eight


def test_weights_are_clipped_where_that_helps():
    weight = normal(4 * 100_000).view(4, 100_000)
    weight[2, 0] = 30.0
    plain = WEIGHT_OBSERVERS["minmax"](**_symmetric())
    mine = PerChannelMSEObserver(**_symmetric())
    errors = {}
    for observer in (plain, mine):
        observer(weight)
        scale, zero = observer.calculate_qparams()
        rounded = torch.fake_quantize_per_channel_affine(weight, scale, zero.int(), 0, -127, 127)
        errors[observer] = (rounded - weight).square().sum(1)
    assert bool((errors[mine] <= errors[plain] * 1.0001).all())
    assert errors[mine][2] < 0.8 * errors[plain][2]


def test_a_weight_observer_forgets_the_weight_before():
    observer = PerChannelMSEObserver(**_symmetric())
    observer(torch.full((2, 3), 9.0))
    observer(torch.full((2, 3), 1.0))
    assert float(observer.max_val.max()) <= 1.0


@pytest.mark.parametrize("kind", HISTOGRAMS)
def test_observers_work_in_stock_qconfigs_and_copies(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
    x = torch.randn(8, 2, 6, 6)
    weight = PerChannelMSEObserver.with_args(**_symmetric())
    mapping = QConfigMapping().set_global(QConfig(kind.with_args(dtype=torch.quint8), weight))
    prepared = prepare_fx(model, mapping, (x,))
    prepared(x)
    again = copy.deepcopy(prepared)
    again.load_state_dict(prepared.state_dict())
    actual, same = (convert_to_reference_fx(m)(x) for m in (prepared, again))
    assert torch.equal(actual, same)
    assert (actual - model(x)).norm() < 0.05 * model(x).norm()


@pytest.mark.parametrize("name", OBSERVERS)
def test_mappings_take_observers_by_name(name):
    mapping = x86quant.get_default_qconfig_mapping(observer=name, weight_observer="mse")
    assert type(mapping.global_qconfig.activation()) is OBSERVERS[name]
    assert type(mapping.global_qconfig.weight()) is PerChannelMSEObserver


def test_wrong_names_are_told():
    with pytest.raises(InvalidInputError, match="observer must be one of minmax"):
        x86quant.get_default_qconfig_mapping(observer="best")
    with pytest.raises(InvalidInputError, match="weight_observer must be one of"):
        x86quant.get_default_qconfig_mapping(weight_observer="kl")


def _symmetric() -> dict[str, object]:
    return {
        "dtype": torch.qint8,
        "qscheme": torch.per_channel_symmetric,
        "quant_min": -127,
        "quant_max": 127,
    }

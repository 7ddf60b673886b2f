"""Models that return classes, masks or numbers of places are judged by how many are the same."""

from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.calling.running import compared_tensors
from x86quant.quantization.judging import place_agreement


class _Segmenter(nn.Module):
    """Returns the class of each pixel; its classes are ``close`` to each other."""

    def __init__(self, close: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1)]
        classes = nn.Conv2d(24, 5, 1)
        with torch.no_grad():
            classes.weight[1:] += close * (classes.weight[0] - classes.weight[1:])
            classes.bias[1:] += close * (classes.bias[0] - classes.bias[1:])
        self.body = nn.Sequential(*layers, nn.ReLU(), classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).argmax(1)


@pytest.fixture(scope="module")
def pictures() -> list[torch.Tensor]:
    return [torch.rand(2, 3, 24, 24, generator=torch.manual_seed(i)) for i in range(4)]


def test_noise_is_twice_the_share_that_differs() -> None:
    one = torch.randint(0, 1000, (100, 1000), generator=torch.manual_seed(0))
    other = one.clone()
    other[:5] = torch.randint(1000, 2000, (5, 1000), generator=torch.manual_seed(1))
    (exact,), (actual,) = compared_tensors({"map": one}), compared_tensors([other])
    noise = float((exact - actual).square().sum() / exact.square().sum())
    assert noise == pytest.approx(2 * 0.05, rel=0.05)
    share = place_agreement([exact], [actual])
    assert share is not None
    assert share[0] == pytest.approx(0.95, abs=0.001)
    assert share[1] == one.numel()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_places_of_both_types(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    (found,) = compared_tensors(x)
    assert found.view(4, -1).unique(dim=0).shape[0] == 2


def test_where_there_are_floats_integers_do_not_count() -> None:
    (found,) = compared_tensors(
        {"boxes": torch.ones(3), "labels": torch.ones(3, dtype=torch.int64)}
    )
    assert found.shape == (3,)


def test_a_map_of_classes_is_judged(pictures: list[torch.Tensor]) -> None:
    model = _Segmenter().eval()
    fast: Any = x86quant.quantize(model, pictures, progress=False, speed_check=False)
    summary = fast.quantization
    assert summary.integers is not None
    share, count = summary.integers
    assert count == 4 * 24 * 24  # the unseen half
    same = torch.cat([(fast(x) == model(x)).flatten() for x in pictures])
    assert share == pytest.approx(float(same.double().mean()), abs=0.01)
    assert f"of the {count} integers returned are the float model's" in str(summary)
    assert summary.to_dict()["integers"] == [share, count]
    assert len(summary.sqnr_db) == 1


def test_layers_stay_in_float_until_it_is_close(pictures: list[torch.Tensor]) -> None:
    model = _Segmenter(close=0.9).eval()
    fast: Any = x86quant.quantize(model, pictures, progress=False, speed_check=False)
    assert list(fast.quantization.float_layers) == ["body.4"]
    other = torch.rand(8, 3, 24, 24, generator=torch.manual_seed(9))
    assert float((fast(other) == model(other)).double().mean()) > 0.99


class _Rounded(nn.Module):
    """Returns numbers of ``dtype``, whose last digits rounding decides."""

    def __init__(self, dtype: torch.dtype, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(3, 16, 3)
        self.dtype, self.factor = dtype, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) * self.factor).to(self.dtype)


def test_what_rounding_decides_stays_in_float(pictures: list[torch.Tensor]) -> None:
    model = _Rounded(torch.int64, 1e5).eval()
    with pytest.warns(x86quant.X86QuantWarning, match="this is the float model"):
        x86quant.quantize(model, pictures, progress=False, speed_check=False)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_sound_and_pixels_need_not_be_the_same(
    pictures: list[torch.Tensor], dtype: torch.dtype
) -> None:
    model = _Rounded(dtype, 1e4).eval()
    fast: Any = x86quant.quantize(model, pictures, progress=False, speed_check=False)
    assert not fast.quantization.float_layers
    assert fast.quantization.integers is None
    assert fast.quantization.sqnr_db[0] > 30

"""Code that users bring: it catches errors, shares weights, is scripted, lazy or transformed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import prune

import x86quant
from tests.models import TwoLinears, quantized, rows
from x86quant.calling.call import Call
from x86quant.capture.caught_errors import errors_are_caught
from x86quant.compiled.guarded import GuardedModule
from x86quant.errors import InvalidInputError, UnsupportedError, X86QuantError, X86QuantWarning
from x86quant.quantization.static import part_search
from x86quant.quantization.tracing.tracing import Way, by_export, by_fx

DATA = [rows(16, seed=seed) for seed in range(2)]


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return ((actual - expected).norm() / expected.norm()).item() < 0.06


# --- errors that are caught ---


class Catches(TwoLinears):
    """Goes another way where sizes do not fit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(x @ self.b.weight)
        try:
            return y.view(-1, 32)
        except RuntimeError:
            return y * 2


class CatchesAll(Catches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(x @ self.b.weight)
        try:
            with torch.no_grad():
                y = y.view(-1, 32)
        except:  # noqa: E722
            y = y * 2
        return y


class Suppresses(Catches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(x @ self.b.weight)
        with contextlib.suppress(RuntimeError):
            y = y.view(-1, 32)
        return y


class CatchesWhatNoOpRaises(Catches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.b(self.a(x))
        except KeyError:
            return x
        finally:
            del x


@pytest.mark.filterwarnings("ignore:a call runs in float:x86quant.errors.X86QuantWarning")
@pytest.mark.parametrize("kind", [Catches, CatchesAll, Suppresses])
def test_code_that_catches_errors_is_right_at_other_sizes(kind: type[Catches]) -> None:
    model = kind().eval()
    with pytest.raises(UnsupportedError, match="catches errors"):
        by_fx(model, Call((rows(16),)))
    int8 = quantized(model, DATA)
    assert int8.quantization.int8_layers
    for count in (16, 7, 6, 1):
        assert int8(rows(count, seed=9)).shape == model(rows(count, seed=9)).shape


def test_errors_that_no_op_raises_may_be_caught() -> None:
    assert by_fx(CatchesWhatNoOpRaises().eval(), Call((rows(16),))).method == "torch.fx"


def asks() -> bool:
    return errors_are_caught(sys._getframe(1))


def in_a_try() -> bool:
    try:
        found = asks()
    except (ValueError, RuntimeError):
        return False
    return found


def in_a_bare_try() -> bool:
    try:
        found = asks()
    except:  # noqa: E722
        return False
    return found


def in_an_outer_try() -> bool:
    try:
        for _ in range(2):
            with contextlib.nullcontext():
                try:
                    found = asks()
                except TypeError:
                    continue
                else:
                    return found
    except Exception:
        return False
    return False


def called_in_a_try() -> bool:
    try:
        return behind_a_try()
    except RuntimeError:
        return False


def behind_a_try() -> bool:
    for number in range(2):
        try:
            if number:
                continue
        except RuntimeError:
            raise
    return asks()


def in_a_handler() -> bool:
    try:
        raise KeyError
    except Exception:
        return asks()


def before_a_finally() -> bool:
    try:
        return asks()
    finally:
        behind_a_try()


def suppressed() -> bool:
    with contextlib.suppress(RuntimeError):
        return asks()
    return False


@pytest.mark.parametrize(
    ("function", "caught"),
    [
        (in_a_try, True),
        (in_a_bare_try, True),
        (in_an_outer_try, True),
        (called_in_a_try, True),
        (suppressed, True),
        (behind_a_try, False),
        (in_a_handler, False),
        (before_a_finally, False),
    ],
)
def test_code_within_a_try_is_known(function: Callable[[], bool], caught: bool) -> None:
    def trace() -> bool:  # what calls it does not count
        return function()

    assert trace() is caught


# --- calls that the graph of a part does not hold for ---


class SeesOtherRanks(TwoLinears):
    """With one row, its layers get a tensor of another rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.detach().sum().item() > 1e9:  # no graph of the whole
            return x
        y = F.relu(self.a(x.squeeze(0)))
        return self.b(y)


def test_a_part_that_is_called_with_other_ranks_answers_by_rows() -> None:
    model = SeesOtherRanks().eval()
    int8 = quantized(model, DATA)
    for count in (1, 5):
        assert close(int8(rows(count)), model(rows(count)))
    if isinstance(int8.a, GuardedModule):
        assert not int8.a.outside


class SeesSingleSignals(SeesOtherRanks):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(4, 8, 3), nn.Conv1d(8, 4, 1)  # type: ignore[assignment]


def test_a_part_that_is_called_with_other_ranks_answers_in_float() -> None:
    model = SeesSingleSignals().eval()
    int8 = quantized(model, [torch.randn(count, 4, 16) for count in (3, 4, 2)])
    assert isinstance(int8.a, GuardedModule)
    with pytest.warns(X86QuantWarning, match="runs in float"):
        assert close(int8(rows := torch.randn(1, 4, 16)), model(rows))
    assert close(int8(rows := torch.randn(5, 4, 16)), model(rows))


class LoopsOverRows(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.b(F.relu(self.a(row))) for row in x]) / len(x)


class LoopsByItself(nn.Module):
    """Has no modules that could be graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([F.linear(row[None], self.weight)[0] for row in x])


class OnlyFunctions(nn.Module):
    """Has weights, and no layers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = (32, 16), (16, 32)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator) / 4) for shape in shapes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.weights
        return F.linear(F.relu(F.linear(x, first)), second)


@pytest.mark.parametrize("way", [by_fx, by_export])
def test_weights_without_layers_become_int8(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_search, "WAYS", {"the way": way})
    model = OnlyFunctions().eval()
    int8 = quantized(model, DATA)
    assert len(int8.quantization.int8_layers) == 2
    assert close(int8(rows(5, seed=9)), model(rows(5, seed=9)))


def test_a_loop_over_the_batch_is_int8_for_every_batch() -> None:
    model = LoopsOverRows().eval()
    int8 = quantized(model, DATA)
    assert int8.quantization.int8_layers == ("a", "b")
    assert any("16 rows alone" in note for note in int8.quantization.notes)
    for count in (1, 3, 16):
        assert close(int8(rows(count, seed=9)), model(rows(count, seed=9)))
    assert not any(m.outside for m in int8.modules() if isinstance(m, GuardedModule))


def test_a_loop_over_the_batch_is_a_graph_for_one_where_that_is_all_there_is() -> None:
    model = LoopsByItself().eval()
    int8 = quantized(model, DATA)
    assert isinstance(int8, GuardedModule)
    assert close(int8(rows(16, seed=9)), model(rows(16, seed=9)))
    with pytest.warns(X86QuantWarning, match="runs in float"):
        assert torch.equal(int8(rows(3)), model(rows(3)))


class DropsOneImage(nn.Module):
    """With one image, its second convolution gets a tensor of rank 3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.relu(self.a(x)).squeeze())


@pytest.mark.filterwarnings("ignore:a call runs in float:x86quant.errors.X86QuantWarning")
def test_a_graph_whose_ranks_depend_on_sizes_answers_for_one_image() -> None:
    model = DropsOneImage().eval()
    images = torch.randn(8, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    int8 = quantized(model, [images])
    assert int8.quantization.int8_layers
    for count in (8, 1, 3):
        assert int8(images[:count]).shape == model(images[:count]).shape
        assert close(int8(images[:count]), model(images[:count]))


# --- weights that are read, and layers that are not as usual ---


class ReturnsItsWeight(TwoLinears):
    def forward(self, x: torch.Tensor) -> Any:
        return self.b(F.relu(self.a(x))), self.a.weight


class ReadsItsWeight(TwoLinears):
    def forward(self, x: torch.Tensor) -> Any:
        return F.linear(F.relu(self.a(x)), self.a.weight.t(), self.b.bias), None


class CallsScripted(TwoLinears):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.inner(x)), None


class Pruned(TwoLinears):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.a, "weight", amount=0.5)  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class ReturnsSparse(TwoLinears):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).to_sparse(), None


class ReturnsNumbers(TwoLinears):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, y.mean().item()


class TakesCodes(TwoLinears):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.dequantize()), None


@pytest.mark.parametrize(
    "kind",
    [
        ReturnsItsWeight,
        ReadsItsWeight,
        CallsScripted,
        Pruned,
        ReturnsSparse,
        ReturnsNumbers,
        TakesCodes,
    ],
)
@pytest.mark.filterwarnings("ignore::x86quant.errors.X86QuantWarning")
def test_unusual_layers_and_results_become_int8_and_are_saved(
    kind: type[TwoLinears], tmp_path: Path
) -> None:
    def given(seed: int) -> torch.Tensor:
        if kind is not TakesCodes:
            return rows(16, seed=seed)
        return torch.quantize_per_tensor(rows(16, seed=seed), 0.05, 64, torch.quint8)

    model = kind().eval()
    int8 = quantized(model, [(given(seed),) for seed in range(2)])
    assert int8.quantization.int8_layers
    x = given(7)
    exact, found = model(x), int8(x)
    assert close(found[0].to_dense(), exact[0].to_dense())
    x86quant.save(int8, tmp_path / "net.x86q")
    try:
        loaded: Any = x86quant.load(tmp_path / "net.x86q")
    except X86QuantError:  # which says that it needs the model's class
        loaded = x86quant.load(tmp_path / "net.x86q", model=kind())
    again = loaded(x)
    assert torch.equal(again[0].to_dense(), found[0].to_dense())
    if isinstance(found[1], torch.Tensor):
        assert torch.equal(again[1], found[1])
        assert torch.equal(found[1], exact[1])


# --- what is refused in a sentence ---


class TakesGradientsOfRows(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def energy(row: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(row))).sum()

        return torch.vmap(torch.func.grad(energy))(x)


class KeepsByHook(TwoLinears):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, torch.Tensor] = {}
        self.a.register_forward_hook(lambda _m, _x, y: self.kept.__setitem__("a", y))

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, self.kept["a"]


class Lazy(TwoLinears):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.LazyLinear(32)


@pytest.mark.parametrize(
    ("kind", "error", "sentence"),
    [
        (TakesGradientsOfRows, UnsupportedError, "no part"),
        (KeepsByHook, UnsupportedError, "refers to the original"),
        (Lazy, InvalidInputError, "call the model once"),
    ],
)
def test_refused_in_a_sentence(
    kind: type[TwoLinears], error: type[Exception], sentence: str
) -> None:
    model = kind()
    if kind is KeepsByHook:
        model(rows(16))
        model.kept.clear()  # type: ignore[operator, union-attr]
    with pytest.raises(error, match=sentence):
        quantized(model, DATA)


def test_layers_within_transforms_stay_in_float() -> None:
    class Both(TakesGradientsOfRows):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(x) + super().forward(x)

    model = Both().eval()
    int8 = quantized(model, DATA, mode="dynamic")
    assert int8.quantization.int8_layers == ("c",)
    assert any("transforms" in note for note in int8.quantization.notes)
    assert close(int8(rows(16, seed=5)), model(rows(16, seed=5)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_calibration_data_are_refused() -> None:
    data = torch.nested.nested_tensor([rows(3), rows(5)])
    with pytest.raises(InvalidInputError, match="to_padded_tensor"):
        quantized(TwoLinears(), [(data,)])


class RefusesLarge(TwoLinears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        torch.normal(y, 9 - x.abs().max().expand(y.shape))
        return y


def test_the_batch_that_the_float_model_fails_on_is_named() -> None:
    large = rows(16, seed=1)
    large[0, 0] = 10.0
    with pytest.raises(InvalidInputError, match="float model fails on a calibration batch"):
        quantized(RefusesLarge(), [rows(16), large])


# --- ranges that are known ---


@pytest.mark.parametrize("function", [torch.tanh, lambda x: torch.softmax(x, -1)])
def test_results_that_use_little_of_a_known_range_keep_their_bits(function: Any) -> None:
    class Small(TwoLinears):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(32, 1000)
            self.last = nn.Linear(1000, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(function(self.wide(self.a(x)) * 1e-3))

    model = Small().eval()
    int8 = quantized(model, DATA, mode="static")
    assert min(int8.quantization.sqnr_db) > 25
    assert close(int8(rows(16, seed=5)), model(rows(16, seed=5)))

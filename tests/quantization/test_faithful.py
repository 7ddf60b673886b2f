"""What ``quantize`` traces is the model: writes in place, hooks, branches, other sizes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.calling.call import Call
from x86quant.capture import exported
from x86quant.capture.observed import observe
from x86quant.capture.proof import prove
from x86quant.capture.variants import elements, takes, variants
from x86quant.errors import UnsupportedError, X86QuantWarning
from x86quant.lowering.mutation import without_mutations
from x86quant.quantization.scheme import decide
from x86quant.quantization.static.part_search import find_parts
from x86quant.quantization.static.static_part import Ranges
from x86quant.quantization.tracing.float_results import FloatResults
from x86quant.quantization.tracing.tracing import by_fx


class Between(nn.Module):
    """Two convolutions with something between them."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self, self.a(x)))


def statement(write: Callable[[Any, torch.Tensor], object]) -> Any:
    """``write`` as a statement: what it returns is dropped."""

    def between(self: Any, y: torch.Tensor) -> torch.Tensor:
        write(self, y)
        return y

    return between


def iadd(self: Any, y: torch.Tensor) -> torch.Tensor:
    z = y
    y += 1
    return z


def on_height(self: Any, y: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(y, 2) if y.shape[2] > 40 else y


def on_batch(self: Any, y: torch.Tensor) -> torch.Tensor:
    return y * 3 if y.shape[0] > 1 else y - 2


def on_values(self: Any, y: torch.Tensor) -> torch.Tensor:
    return y * 3 if bool(y.mean() > 100) else y - 2


CASES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "clamp_": statement(lambda self, y: y.clamp_(-0.1, 0.1)),
    "F.relu in place": statement(lambda self, y: F.relu(y, inplace=True)),
    "module in place": statement(lambda self, y: self.act(y)),
    "torch.relu_": statement(lambda self, y: torch.relu_(y)),
    "mul_ add_": statement(lambda self, y: y.mul_(2.0).add_(0.3)),
    "part of it": statement(lambda self, y: y[:, :4].mul_(0.0)),
    "setitem": statement(lambda self, y: y.__setitem__((slice(None), 0), 0.0)),
    "iadd": iadd,
    "height": on_height,
    "batch": on_batch,
    "values": on_values,
}


def decibels(want: torch.Tensor, got: torch.Tensor) -> float:
    assert want.shape == got.shape
    return float(10 * torch.log10(want.square().sum() / (want - got).square().sum()))


@pytest.mark.parametrize("case", CASES)
def test_int8_does_what_the_model_does_at_other_sizes_too(case: str) -> None:
    torch.manual_seed(0)
    model = Between(CASES[case]).eval()
    int8 = x86quant.quantize(model, [torch.randn(4, 3, 32, 32) for _ in range(2)])
    for shape in ((4, 3, 32, 32), (1, 3, 32, 32), (2, 3, 64, 48)):
        x = torch.randn(shape)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", X86QuantWarning)  # where it runs in float
            want, got = model(x.clone()), int8(x.clone())
        assert decibels(want, got) > 20, (shape, int8.quantization)


@pytest.mark.parametrize("where", ["layer", "model"])
def test_hooks_are_called(where: str) -> None:
    torch.manual_seed(0)
    model = Between(lambda self, y: F.relu(y)).eval()
    if where == "layer":
        model.a.register_forward_hook(lambda module, args, y: y * 2 + 1)
    else:
        model.register_forward_pre_hook(lambda module, args: (args[0] * 0.1 + 3,))
    x = torch.randn(4, 3, 16, 16)
    int8 = x86quant.quantize(model, [x])
    with torch.no_grad():
        assert decibels(model(x), int8(x)) > 20


class OverwritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x.abs_())) + x


def test_calibration_leaves_the_data_alone_and_inputs_are_overwritten_as_before() -> None:
    """Were the data of later steps what the model made of them, no write would be seen."""
    model = OverwritesItsInput().eval()
    data = [torch.randn(8, 4, 8) for _ in range(4)]
    before = [x.clone() for x in data]
    fast = x86quant.quantize(model, data, speed_check=False)
    assert all(map(torch.equal, before, data))
    x86quant.sensitivity(model, data)
    assert all(map(torch.equal, before, data))
    x = torch.randn(2, 4, 8)
    given = x.clone()
    with torch.no_grad():
        fast(given)
    assert torch.equal(given, x.abs())


def test_a_graph_that_differs_at_another_size_is_refused() -> None:
    model, frozen = Between(on_height).eval(), Between(lambda self, y: y).eval()
    frozen.load_state_dict(model.state_dict())
    call = Call((torch.randn(2, 3, 32, 32),))
    seen = observe(model, [""], variants([call]))[""]
    with pytest.raises(UnsupportedError, match="differs from the module"):
        prove(model, by_fx(frozen, call), seen)
    seen = observe(frozen, [""], variants([call]))[""]
    prove(frozen, by_fx(frozen, call), seen)


def three_times(self: Any, y: torch.Tensor, where: bool) -> torch.Tensor:
    return y * 3 if where else y


LARGE = 112
#: Where a model is not the graph, which does nothing between the convolutions.
ELSEWHERE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "two rows": lambda self, y: three_times(self, y, y.shape[0] == 2),
    "lower": lambda self, y: three_times(self, y, y.shape[2] < LARGE // 2),
    "higher": lambda self, y: three_times(self, y, y.shape[2] > LARGE),
    "wider": lambda self, y: three_times(self, y, y.shape[3] > LARGE),
    "one column": lambda self, y: three_times(self, y, y.shape[3] == 1),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_smaller_calls_show_what_differs_at_other_sizes_than_that_of_a_large_one(
    where: str,
) -> None:
    model, frozen = Between(ELSEWHERE[where]).eval(), Between(lambda self, y: y).eval()
    frozen.load_state_dict(model.state_dict())
    call = Call((torch.randn(1, 3, LARGE, LARGE),))
    tried = variants([call], functools.partial(takes, model))
    assert sum(map(elements, tried[1:])) < 1.5 * elements(call)
    with pytest.raises(UnsupportedError, match="differs from the module"):
        prove(model, by_fx(frozen, call), observe(model, [""], tried)[""])
    prove(frozen, by_fx(frozen, call), observe(frozen, [""], tried)[""])


def test_other_sizes_are_those_of_a_large_call_where_a_smaller_one_is_refused() -> None:
    sample = [Call((torch.randn(1, 3, LARGE, LARGE),))]
    assert list(map(str, variants(sample, lambda _: False))) == list(map(str, variants(sample)))
    assert f"(2, 3, {LARGE}, {LARGE})" in map(str, variants(sample))


class AsksForSize(Between):
    """Its graph holds for large images or for small ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        for _ in range(x.shape[2] * x.shape[3] // LARGE**2):
            y = y * 2
        return y


def test_rows_are_proved_where_the_graph_holds_for_no_smaller_call() -> None:
    def with_two_rows(self: Any, y: torch.Tensor) -> torch.Tensor:
        return three_times(self, y, y.shape[0] == 2 and y.shape[3] == LARGE)

    model, frozen = AsksForSize(with_two_rows).eval(), AsksForSize(lambda self, y: y).eval()
    frozen.load_state_dict(model.state_dict())
    call = Call((torch.randn(4, 3, LARGE, LARGE),))
    tried = variants([call], functools.partial(takes, model))
    assert f"(2, 3, {LARGE}, {LARGE})" not in map(str, tried)
    with pytest.raises(UnsupportedError, match=rf"differs .* on \(2, 3, {LARGE}, {LARGE}\)"):
        prove(model, by_fx(frozen, call), observe(model, [""], tried)[""])
    int8 = x86quant.quantize(frozen, [call.args[0]], speed_check=False, progress=False)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", X86QuantWarning)  # that it runs in float
        x = call.args[0][:1]
        assert decibels(frozen(x), int8(x)) > 20


@pytest.mark.parametrize("kind", [Between, AsksForSize])
def test_writes_are_looked_for_in_the_smallest_call_that_the_graph_holds_for(
    kind: type[Between], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watched(gm: Any, inputs: Any, **options: Any) -> Any:
        seen.append(tuple(inputs[0].shape))
        return without_mutations(gm, inputs, **options)

    monkeypatch.setattr("x86quant.quantization.tracing.tracing.without_mutations", watched)
    x = torch.randn(1, 3, LARGE, LARGE)
    model = kind(iadd).eval()
    int8 = x86quant.quantize(model, [x], speed_check=False, progress=False)
    assert seen[0][2] == LARGE if kind is AsksForSize else seen[0][2] < LARGE // 2
    with torch.no_grad():
        assert decibels(model(x.clone()), int8(x.clone())) > 20


class OfAList(Between):
    """Takes images of any number, or, with a list of layers, one for each of those."""

    def forward(self, images: list[torch.Tensor]) -> list[torch.Tensor]:  # type: ignore[override]
        layers = self.between(self, images)
        return [torch.relu(one(x)) for one, x in zip(layers, images, strict=True)]


@pytest.mark.parametrize("any_number", [False, True])
def test_lists_of_any_number_run_in_int8(any_number: bool) -> None:
    def layers(model: Any, images: list[torch.Tensor]) -> list[nn.Module]:
        return [model.a] * len(images) if any_number else [model.a, model.b]

    def images(count: int) -> list[torch.Tensor]:
        channels = (3, 3, 3) if any_number else (3, 8)
        return [torch.randn(1, channels[i], 12, 12) for i in range(count)]

    model = OfAList(layers).eval()
    int8 = x86quant.quantize(model, [(images(2),)], speed_check=False, progress=False)
    is_one_graph = isinstance(int8, x86quant.compiled.guarded.GuardedModule)
    assert is_one_graph is not any_number
    for count in (1, 2, 3) if any_number else (2,):
        given = images(count)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error", X86QuantWarning)
            found, expected = int8(given), model(given)
        for one, other in zip(found, expected, strict=True):
            assert 0 < float((one - other).norm() / other.norm()) < 0.1


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1  # type: ignore[assignment]
        return self.layer(x) + self.seen


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + torch.randn_like(x)


def test_state_and_noise_are_no_graph() -> None:
    call = Call((torch.randn(2, 4),))
    for model, why in ((Counts(), "buffers"), (Noise(), "random")):
        found = find_parts(FloatResults(model.eval()), decide(model, "static"), [call], Ranges())
        assert "" not in [part.path for part in found.found]
        assert why in " ".join(found.notes)
    linear = nn.Linear(4, 4)
    (part,) = find_parts(FloatResults(linear), decide(linear, "static"), [call], Ranges()).found
    assert part.path == ""


def test_a_recurrent_layer_keeps_its_bias() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                x = torch.tanh(self.cell(x)) + x
            return self.head(x)

    torch.manual_seed(0)
    model, x = Recurrent().eval(), torch.randn(64, 16)
    int8 = x86quant.quantize(model, [x])
    assert "head" in int8.quantization.int8_layers
    assert int8.quantization.corrected <= 1
    with torch.no_grad():
        assert decibels(model(x), int8(x)) > 25


class AsksForRanks(nn.Module):
    """Spells shapes by their ranks, as much code does that takes any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).expand(-1, *x.new_zeros(4, 1).shape[:0], *self.conv(x).shape[1:])
        y = y.repeat(1, 2, *[1] * (y.dim() - 2))[:, : len(y.shape)]
        return self.head(y.flatten(2).mean(2) if y.ndim == 4 else y)


class DropsDimensions(AsksForRanks):
    """The same behind an op whose rank depends on a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.squeeze(2))


def test_ranks_are_those_of_the_example() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = AsksForRanks().eval()
    traced = by_fx(model, Call((x,)))
    assert not any("dim" in str(node.target) for node in traced.graph_module.graph.nodes)
    for other in (x, torch.randn(2, 3, 5, 9)):
        assert torch.equal(traced(other), model(other))
    with pytest.raises(UnsupportedError, match="fx"):
        by_fx(DropsDimensions().eval(), Call((x,)))


def quantized_near(model: nn.Module) -> Any:
    """``model`` in int8, within 5% of its float answers."""
    data = [(torch.randn(4, 3, 8, 8),) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", X86QuantWarning)
        int8 = x86quant.quantize(model, data, speed_check=False)
    x = data[0][0]
    with torch.no_grad():
        expected, actual = model(x), int8(x)
    assert float((expected - actual).norm() / expected.norm()) < 0.05
    return int8


def between_int8(model: nn.Module) -> Any:
    """``model``, all of it in int8, within 5% of its float answers."""
    int8 = quantized_near(model)
    assert int8.quantization.int8_layers == ("a", "b")
    return int8


def test_as_strided_reads_the_values_that_it_reads_in_float() -> None:
    # A convolution in int8 computes its channels last, and this picks elements out of memory.
    torch.manual_seed(0)
    strided = ((512, 36, 6, 1), 36)
    between_int8(Between(lambda _, y: y.as_strided((y.shape[0] - 1, 8, 6, 6), *strided)).eval())


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_out_that_is_resized_lies_as_in_float() -> None:
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        memory = torch.zeros_like(y[:, :1]).squeeze(1)
        torch.cos(y, out=memory.view(-1))  # it is resized, with the memory below it
        return y + 9 * memory.unsqueeze(1)

    torch.manual_seed(0)
    between_int8(Between(write).eval())


def test_results_lie_in_memory_as_in_float() -> None:
    for last in (torch.contiguous_format, torch.channels_last):
        model = nn.Conv2d(3, 8, 3).to(memory_format=last).eval()  # type: ignore[call-overload]
        data = [torch.randn(2, 3, size, size) for size in (8, 9)]
        int8 = x86quant.quantize(model, data, speed_check=False)
        for x in (*data, torch.randn(1, 3, 12, 5)):
            assert int8(x).stride() == model(x).stride()


class ViewsAPart(Between):
    """Asks for a view of what a part returns, which channels last do not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.b(y.view(2 * x.shape[0], 4, *y.shape[2:]).view(y.shape)) * float(y.mean() < 99)


def test_results_of_parts_can_be_viewed_as_in_float() -> None:
    torch.manual_seed(0)
    between_int8(ViewsAPart(lambda _, y: y).eval())


class BranchesOnValues(Between):
    """Of no fixed graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.b(y) if y.mean() > 0 else self.b(-y)


def test_what_branches_on_values_is_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        sizes.append(kwargs["dynamic_shapes"])
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    data = [(torch.randn(4, 3, 8, 8),) for _ in range(2)]
    model = BranchesOnValues(lambda _, y: y).eval()
    int8 = x86quant.quantize(model, data, speed_check=False)
    assert len(int8.quantization.int8_layers) == 2
    assert sizes == [None]  # with no size free, which takes least time


class LoopsOverValues(Between):
    """Unrolled, more steps than anybody waits for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.b(torch.stack([v.mean(0) for v in y.flatten()]).view(y.shape))


def test_loops_over_values_are_not_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported, "_MOST_TENSORS", 500)
    torch.manual_seed(0)
    int8 = between_int8(LoopsOverValues(lambda _, y: y).eval())
    assert "it computes more than 500 tensors" in str(int8.quantization)


class CopiesThenWrites(Between):
    """Writes in place to what is a copy, or to its original, unless channels come last already."""

    original = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        copy = y.contiguous(memory_format=torch.channels_last)
        F.elu_(y if self.original else copy, alpha=3.0)
        kept = copy if self.original else y
        return self.b(y) if y.sum() > 1e9 else kept


class Turned(nn.Conv2d):
    """Returns a view with the channels last, which int8 computes in that order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flatten(2).transpose(1, 2)


class CopiesTurned(CopiesThenWrites):
    def __init__(self, follow: Any) -> None:
        super().__init__(follow)
        self.a = Turned(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        copy = y.contiguous()
        F.elu_(y if self.original else copy, alpha=3.0)
        kept = (copy if self.original else y).transpose(1, 2).unflatten(2, (6, 6))
        return self.b(kept) if float(y.sum()) < 1e9 else kept


@pytest.mark.parametrize("original", [False, True])
def test_writes_to_a_copy_leave_the_original_alone(original: bool) -> None:
    torch.manual_seed(0)
    model = CopiesThenWrites(lambda _, y: y).eval()
    model.original = original
    assert quantized_near(model).quantization.int8_layers == ("a",)
    turned = CopiesTurned(lambda _, y: y).eval()
    turned.original = original
    assert "how its results lie in memory" in str(quantized_near(turned).quantization)


class TriesAnotherView(nn.Module):
    """Calls its head with rows of another rank where a view by sevens can be had."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 10), nn.Linear(2, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if float(y.sum()) > 1e9:
            return y
        try:
            z = y.view(-1, 7)[:, :2]
        except RuntimeError:
            z = y.view(-1, 5, 2)
        found: torch.Tensor = self.head(z)
        return found


def test_code_that_catches_errors_may_call_a_part_with_another_rank() -> None:
    torch.manual_seed(0)
    model = TriesAnotherView().eval()
    # None of the calls of quantize has 7 rows or 14: it tries 8, 1, 2 and 9.
    data = [(torch.randn(8, 16),)]
    int8 = x86quant.quantize(model, data, speed_check=False, progress=False, bias_correction=False)
    assert int8.quantization.int8_layers == ("body", "head")
    for rows in (4, 7, 14):
        x = torch.randn(rows, 16)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            found, expected = int8(x), model(x)
        assert found.shape == expected.shape
        assert float((found - expected).norm() / expected.norm()) < 0.1


class MapsAndWrites(CopiesThenWrites):
    """Torch makes tensors of numbers by ``_to_copy`` where a single value is mapped."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * torch.func.vmap(lambda one: one * 2)(y.mean((1, 2, 3))).reshape(-1, 1, 1, 1)


def test_writes_are_watched_where_functions_are_mapped() -> None:
    torch.manual_seed(0)
    model = MapsAndWrites(lambda _, y: y).eval()
    assert quantized_near(model).quantization.int8_layers == ("a",)


class Shuffled(nn.Module):
    """A channel shuffle by views, as ShuffleNet writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.first(x), self.first(x)], 1)
        b, c, h, w = x.shape
        x = x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)
        return self.second(x.chunk(2, 1)[0])


@pytest.mark.parametrize("batch", [1, 2])
def test_views_of_images_come_to_one_program(batch: int) -> None:
    """What is rounded lies as the float value does, so that the model's own views hold."""
    x = torch.randn(batch, 3, 12, 12)
    model = Shuffled().eval()
    int8 = x86quant.quantize(model, [x, x], speed_check=False, progress=False)
    assert isinstance(int8, x86quant.CompiledModule), int8.quantization
    assert not int8.float_nodes


def test_a_model_that_no_range_suits_comes_back_in_float_and_says_so() -> None:
    """Its values span ten orders of magnitude, in every layer."""

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(self.second(self.first(torch.exp(12 * x))).abs())

    torch.manual_seed(0)
    x = torch.randn(64, 32)
    with pytest.warns(X86QuantWarning, match=r"this is the float model: in int8 it has .* second"):
        int8 = x86quant.quantize(Spread().eval(), [x], mode="static", speed_check=False)
    assert not int8.quantization.int8_layers
    assert str(int8.quantization).count(" in float: ") == 1

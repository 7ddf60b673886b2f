"""``quantize`` of models of every kind: right, in float, or refused in a sentence; never wrong."""

from __future__ import annotations

import collections
import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import parametrizations

import x86quant
from x86quant.calling.call import Call
from x86quant.calling.running import run
from x86quant.compiled import CompiledModule
from x86quant.compiled.guarded import GuardedModule
from x86quant.errors import InvalidInputError, UnsupportedError, X86QuantWarning
from x86quant.forms.guard import Guard, GuardedInput
from x86quant.forms.size_conditions import parse
from x86quant.quantization import outcome as outcome_module
from x86quant.quantization import speed
from x86quant.quantization.kit import equalization

Forward = Callable[[Any, torch.Tensor], Any]


def images(count: int = 8, size: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def quantized(model: nn.Module, data: Any, **settings: Any) -> Any:
    return x86quant.quantize(model, data, **{"progress": False, **settings})


def sqnr(exact: torch.Tensor, actual: torch.Tensor) -> float:
    assert exact.shape == actual.shape
    exact, actual = exact.detach().double(), actual.detach().double()
    noise = (exact - actual).norm()
    return float("inf") if noise == 0 else float(20 * torch.log10(exact.norm() / noise))


class Net(nn.Module):
    """Two convolutions with something in between."""

    def __init__(self, between: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("mem", torch.zeros(8, 1, 1))
        self._between = (between,)
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self._between[0](self, self.a(x)))


def _clamp(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.clamp_(-0.1, 0.1)
    return x


def _relu_function(_: Any, x: torch.Tensor) -> torch.Tensor:
    F.relu(x, inplace=True)
    return x


def _relu_positional(_: Any, x: torch.Tensor) -> torch.Tensor:
    F.relu(x, True)
    return x


def _relu_layer(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.relu(x)
    return x


def _relu_layer_twice(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.relu(x)
    y = x - 0.5
    net.relu(y)
    return x + y


def _torch_relu(_: Any, x: torch.Tensor) -> torch.Tensor:
    torch.relu_(x)
    return x


def _masked_fill(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.masked_fill_(x > 0.2, 0.2)  # continuous, so that rounding cannot flip much
    return x


def _chain(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(2.0).add_(0.3)
    return x


def _slice(_: Any, x: torch.Tensor) -> torch.Tensor:
    x[:, :4].mul_(0.0)
    return x


def _set_item(_: Any, x: torch.Tensor) -> torch.Tensor:
    x[:, ::2] = 0.25
    return x


def _alias(_: Any, x: torch.Tensor) -> torch.Tensor:
    z = x
    x += 1
    return z


def _view_written(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.flatten(1)
    y.mul_(-1.0)
    return x


def _written_under_view(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.transpose(1, 2)
    x.mul_(-1.0)
    return y.transpose(1, 2)


def _read_before(_: Any, x: torch.Tensor) -> torch.Tensor:
    before = x * 3
    x.abs_()
    return x - before


def _out(_: Any, x: torch.Tensor) -> torch.Tensor:
    torch.mul(x, -2.0, out=x)
    return x


def _fill(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(x.shape)
    y.copy_(x)
    y.zero_()
    return x + y


def _copied_into(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    y.copy_(x * 2)
    return y + x


WRITES = [
    _clamp,
    _relu_function,
    _relu_positional,
    _relu_layer,
    _relu_layer_twice,
    _torch_relu,
    _masked_fill,
    _chain,
    _slice,
    _set_item,
    _alias,
    _view_written,
    _written_under_view,
    _read_before,
    _out,
    _fill,
    _copied_into,
]


@pytest.mark.parametrize("between", WRITES, ids=lambda f: f.__name__)
def test_statements_that_write_in_place_are_kept(between):
    model = Net(between)
    result = quantized(model, images())
    assert result.quantization.int8_layers
    for x in (images(1, seed=1), images(5, size=20, seed=2)):
        with torch.no_grad():
            assert sqnr(model(x.clone()), result(x.clone())) > 25


class ChangesInput(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        return self.b(self.a(x))


def test_a_model_that_changes_its_input_still_does():
    model = ChangesInput(lambda _, x: x)
    data = images()
    result = quantized(model, data)
    assert torch.equal(data, images())
    a, b = images(seed=1), images(seed=1)
    assert sqnr(model(a), result(b)) > 25
    assert torch.equal(a, b)


class Remembers(Net):
    """A buffer changes as it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        out = self.b(y + self.mem)
        self.mem.copy_(y.mean((0, 2, 3)).view(8, 1, 1))
        return out


def test_buffers_go_on_changing():
    model = Remembers(lambda _, x: x)
    result = quantized(model, images())
    assert torch.equal(result.mem, torch.zeros(8, 1, 1))
    for seed in range(3):
        assert sqnr(model(images(seed=seed)), result(images(seed=seed))) > 25
    assert sqnr(model.mem, result.mem) > 25
    assert "buffers change" in str(result.quantization)


class Branches(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if x.shape[2] > 20:
            y = F.max_pool2d(y, 2)
        if x.shape[0] > 1:
            y = y * 0.5
        return self.b(y)


def test_branches_on_sizes_are_guarded():
    model = Branches(lambda _, x: x)
    result = quantized(model, images())
    assert isinstance(result, GuardedModule)
    assert sqnr(model(images(4, size=16)), result(images(4, size=16))) > 25
    assert result.outside == 0
    for x in (images(1), images(4, size=40), images(1, size=40)):
        with pytest.warns(X86QuantWarning, match="in float") if not result.outside else _nothing():
            assert torch.equal(result(x), model(x))
    assert result.outside == 3


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class PoolsTwice(Net):
    """Halves sizes until they may be nothing, and asks for them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y = F.max_pool2d(y, 4) if y.shape[2] > 3 else y
        return self.b(y.flatten(2).transpose(1, 2).transpose(1, 2).view(y.shape))


def test_sizes_that_halve_stay_free():
    model = PoolsTwice(lambda _, x: x)
    result = quantized(model, images())
    assert isinstance(result, GuardedModule)
    for size in (16, 21, 32):
        assert sqnr(model(images(2, size=size)), result(images(2, size=size))) > 20
    assert result.outside == 0


@pytest.mark.parametrize("condition", ["__import__('os')", "s[0][0].real", "exec(s)", "s[0] == 1"])
def test_conditions_are_about_sizes_alone(condition):
    with pytest.raises(UnsupportedError, match="cannot be checked"):
        parse(condition)
    x = GuardedInput("x", torch.float32, 4)
    Guard((x,), (parse("(max(1, s[0][3] // 4)*max(1, s[0][2] // 4)) != 1"),))


def test_a_condition_that_divides_by_a_size_of_zero_does_not_hold():
    guard = Guard((GuardedInput("x", torch.float32, 2),), (parse("s[0][0] % s[0][1] == 0"),))
    assert guard.refusal([torch.zeros(4, 2)]) is None
    for shape in ((4, 3), (4, 0)):
        assert "do not meet" in guard.refusal([torch.zeros(shape)])


def test_strict_guards_raise():
    result = quantized(Branches(lambda _, x: x), images(), strict=True)
    with pytest.raises(InvalidInputError, match="does not hold for this call"):
        result(images(2, size=40))


class Resizes(Net):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.max_pool2d(self.a(x), 2)
        found = collections.OrderedDict()
        found["out"] = F.interpolate(self.b(y), size=x.shape[-2:])
        return found


def test_sizes_stay_dynamic_and_results_keep_their_class():
    model = Resizes(lambda _, x: x)
    result = quantized(model, images())
    for x in (images(1), images(2, size=20), images(3, size=9)):
        exact, actual = model(x), result(x)
        assert type(actual) is collections.OrderedDict
        assert sqnr(exact["out"], actual["out"]) > 25
    assert result.quantization.int8_layers == ("a", "b")


@dataclasses.dataclass
class Boxes:
    scores: torch.Tensor
    extra: torch.Tensor | None = None


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: Boxes(x), lambda r: [r.scores]),
        (lambda x: Pair(x, -x), list),
        (lambda x: {"a": [x, (x + 1, None)], "b": 3}, lambda r: [r["a"][0], r["a"][1][0]]),
        (lambda x: collections.OrderedDict(z=x, a=-x), lambda r: list(r.values())),
    ],
    ids=["dataclass", "namedtuple", "nested", "ordered"],
)
def test_results_of_any_structure(wrap, unwrap):
    class Wraps(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return wrap(super().forward(x))

    model = Wraps(lambda _, x: F.relu(x))
    result = quantized(model, images())
    x = images(3, seed=1)
    exact, actual = model(x), result(x)
    assert type(actual) is type(exact)
    for a, b in zip(unwrap(exact), unwrap(actual), strict=True):
        assert sqnr(a, b) > 25


class Options(Net):
    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        scale: float = 1.0,
        flip: bool = False,
    ) -> torch.Tensor:
        y = self.a(x) * scale
        if mask is not None:
            y = y * mask
        if flip:
            y = -y
        return self.b(y)


def test_optional_arguments_given_or_not():
    model = Options(lambda _, x: x)
    x, mask = images(), (images(seed=3)[:, :1] > 0).float()
    result = quantized(model, x)
    assert sqnr(model(x), result(x)) > 25
    assert sqnr(model(x), result(x=x, mask=None)) > 25
    with pytest.warns(X86QuantWarning, match="arguments"):
        assert torch.equal(model(x, mask), result(x, mask))
    assert torch.equal(model(x, scale=3.0), result(x, scale=3.0))
    assert torch.equal(model(x, flip=True), result(x, flip=True))


def test_batches_with_a_mask_and_keywords():
    model = Options(lambda _, x: x)
    x, mask = images(), (images(seed=3)[:, :1] > 0).float()
    for batch, kwargs in [
        ({"x": x, "mask": mask, "scale": 2.0}, {"mask": mask, "scale": 2.0}),
        ({"x": x, "flip": True}, {"flip": True}),
    ]:
        result = quantized(model, [batch])
        assert result.quantization.int8_layers[0] == "a"
        assert sqnr(model(x, **kwargs), result(x, **kwargs)) > 25
        assert result.outside == 0


class Nested(Net):
    def forward(self, batch: Any) -> torch.Tensor:
        first, rest = batch["image"], batch["more"]
        return self.b(F.relu(self.a(first))) + rest[0].mean()


def test_nested_inputs():
    model = Nested(lambda _, x: x)
    call = {"batch": {"image": images(), "more": [images(seed=2)]}}
    result = quantized(model, [call])
    assert sqnr(model(**call), result(**call)) > 20
    assert result.quantization.int8_layers


# --- hooks ---


def test_hooks_of_layers_run():
    model = Net(lambda _, x: F.relu(x))
    seen: list[float] = []
    model.a.register_forward_hook(lambda m, a, r: (seen.append(1), r * 0.5)[1])
    result = quantized(model, images())
    x = images(seed=1)
    exact = model(x)
    seen.clear()
    assert sqnr(exact, result(x)) > 25
    assert len(seen) == 1


def test_hooks_of_the_model_run_exactly_once():
    model = Net(lambda _, x: F.relu(x))
    seen: list[float] = []
    model.register_forward_pre_hook(lambda m, args: (seen.append("pre"), (args[0] / 3 + 1,))[1])
    model.register_forward_hook(lambda m, a, r: (seen.append("post"), r * 2)[1])
    result = quantized(model, images())
    x = images(seed=1)
    exact = model(x)
    seen.clear()
    assert sqnr(exact, result(x)) > 25
    assert seen == ["pre", "post"]


# --- wrapped and decorated models ---


def test_models_of_torch_compile_are_unwrapped():
    model = Net(lambda _, x: F.relu(x))
    result = quantized(torch.compile(model), images())
    assert isinstance(result, CompiledModule)


def test_script_modules_are_refused():
    model = torch.jit.trace(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), images())
    with pytest.raises(InvalidInputError, match="ScriptModule"):
        quantized(model, images())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_norms_of_weights_by_hooks():
    model = Net(lambda _, x: F.relu(x))
    torch.nn.utils.weight_norm(model.a)
    torch.nn.utils.spectral_norm(model.b)
    model.eval()
    result = quantized(model, images())
    assert isinstance(result, CompiledModule)
    assert sqnr(model(images(seed=1)), result(images(seed=1))) > 25
    assert len(model.a._forward_pre_hooks) == 1  # the model given is not changed


def test_parametrized_layers():
    model = Net(lambda _, x: F.relu(x))
    parametrizations.weight_norm(model.a)
    parametrizations.spectral_norm(model.b)
    model.eval()
    result = quantized(model, images())
    assert sqnr(model(images(seed=1)), result(images(seed=1))) > 25


class ReadsAttributes(Net):
    """A parent that looks at its children, as many in transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 1e6).any()):
            x = x / 2
        x = x.to(self.a.weight.dtype)
        y = self.a(x)[:, :, :: self.a.stride[0]]
        return self.b(y.to(self.b.weight.device)) + self.b.bias.mean()


def test_attributes_of_replaced_layers_can_be_read():
    model = ReadsAttributes(lambda _, x: x)
    result = quantized(model, images())
    assert set(result.quantization.int8_layers) == {"a", "b"}
    assert sqnr(model(images(seed=1)), result(images(seed=1))) > 25


# --- values ---


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


class Recurrent(nn.Module):
    """Convolutions, then a recurrent layer, then a head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.rnn = kind(8, 16, batch_first=True)
        self.head = nn.Linear(16, 5)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.conv(x)).transpose(1, 2)
        return self.head(self.rnn(y)[0])


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


def test_inner_precisions():
    model = Net(lambda _, x: x.double().exp().float() + x.half().float())
    result = quantized(model, images())
    assert sqnr(model(images(seed=1)), result(images(seed=1))) > 25


# --- data ---


class OneMapping(nn.Module):
    """Takes all of its inputs as one mapping, which it adds its result to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
        self.eval()

    def forward(self, features: dict[str, torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
        features["out"] = self.head(F.relu(self.layer(features["x"])))
        return features


def test_a_mapping_can_be_the_only_argument():
    model, x = OneMapping(), torch.randn(8, 16)
    data = [{"x": x, "mask": x > 0}, {"x": x + 1, "mask": x > 1}]
    result = quantized(model, data)
    assert set(data[0]) == {"x", "mask"}
    assert result.quantization.int8_layers
    assert sqnr(model({"x": x})["out"], result({"x": x})["out"]) > 25


class SizesItself(Net):
    """Keeps a size of its last input, as windowed attentions do."""

    window = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if min(x.shape[2:]) < self.window:
            self.window = 1
        return super().forward(x) * self.window


def test_what_a_model_keeps_is_not_left_from_trial_sizes():
    model = SizesItself(lambda _, x: F.relu(x))
    result = quantized(model, images())
    assert sqnr(model(images(seed=1)), result(images(seed=1))) > 25
    assert model.window == SizesItself.window


class InstallsHooks(Net):
    """Hooks a layer at its first call, as recent transformers do to collect hidden states."""

    def forward(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "hooked"):
            self.hooked = True
            self.a.register_forward_hook(lambda m, a, y: _FOUND.append(y))
        _FOUND.clear()
        return super().forward(x), len(_FOUND), _FOUND[0]


_FOUND: list[torch.Tensor] = []


def test_hooks_that_a_first_call_installs():
    model = InstallsHooks(lambda _, x: F.relu(x))
    result = quantized(model, images())
    for _ in range(2):
        (a, n, h), (b, m, g) = model(images(seed=1)), result(images(seed=1))
        assert n == m == 1
        assert sqnr(a, b) > 25
        assert sqnr(h, g) > 25


class Deep(nn.Module):
    """Blocks in blocks, none of which can be a graph."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.inner = Deep(depth - 1) if depth else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.layer(x))
        return y if y.isnan().any() else torch.tanh(y)


def test_the_search_for_parts_runs_a_deep_model_once_a_level():
    torch.manual_seed(0)
    model = Deep(7).eval()
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    model.layer.register_forward_hook(count)
    result = quantized(model, torch.randn(8, 8), mode="static")
    assert len(result.quantization.int8_layers) >= 7
    assert runs < 60
    assert sqnr(model(torch.ones(2, 8)), result(torch.ones(2, 8))) > 15


class Tied(nn.Module):
    """A table that is also the head's weight, behind a layer norm with outliers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.table.weight
        with torch.no_grad():
            self.norm.weight[::7] *= 60
        self.eval()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(tokens)))


@pytest.mark.parametrize("smooth", ["auto", True])
def test_smoothing_leaves_tied_weights_alone(smooth):
    model, tokens = Tied(), torch.randint(0, 50, (4, 12))
    result = quantized(model, tokens, smooth_quant=smooth)
    assert sqnr(model(tokens), result(tokens)) > 20


def test_equalization_leaves_tied_weights_alone():
    torch.manual_seed(0)
    a, b, c = (nn.Conv2d(4, 4, 1, bias=False) for _ in range(3))
    with torch.no_grad():
        a.weight[0] *= 1e3
    c.weight = a.weight
    model = nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), c).eval()
    x = torch.randn(8, 4, 6, 6)
    result = quantized(model, x, equalize=True)
    plain = quantized(model, x, equalize=False)
    assert sqnr(model(x), result(x)) > sqnr(model(x), plain(x)) - 3


@pytest.mark.filterwarnings("ignore:this is the float model")
def test_a_step_that_harms_unseen_data_is_not_taken(monkeypatch):
    def spoil(*_: Any, **__: Any) -> tuple[Any, ...]:
        scales = torch.ones(8)
        scales[0] = 1e-4  # the same function, and a useless range
        return (equalization.Equalized("", "a", "b", scales, 0.1),)

    monkeypatch.setattr(equalization, "worthwhile", spoil)
    model = Net(lambda _, x: F.relu(x))
    data = [images(seed=seed) for seed in range(4)]
    assert quantized(model, data).quantization.equalized == ()
    assert len(quantized(model, data, equalize=True).quantization.equalized) == 1


def test_batches_of_a_wrong_shape_are_named():
    with pytest.raises(InvalidInputError, match="fails on the first calibration batch"):
        quantized(Net(lambda _, x: x), torch.randn(4, 5, 8, 8))


def test_later_batches_that_the_model_does_not_take_are_named():
    data = [torch.randn(4, 3, 8, 8)] * 3 + [torch.randn(4, 5, 8, 8)]
    with pytest.raises(InvalidInputError, match=r"fails on a calibration batch, of .*4, 5, 8, 8"):
        quantized(Net(lambda _, x: x), data)


def test_data_of_zeros_is_warned_about():
    with pytest.warns(X86QuantWarning, match="zero"):
        quantized(Net(lambda _, x: x), torch.zeros(4, 3, 8, 8))


# --- manners ---


def test_random_numbers_are_left_alone():
    model = Net(_clamp)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    quantized(model, images())
    assert torch.equal(torch.rand(4), expected)


def test_threads_quantize_side_by_side():
    results: list[Any] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            results.append(quantized(Net(_clamp), images(seed=seed)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(results) == 3


def test_copies_of_guarded_modules_work():
    model = Branches(lambda _, x: x)
    result = copy.deepcopy(quantized(model, images()))
    x = images(4)
    assert sqnr(model(x), result(x)) > 25


# --- accuracy and speed ---


class Fragile(nn.Module):
    """Its first layer makes one huge channel, beside which the others vanish."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 16)
        with torch.no_grad():
            self.a.weight[0] *= 1e5
            self.b.weight[:, 0] = 0
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.sin(self.a(x)) + self.a(x))


@pytest.mark.filterwarnings("ignore:this is the float model")
def test_bad_layers_go_back_to_float():
    model = Fragile()
    x = torch.randn(64, 8)
    result = quantized(model, x)
    assert sqnr(model(x), result(x)) > 10
    assert result.quantization.float_layers
    assert min(result.quantization.sqnr_db, default=200) > 10  # none if all of it is float


@pytest.mark.usefixtures("any_accuracy")
def test_what_rounding_makes_undefined_goes_back_to_float():
    class Signs(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y / y.abs()

    model, x = Signs(lambda _, x: F.relu(x)), images()
    result = quantized(model, x)
    assert sqnr(model(x), result(x)) > 10  # codes that are zero would make it NaN
    assert "b" in result.quantization.float_layers


def test_the_summary_tells_the_noise_of_the_whole():
    result = quantized(Net(lambda _, x: F.relu(x)), images())
    (db,) = result.quantization.sqnr_db
    assert 25 < db < 80
    assert "dB against float" in str(result.quantization)


def test_what_is_slower_stays_in_float(monkeypatch):
    monkeypatch.setattr(speed, "slower", lambda *_, **__: 1.5)
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    model = Net(lambda _, x: F.relu(x))
    result = quantized(model, images())
    assert torch.equal(result(images()), model(images()))
    assert result.quantization.int8_layers == ()
    assert "1.50 times" in str(result.quantization)
    kept = quantized(model, images(), speed_check=False)
    assert kept.quantization.int8_layers == ("a", "b")


def test_what_is_slower_on_one_row_stays_in_float(monkeypatch):
    def slower(_: Any, __: Any, call: Any, **___: Any) -> float | None:
        return 1.5 if call.args[0].shape[0] == 1 else None

    monkeypatch.setattr(speed, "slower", slower)
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    result = quantized(Net(lambda _, x: F.relu(x)), images())
    assert result.quantization.int8_layers == ()
    assert "1.50 times as long as float on (1, 3, 12, 12)" in str(result.quantization)


def test_sizes_that_run_in_float_are_not_timed(monkeypatch):
    timed: list[int] = []

    def slower(_: Any, __: Any, call: Any, **___: Any) -> None:
        timed.append(call.args[0].shape[0])

    monkeypatch.setattr(speed, "slower", slower)
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    quantized(Net(lambda _, x: x * 2 if x.shape[0] > 1 else F.relu(x)), images())
    assert timed == [8]


@pytest.mark.parametrize(
    ("exact", "int8", "ratio"),
    [
        ([1.0] * 5, [1.3] * 5, 1.3),
        ([1.0] * 5, [1.05] * 5, None),
        ([1.0] * 5, [9.0, 9.0, 1.0, 9.0, 9.0], None),  # as fast once: the rest is noise
        ([1.0, 9.0, 1.0, 9.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0], None),
        ([1.0] * 30, [1.05] * 30, 1.05),
        ([1.0] * 30, [1.01] * 30, None),
        ([1.0] * 30, [1.05] * 18 + [0.95] * 12, None),
        ([1.0] * 10 + [9.0] * 20, [1.2] * 10 + [9.5] * 20, 1.2),  # other work at half of the time
        ([1.0], [1.3], None),  # too few rounds
        ([1.0], [2.0], 2.0),
    ],
)
def test_only_a_clear_loss_counts(exact, int8, ratio):
    assert speed.verdict(exact, int8) == ratio


def test_times_are_taken_in_turns_and_a_loss_twice(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(speed, "perf_counter", lambda: clock[0])
    order = []

    def taking(name: str, seconds: float) -> Callable[[torch.Tensor], None]:
        def function(_: torch.Tensor) -> None:
            order.append(name)
            clock[0] += seconds

        return function

    call = speed.Call((torch.zeros(4),))
    assert speed.slower(taking("float", 0.01), taking("int8", 0.02), call, 0.1) == pytest.approx(2)
    assert order[:4] == ["float", "int8", "float", "int8"]
    assert clock[0] < 0.3
    order.clear()
    assert speed.slower(taking("float", 0.02), taking("int8", 0.01), call, 0.1) is None
    assert len(order) == 8


def test_parts_that_are_slower_stay_in_float(monkeypatch):
    slow: Any = None
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    monkeypatch.setattr(speed, "slower", lambda exact, *_, **__: 3.0 if exact is slow else None)
    model = Recurrent(nn.LSTM)
    prepared_slow: list[Any] = []
    by_part = speed.by_part

    def watched(exact: nn.Module, int8: nn.Module, call: Any, paths: Any) -> Any:
        nonlocal slow
        slow = exact.get_submodule("head")
        prepared_slow.extend(paths)
        return by_part(exact, int8, call, paths)

    monkeypatch.setattr(speed, "by_part", watched)
    result = quantized(model, [torch.randn(4, 4, 10)])
    assert "head" in prepared_slow
    assert "conv" in result.quantization.int8_layers
    assert "3.00 times" in result.quantization.float_layers["head"]


@pytest.mark.parametrize("parts_lose", [True, False])
def test_where_parts_lose_the_whole_must_not_lose_at_all(parts_lose, monkeypatch):
    """All parts of a model may lose, and the whole so little that noise hides it."""
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    monkeypatch.setattr(
        speed, "by_part", lambda *_: dict.fromkeys(_[3], 1.3 if parts_lose else None)
    )
    monkeypatch.setattr(speed, "slower", lambda *_, in_doubt=False: 1.01 if in_doubt else None)
    result = quantized(Recurrent(nn.LSTM), [torch.randn(4, 4, 10)])
    assert bool(result.quantization.int8_layers) is not parts_lose


def test_batches_of_one_sample_give_one_graph_of_what_only_export_can_trace():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(12, 4, 1)
            self.act = nn.SiLU()

        def forward(self, x):
            parts = list(self.act(self.a(x)).chunk(2, 1))  # torch.fx cannot tell how many
            parts.append(parts[-1].relu())
            return self.b(torch.cat(parts, 1))

    model = Split().eval()
    result = quantized(model, [torch.randn(1, 3, 8, 8) for _ in range(4)])
    assert isinstance(result, GuardedModule)
    assert result.quantization.traced_by == {"": "torch.export"}
    for rows in (1, 3):
        x = torch.randn(rows, 3, 8, 8)
        assert sqnr(model(x), result(x)) > 25


def test_any_loss_that_is_measured_counts_in_doubt():
    exact, int8 = [1.0] * 30, [1.01] * 30
    assert speed.verdict(exact, int8) is None
    assert speed.verdict(exact, int8, speed._BOUNDS_IN_DOUBT) == 1.01
    assert speed.verdict(exact, [0.99] * 30, speed._BOUNDS_IN_DOUBT) is None


# --- nothing runs past a guard ---


def test_guarded_modules_are_not_traced_as_the_float_model():
    result = quantized(Branches(lambda _, x: x), images())
    assert isinstance(result, GuardedModule)
    with pytest.raises(torch.fx.proxy.TraceError, match="GuardedModule"):
        torch.fx.symbolic_trace(result)


def test_nested_tensors_are_refused_in_a_sentence():
    rows = [torch.randn(3, 4), torch.randn(5, 4)]
    batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(InvalidInputError, match="to_padded_tensor"):
        x86quant.quantize(nn.Linear(4, 4), [batch], progress=False)


class Tokens(nn.Module):
    """Marks padding with huge values, which nobody reads."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x, attention_mask):
        return self.a(x) * torch.where(attention_mask.bool(), 1.0, 1e4)[..., None]


@pytest.mark.parametrize("by_name", [True, False])
def test_noise_of_padded_tokens_does_not_count(by_name, monkeypatch):
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[:, 4:] = 0
    x = torch.randn(4, 6, 8)
    batch = {"x": x, "attention_mask": mask} if by_name else (x, mask)
    result = quantized(Tokens(), [batch, batch], mode="dynamic")
    call = Call((), batch) if by_name else Call(batch)
    found = run(result, call)
    wrong = found.clone()
    wrong[:, 4:] = 0
    seen: list[float] = []

    class Prepared:
        reference = Tokens()

        class exact:  # noqa: N801
            @staticmethod
            def of(call):
                return found

    for answer in (wrong, -found):
        monkeypatch.setattr(outcome_module, "_result", lambda *_, answer=answer: answer)
        seen += outcome_module.sqnrs(Prepared(), result, [call])
    assert seen[0] == 200.0
    assert seen[1] < 0


def test_a_metric_that_gives_no_number_is_refused():
    with pytest.raises(InvalidInputError, match="metric of the float model is a str"):
        quantized(Net(lambda _, x: F.relu(x)), images(), metric=lambda _: "good")


def test_why_there_is_no_graph_is_said_in_words() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return self.b(2 * y if y.mean() > 0 else y)

    data = [torch.randn(2, 3, 9, 9) for _ in range(2)]
    int8 = x86quant.quantize(Chooses().eval(), data, speed_check=False, progress=False)
    assert int8.quantization.notes[0] == (
        "the whole cannot be one graph: torch.fx cannot trace it (its code goes one way or another "
        "by values of tensors); nor can torch.export (its code goes one way or another by what is "
        "computed)"
    )


@pytest.mark.parametrize("mode", ["auto", "dynamic", "weight_only"])
def test_bits_of_a_table_that_is_all_there_is_are_refused_with_what_to_do(mode: Any) -> None:
    tokens = [torch.randint(50, (4, 8)) for _ in range(2)]
    with pytest.raises(
        UnsupportedError, match=r"Embedding has no weights but its tables'.*weight_only"
    ):
        x86quant.quantize(nn.Embedding(50, 64), tokens, mode=mode, embedding_bits=8, progress=False)

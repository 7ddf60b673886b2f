"""Models that keep state, fail once rounded, or call what no file can hold."""

from __future__ import annotations

import collections
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import x86quant
from tests.models import quantized, rows, sqnr
from x86quant.calling.call import Call
from x86quant.calling.running import tensors_in
from x86quant.errors import UnsupportedError, X86QuantWarning
from x86quant.quantization.tracing.tracing import by_export


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)


class Remembers(Net):
    """Adds what it computed last."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(F.relu(self.a(x)))
        if self.last is not None:
            y = y + self.last
        self.last = y
        return y


def test_what_keeps_state_is_not_saved_as_a_graph(tmp_path: Path) -> None:
    int8 = quantized(Remembers(), [rows()])
    with pytest.warns(X86QuantWarning, match="keeps something else after each call"):
        x86quant.save(int8, tmp_path / "net.x86q")
    loaded = x86quant.load(tmp_path / "net.x86q", model=Remembers())
    for seed in (1, 2, 3):
        assert torch.equal(loaded(rows(seed=seed)), int8(rows(seed=seed)))


class BeginsAnew(Net):
    """Sets what it keeps to what it is at each call, and fills it where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.sizes: dict[str, tuple[int, list[int]]] = {}
        self.keeps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept, self.sizes = [], {"all": (2, [3])}
        y: torch.Tensor = self.b(F.relu(self.a(x)))
        if self.keeps:
            self.kept.append(y)
            self.sizes = {"all": (2, [3, len(y)])}
        return y


def test_attributes_that_are_set_to_what_they_are_leave_one_graph() -> None:
    model = BeginsAnew().eval()
    model.sizes = {"all": (2, [3])}
    made = x86quant.quantize(model, [rows(8, seed=i) for i in range(2)], progress=False)
    assert isinstance(made, x86quant.CompiledModule)
    assert made.quantization.traced_by == {"": "torch.fx"}
    model.keeps = True
    made = x86quant.quantize(model, [rows(8, seed=i) for i in range(2)], progress=False)
    assert not isinstance(made, x86quant.CompiledModule)
    made(rows(8))
    assert len(made.kept) == 1


class Counts(Net):
    """Its first calls, by a number that is neither a parameter nor a buffer, are different."""

    def __init__(self) -> None:
        super().__init__()
        self.warm = False

    def forward(self, x: Any) -> Any:
        if not self.warm:
            self.warm = True
            with torch.no_grad():
                self.a.weight *= 0.5
        if float(x.sum()) > 1e9:  # so that its class is needed
            return x
        return self.b(F.relu(self.a(x)))


def test_numbers_among_attributes_are_saved(tmp_path: Path) -> None:
    int8 = quantized(Counts(), [rows()], mode="dynamic")
    with pytest.warns(X86QuantWarning, match="not its code"):
        x86quant.save(int8, tmp_path / "net.x86q")
    loaded = x86quant.load(tmp_path / "net.x86q", model=Counts())
    assert torch.equal(loaded(rows(seed=1)), int8(rows(seed=1)))


class Asserts(Net):
    """Does not take what rounding makes of a result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            exact = F.linear(x, self.a.weight, self.a.bias)
        y = self.a(x)
        if not torch.allclose(y, exact, atol=1e-4):
            raise ValueError("far off")
        return self.b(F.relu(y))


def test_what_fails_once_rounded_stays_in_float() -> None:
    with pytest.warns(X86QuantWarning, match="a stays in float"):
        int8 = quantized(Asserts(), [rows(seed=n) for n in range(4)])
    assert int8.quantization.int8_layers == ("b",)
    int8(rows(seed=9))


class Gradient(Net):
    """Returns the gradient of what it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            return torch.autograd.grad(x.sum() + self.b(F.relu(self.a(x))).sum(), x)[0]


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_layers_that_gradients_go_through_stay_in_float(mode: str) -> None:
    with pytest.raises(UnsupportedError):
        quantized(Gradient(), [rows()], mode=mode)


@torch.library.custom_op("x86quant_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """An op that no file may call."""
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class CallsOwnOp(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.relu(twice(self.a(x))))


def test_what_no_file_can_hold_is_left_between_graphs(tmp_path: Path) -> None:
    int8 = quantized(CallsOwnOp(), [rows()])
    assert set(int8.quantization.traced_by) == {"a", "b"}
    with pytest.warns(X86QuantWarning, match="not its code"):
        x86quant.save(int8, tmp_path / "net.x86q")
    loaded = x86quant.load(tmp_path / "net.x86q", model=CallsOwnOp())
    assert torch.equal(loaded(rows(seed=1)), int8(rows(seed=1)))


class Box:
    """A class of the user's own, which can be looked into by no one."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Boxed(Net):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.b(F.relu(self.a(x)))
        return {"y": y, "box": Box(y)}


def test_noise_is_known_beside_objects_that_cannot_be_looked_into() -> None:
    int8 = quantized(Boxed(), [rows()])
    assert len(int8.quantization.sqnr_db) == 1
    assert int8.quantization.sqnr_db[0] > 20


class OwnMapping(collections.OrderedDict[str, Any]):
    """A result that is a mapping of the user's own."""


class Slotted:
    """A result with slots."""

    __slots__ = ("logits", "normal")

    def __init__(self, logits: Any, normal: Any) -> None:
        self.logits, self.normal = logits, [normal]


class Plain:
    """A result with attributes, of which one leads back to it."""

    def __init__(self, logits: Any, normal: Any) -> None:
        self.logits, self.normal, self.itself = logits, {"normal": normal}, self


class ReturnsItsNorm(nn.Module):
    """Returns what its layer norm gives, too."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.head, self.kind = nn.LayerNorm(16), nn.Linear(16, 4), kind
        nn.init.normal_(self.norm.weight, 1.0, 0.5)
        with torch.no_grad():
            self.norm.weight[3] *= 30.0

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x)
        z = self.head(y)
        return self.kind(logits=z, normal=y)


@pytest.mark.parametrize("kind", [OwnMapping, Slotted, Plain])
def test_results_of_the_users_own_class_are_looked_into(kind: Any) -> None:
    model = ReturnsItsNorm(kind).eval()
    int8 = quantized(model, [rows(seed=n) for n in range(4)], mode="dynamic", smooth_quant=True)
    assert len(int8.quantization.sqnr_db) == 2
    x = rows(seed=9)
    for actual, expected in zip(*map(tensors_in, (int8(x), model(x))), strict=True):
        assert sqnr(expected, actual) > 20


class KeepsItsNorm(ReturnsItsNorm):
    """Keeps what its layer norm gave, for who asks later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.norm(x)
        return self.head(self.seen)


def test_smoothing_leaves_what_a_model_keeps() -> None:
    model = KeepsItsNorm(None).eval()
    int8 = quantized(model, [rows(seed=n) for n in range(4)], mode="dynamic", smooth_quant=True)
    for one in (model, int8):
        one(rows(seed=9))
    torch.testing.assert_close(int8.seen, model.seen)


class ReplacesForward(Net):
    """As wrappers of models do it that move weights at each call."""

    def __init__(self) -> None:
        super().__init__()
        before = self.a.forward
        vars(self.a)["forward"] = lambda x: before(x) * 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.relu(self.a(x)))


def test_a_layer_whose_forward_was_replaced_stays_in_float() -> None:
    model = ReplacesForward().eval()
    int8 = quantized(model, [rows(seed=n) for n in range(4)])
    assert int8.quantization.int8_layers == ("b",)
    assert any("forward of a was replaced" in note for note in int8.quantization.notes)
    assert sqnr(model(rows(seed=9)), int8(rows(seed=9))) > 25


class Tells(Net):
    """Tells what it thinks of rows that it has chosen."""

    def forward(self, x: torch.Tensor) -> str:
        return str(int(self.b(F.relu(self.a(x[x.argmax(0)]))).argmax()))


def test_a_result_without_tensors_is_said_not_to_be_judged() -> None:
    int8 = quantized(Tells(), [rows(seed=n) for n in range(4)])
    assert not int8.quantization.sqnr_db
    assert any("no tensors to compare" in note for note in int8.quantization.notes)


class LongTail(Net):
    """Goes on in float for long, and joins what it takes apart at each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        for _ in range(200):
            x = x - 0.01 * torch.erfinv(x.clamp(-0.5, 0.5))
        return x


def test_a_long_tail_in_float_is_one_graph() -> None:
    int8 = quantized(LongTail(), [rows(seed=n) for n in range(4)])
    assert list(int8.quantization.traced_by) == [""]
    assert min(int8.quantization.sqnr_db) > 25


class ViewsResults(nn.Module):
    """Views what a pool makes, which torch computes otherwise when it is watched."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Conv2d(4, 4, 1, groups=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).flatten(2)
        if float(x.detach().sum()) < 1e9:  # so that it is no graph
            x.square_()
        y = F.max_pool1d(F.elu(x), 3, 1, 1)
        return y.view(y.size(0), -1)


def test_results_of_parts_lie_as_in_float() -> None:
    x = torch.randn(16, 4, 1, 5, generator=torch.Generator().manual_seed(0))
    model = ViewsResults()
    int8 = quantized(model, [x])
    assert int8.quantization.int8_layers == ("a",)
    assert torch.allclose(int8(x), model(x), atol=0.1)


class Flexible(nn.Module):
    """Attention that compiles itself, in eager mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens that are far away count less."""
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - (i - j).abs() * 0.1)
        return self.out(y.transpose(1, 2).flatten(2))


class Chooses(nn.Module):
    """A branch as a higher-order operator."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One of two sides."""
        y = self.a(x)
        chosen: torch.Tensor = torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 1.5, (y,))
        return self.b(chosen.relu())


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("model", [Flexible, Chooses])
def test_what_compiles_itself_runs_while_it_is_watched_and_after(model: type[nn.Module]) -> None:
    torch._dynamo.reset()
    net = model().eval()
    int8 = x86quant.quantize(
        net, [torch.randn(4, 16, 32) for _ in range(3)], progress=False, speed_check=False
    )
    assert len(int8.quantization.int8_layers) == 2
    for x in (torch.randn(4, 16, 32), torch.randn(1, 8, 32)):
        with torch.no_grad():
            assert sqnr(net(x), int8(x)) > 20


class Resizes(nn.Module):
    """Gives a tensor that has views another shape, which torch allows with a warning."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A deviation in the place of all it was computed of."""
        y = self.a(x)
        view = y.tanh_().unbind(1)[1]
        torch.std(view, dim=[-1], keepdim=True, out=y)
        return self.b(y)


def test_what_resizes_a_tensor_is_not_given_to_export() -> None:
    with pytest.raises(UnsupportedError, match="another shape"):  # torch ends the process
        by_export(Resizes().eval(), Call((torch.randn(4, 3, 8),)))


class FromTo(nn.Module):
    """A layer that says where its input comes from, as a description of a network does."""

    def __init__(self, source: int) -> None:
        super().__init__()
        self.f, self.conv = source, nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).relu()


class ByPlaces(nn.Module):
    """Static parts, whose places its own code reads, before a transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList([FromTo(0), FromTo(0), FromTo(2)])
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = [x]
        for stage in self.stages:
            known.append(stage(known[stage.f]))
        return self.mix(known[-1].flatten(2).transpose(1, 2))  # type: ignore[no-any-return]


def test_code_around_parts_may_read_their_numbers(tmp_path: Path) -> None:
    data = [torch.randn(2, 8, 6, 6) for _ in range(2)]
    made = quantized(ByPlaces(), data, fuse_blocks=False)
    assert len(made.quantization.traced_by) > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", X86QuantWarning)  # that its class is needed
        x86quant.save(made, tmp_path / "made", example_inputs=(data[0],))
    assert torch.equal(x86quant.load(tmp_path / "made")(data[1]), made(data[1]))

"""The one call: any traceable model, any form of data, nothing changed, errors that say what."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import x86quant
from x86quant.compiled import CompiledModule
from x86quant.dynamic import DynamicLinear, DynamicMultiheadAttention, WeightOnlyLinear
from x86quant.errors import InvalidInputError, UnsupportedError, X86QuantWarning
from x86quant.quantization import statistics
from x86quant.quantization.preparing import prepare
from x86quant.quantization.scheme import decide
from x86quant.quantization.settings import Settings
from x86quant.quantization.static.observation import int8_codes
from x86quant.quantization.tracing.tracing import fold_batch_norms
from x86quant.terminal.progress import counted


class ConvNet(nn.Module):
    """conv-bn-relu, a residual conv, a pool, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.classify = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.second(x) + x)
        return self.classify(x.mean((2, 3)))


class Branching(ConvNet):
    """The rows decide, which torch.fx cannot trace and torch.export can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] * x.shape[1] < 3:
            raise ValueError("three channels")
        return super().forward(x.reshape(x.shape[0], 3, x.shape[2], x.shape[3]))


class Deciding(nn.Module):
    """A value decides, which neither can trace; what is around can be."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        if bool((x > 1e6).any()):
            x = x / 2
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """A transformer block with pre-norm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Tokens in, classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.block = Block()
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.block(self.embed(x)).mean(1))


class Vision(nn.Module):
    """Convolutions, then a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 4, stride=4), nn.BatchNorm2d(16), nn.ReLU())
        self.block = Block()
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def images(count: int = 32, size: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def sqnr(exact: torch.Tensor, actual: torch.Tensor) -> float:
    exact, actual = exact.detach(), actual.detach()
    return float(20 * torch.log10(exact.norm() / (exact - actual).norm()))


@pytest.fixture(scope="module")
def conv_net() -> nn.Module:
    return seeded(ConvNet)


@pytest.fixture(scope="module")
def quantized(conv_net: nn.Module) -> nn.Module:
    return x86quant.quantize(conv_net, images())


def test_a_convolutional_model_becomes_one_int8_graph(conv_net, quantized):
    assert isinstance(quantized, CompiledModule)
    assert quantized.float_nodes == ()
    x = images(seed=1)
    assert sqnr(conv_net(x), quantized(x)) > 30
    assert quantized(images(1)).shape == (1, 5)
    assert quantized.quantization.int8_layers == ("first", "second", "relu_1", "classify")


def test_repr_tells_what_happened(quantized):
    text = repr(quantized)
    assert "static int8" in text
    assert "observer mse" in text
    assert "traced by torch.fx" in text


def test_the_float_model_is_not_changed(conv_net):
    model = copy.deepcopy(conv_net).train()
    model.norm.eval()
    before = copy.deepcopy(model.state_dict())
    x86quant.quantize(model, images(), equalize=True, metric=lambda m: float(m(images(2)).sum()))
    assert model.training
    assert not model.norm.training
    assert not hasattr(model, "quantization")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("form", ["tensor", "batches", "pairs", "loader", "generator", "mappings"])
def test_every_form_of_calibration_data_gives_the_same_model(conv_net, quantized, form):
    x = images()
    forms = {
        "tensor": x,
        "batches": [x[:20], x[20:]],
        "pairs": [(x[:20], torch.zeros(20)), [x[20:], torch.zeros(12)]],
        "loader": DataLoader(TensorDataset(x, torch.zeros(32)), batch_size=8),
        "generator": (piece for piece in x.split(8)),
        "mappings": [{"x": x, "labels": torch.zeros(32)}],
    }
    plain = {"bias_correction": False, "weight_observer": "minmax"}  # not fitted to some of it
    model = x86quant.quantize(conv_net, forms[form], **plain)
    expected = x86quant.quantize(conv_net, x, **plain)
    assert torch.equal(model(x), expected(x))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "is empty"),
        (iter(()), "is empty"),
        (torch.zeros(0, 3, 4, 4), "no samples"),
        (3, "not int"),
        ("images", "not str"),
        ([3.5], "batch 0 is float"),
        ([torch.full((2, 3, 8, 8), float("nan"))], "batch 0 holds NaN"),
        (None, "needs calibration data"),
    ],
)
def test_bad_calibration_data_is_named(conv_net, data, message):
    with pytest.raises(InvalidInputError, match=message):
        x86quant.quantize(conv_net, data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fast"}, "mode must be"),
        ({"observer": "best"}, "observer must be"),
        ({"equalize": 1}, "equalize must be"),
        ({"max_drop": 0.1}, "needs a metric"),
        ({"metric": len, "max_drop": -1}, "negative"),
        ({"metric": lambda _: float("nan")}, "metric of the float model"),
        ({"float_layers": ["secnd"]}, "did you mean second"),
        ({"activation_bits": 9}, "7 or 8"),
    ],
)
def test_bad_arguments_are_named(conv_net, arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        x86quant.quantize(conv_net, images(4), **arguments)


def test_bad_models_are_named(conv_net):
    with pytest.raises(InvalidInputError, match=r"an nn\.Module, not function"):
        x86quant.quantize(lambda x: x, images(4))
    broken = copy.deepcopy(conv_net)
    with torch.no_grad():
        broken.second.weight[0] = float("nan")
    with pytest.raises(InvalidInputError, match=r"second\.weight holds NaN"):
        x86quant.quantize(broken, images(4))
    with pytest.raises(InvalidInputError, match="quantized already"):
        x86quant.quantize(x86quant.quantize(seeded(Encoder), None), None)
    with pytest.raises(UnsupportedError, match="no layer"):
        x86quant.quantize(nn.Sequential(nn.ReLU()), None, mode="dynamic")


class TwoInputs(nn.Module):
    """Two images in, two results out, one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(
        self, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = F.relu(self.first(a)), F.relu(self.first(b))
        return self.second(a + b), a * b


def test_several_inputs_results_and_a_layer_used_twice():
    model = seeded(TwoInputs)
    a, b = images(), images(seed=1)
    result = x86quant.quantize(model, [(a, b, torch.zeros(32))])
    for exact, actual in zip(model(a, b), result(a, b), strict=True):
        assert sqnr(exact, actual) > 30


def test_torchs_own_transformer_layers_are_seen_through():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(8, 5, 16)
    result = x86quant.quantize(model, x)
    assert len(result.quantization.int8_layers) == 6
    assert len(result.quantization.notes) == 0
    assert sqnr(model(x), result(x)) > 25


class ReadsWeights(nn.Module):
    """Uses a linear's weight without calling the linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.read, self.called = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(self.norm(x) @ self.read.weight.t())


def test_linears_that_are_never_called_stay_in_float():
    result = x86quant.quantize(seeded(ReadsWeights), torch.randn(4, 6))
    assert result.quantization.int8_layers == ("called",)
    assert "instead of calling them: read" in result.quantization.notes[0]
    assert result(torch.randn(2, 6)).shape == (2, 6)


def test_layers_asked_for_stay_in_float(conv_net):
    model = x86quant.quantize(conv_net, images(), float_layers=["second"])
    assert [node.layer for node in model.float_nodes] == ["second"]
    assert model.quantization.float_layers == {"second": "as asked"}
    by_class = x86quant.quantize(conv_net, images(), float_layers=[nn.Conv2d])
    assert set(by_class.quantization.float_layers) == {"first", "second"}


def test_weights_are_rounded_once(conv_net, monkeypatch):
    rounded = []

    def watched(weight, observer):
        rounded.append(weight)
        return int8_codes(weight, observer)

    monkeypatch.setattr("x86quant.quantization.static.conversion.int8_codes", watched)
    calls = [images(seed=seed) for seed in range(4)]
    prepared = prepare(conv_net, calls, Settings(progress=False, equalize=False))
    (part,) = prepared.parts
    part.build(["classify"])
    with prepared.simulated(list(prepared.layers)) as model:
        model(*prepared.sample[0].args)
    assert rounded
    assert len({id(weight) for weight in rounded}) == len(rounded)


def test_containers_keep_all_their_layers_in_float():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Conv2d(4, 4, 3)).eval()
    result = x86quant.quantize(model, images(4), float_layers=["0"])
    assert set(result.quantization.float_layers) == {"0.0"}


def test_export_takes_over_where_fx_fails():
    model = seeded(Branching)
    result = x86quant.quantize(model, images())
    assert result.quantization.traced_by == {"": "torch.export"}
    assert "torch.fx cannot trace" in str(result.quantization)
    x = images(5, seed=1)
    assert sqnr(model(x), result(x)) > 30
    assert {node.op for node in result.compiled.float_nodes} == set()  # of the float input
    expected = x86quant.quantize(seeded(ConvNet), images())(x)
    assert sqnr(expected, result(x)) > 35


def test_an_export_from_one_sample_takes_batches():
    model = seeded(Branching)
    result = x86quant.quantize(model, [images(1), images(1, seed=2)])
    assert result(images(7)).shape == (7, 5)


def test_parts_are_quantized_where_the_whole_cannot_be_traced(capfd):
    model = seeded(Deciding)
    result = x86quant.quantize(model, images())
    assert capfd.readouterr().err == ""
    assert isinstance(result, Deciding)
    assert isinstance(result.features, CompiledModule)
    assert isinstance(result.head, CompiledModule)
    assert "cannot be one graph" in str(result.quantization)
    assert result.quantization.int8_layers == ("features.0", "head")
    x = images(seed=1)
    assert sqnr(model(x), result(x)) > 30


def test_float_layers_within_parts():
    result = x86quant.quantize(seeded(Deciding), images(), float_layers=["head"])
    assert isinstance(result.head, nn.Linear)
    assert isinstance(result.features, CompiledModule)


def test_transformers_are_dynamic():
    model = seeded(Encoder)
    x = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(0))
    result = x86quant.quantize(model, x)
    assert result.quantization.mode == "dynamic"
    assert isinstance(result.block.up, DynamicLinear)
    assert isinstance(result.block.attention, DynamicMultiheadAttention)
    assert sqnr(model(x), result(x)) > 30


def test_transformers_need_no_data():
    result = x86quant.quantize(seeded(Encoder), None, float_layers=["head"])
    assert isinstance(result.block.up, DynamicLinear)
    assert type(result.head) is nn.Linear


def test_convolutions_before_a_transformer_are_static():
    model = seeded(Vision)
    result = x86quant.quantize(model, images())
    assert result.quantization.mode == "static and dynamic"
    assert isinstance(result.stem, CompiledModule)
    assert isinstance(result.block.up, DynamicLinear)
    x = images(seed=1)
    assert sqnr(model(x), result(x)) > 30


def test_weight_only_keeps_activations_in_float():
    model = seeded(Encoder)
    x = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(0))
    result = x86quant.quantize(model, None, mode="weight_only")
    assert isinstance(result.block.up, WeightOnlyLinear)
    assert isinstance(result.block.attention, nn.MultiheadAttention)
    assert sqnr(model(x), result(x)) > 40


def test_any_mode_can_be_forced():
    x = torch.randn(64, 5, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).eval()
    result = x86quant.quantize(model, x, mode="static")
    assert isinstance(result, CompiledModule)
    assert sqnr(model(x), result(x)) > 25
    with pytest.raises(InvalidInputError, match="needs calibration data"):
        x86quant.quantize(model, None, mode="static")


def test_memory_stays_flat_while_calibration_streams():
    seen: list[weakref.ref[torch.Tensor]] = []
    most_alive = 0

    def batches():
        nonlocal most_alive
        for number in range(80):
            batch = images(1, seed=number)
            seen.append(weakref.ref(batch))
            most_alive = max(most_alive, sum(ref() is not None for ref in seen))
            yield batch
            del batch

    x86quant.quantize(seeded(ConvNet), batches())
    assert len(seen) == 80
    assert most_alive <= 16 + 3  # the sample, and those on their way


def test_a_generator_is_read_once_and_to_its_end(conv_net):
    read = []

    def batches():
        for number in range(40):
            read.append(number)
            yield images(1, seed=number)

    result = x86quant.quantize(conv_net, batches())
    assert read == list(range(40))
    assert result.quantization.batches == 40


def test_progress_is_drawn_in_terminals_only(capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert list(counted(range(3), 3, "calibrating", shown=True)) == [0, 1, 2]
    assert list(counted(range(3), None, "calibrating", shown=True)) == [0, 1, 2]
    assert "3 batches" in terminal.getvalue()
    terminal.truncate(0)
    assert list(counted(range(3), 3, "calibrating", shown=False)) == [0, 1, 2]
    assert terminal.getvalue().strip("\0") == ""


def test_batch_norms_fold_exactly(conv_net):
    traced = torch.fx.symbolic_trace(copy.deepcopy(conv_net))
    x = images(4)
    assert fold_batch_norms(traced) == 1
    assert not any(isinstance(m, nn.BatchNorm2d) for m in traced.modules())
    torch.testing.assert_close(traced(x), conv_net(x))


def test_statistics_compare_layer_by_layer(conv_net, quantized):
    found = {layer.name: layer for layer in statistics(conv_net, quantized, images())}
    assert {"first", "second", "classify"} <= set(found)
    assert all(layer.sqnr_db > 25 for layer in found.values())
    x = images()
    exact = torch.relu(conv_net.norm(conv_net.first(x))).detach()
    assert found["first"].min == 0
    assert found["first"].max == pytest.approx(float(exact.max()), rel=1e-4)


def test_statistics_see_saturation(conv_net, quantized):
    wild = images() * 20
    found = {x.name: x.saturation_rate for x in statistics(conv_net, quantized, wild)}
    usual = {x.name: x.saturation_rate for x in statistics(conv_net, quantized, images())}
    assert found["first"] > 0.2
    assert usual["first"] < 0.01


def test_statistics_know_equalized_and_dynamic_layers():
    model = seeded(Vision)
    result = x86quant.quantize(model, images())
    found = {x.name: x.sqnr_db for x in statistics(model, result, images())}
    assert {"stem.0", "block.up", "block.down", "block.attention", "head"} <= set(found)
    assert min(found.values()) > 25


def test_statistics_want_a_quantized_model(conv_net):
    with pytest.raises(InvalidInputError, match=r"x86quant\.quantize returned"):
        statistics(conv_net, conv_net, images(4))


def test_a_quantized_model_is_saved_and_loaded(tmp_path, quantized):
    x86quant.save(quantized, tmp_path / "model.x86q")
    assert torch.equal(x86quant.load(tmp_path / "model.x86q")(images(2)), quantized(images(2)))


def test_numpy_is_not_taken_for_a_tensor_but_its_rows_are_no_batches(conv_net):
    with pytest.raises(InvalidInputError, match="batch 0 is ndarray"):
        x86quant.quantize(conv_net, np.zeros((4, 3, 8, 8), np.float32))


def test_what_stays_in_float_is_said() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), Own(8, 8), nn.LSTM(8, 8))
    notes = "\n".join(x86quant.quantize(model, None, mode="dynamic").quantization.notes)
    assert "1 layer stays in float, because its class Own has a computation" in notes
    assert "because with fewer than 256 units a step costs more than int8 saves: 3" in notes


def test_norms_and_attentions_of_other_packages_are_seen() -> None:
    class OwnRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x))

    int8 = x86quant.quantize(nn.Sequential(OwnRMSNorm(), Mixing()), None)
    assert int8.quantization.mode == "dynamic"
    patches = nn.Sequential(nn.Conv1d(8, 8, 1), nn.Flatten(2), OwnRMSNorm(), Mixing())
    assert decide(patches, "auto").mode == "static and dynamic"
    assert decide(nn.Sequential(nn.Conv1d(8, 8, 1), OwnRMSNorm()), "auto").mode == "static"
    assert decide(nn.Sequential(nn.Linear(8, 8), Mixing()), "auto").mode == "dynamic"
    assert decide(nn.Sequential(nn.Conv1d(8, 8, 1), Mixing()), "auto").mode == "static"


class Scaled(nn.Module):
    """Takes a factor that need not be given."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.a(x) if scale is None else self.a(x) * scale


def test_batches_give_optional_arguments() -> None:
    model = Scaled().eval()
    pairs = [(torch.randn(8, 16), torch.rand(8, 1)) for _ in range(2)]
    named = [{"x": x, "scale": scale} for x, scale in pairs]
    for batches in (pairs, named):
        int8 = x86quant.quantize(model, batches, progress=False, strict=True)
        assert torch.allclose(int8(*pairs[0]), model(*pairs[0]), atol=0.05)


def test_class_numbers_are_targets_and_what_may_be_either_is_told() -> None:
    model = Scaled().eval()
    x = torch.randn(8, 16)
    labelled = x86quant.quantize(model, [(x, torch.arange(8))], progress=False, strict=True)
    assert torch.allclose(labelled(x), model(x), atol=0.05)
    with pytest.warns(X86QuantWarning, match="2 elements, of which 1 are .* the next one is scale"):
        x86quant.quantize(model, [(x, torch.rand(8))], progress=False)
    x86quant.quantize(model, [(x, torch.rand(8))], example_inputs=(x,), progress=False)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if lengths is None:
            return y
        return y * (torch.arange(x.shape[1]) < lengths[:, None])[..., None]


def test_lengths_of_rows_are_no_classes() -> None:
    model, x = Padded().eval(), torch.randn(3, 9, 16)
    lengths = torch.tensor([9, 4, 7])
    int8 = x86quant.quantize(model, [(x, lengths)] * 2, progress=False, strict=True)
    assert torch.allclose(int8(x, lengths), model(x, lengths), atol=0.1)
    with pytest.warns(X86QuantWarning, match="1 are taken for inputs .* the next one is lengths"):
        int8 = x86quant.quantize(model, [(x, torch.tensor([1, 2, 0]))], progress=False)
    assert torch.allclose(int8(x), model(x), atol=0.1)


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.classes = nn.Linear(16, 16), nn.Embedding(8, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x if y is None else x + self.classes(y))


def test_classes_that_may_be_a_condition_are_told_of() -> None:
    model, x, y = Conditioned().eval(), torch.randn(8, 16), torch.arange(8)
    with pytest.warns(X86QuantWarning, match="for targets; if the next one is y, give example_in"):
        x86quant.quantize(model, [(x, y)], progress=False)
    int8 = x86quant.quantize(model, [(x, y)], example_inputs=(x, y), progress=False, strict=True)
    assert torch.allclose(int8(x, y), model(x, y), atol=0.1)


def test_nothing_of_a_model_is_kept_when_it_is_gone() -> None:
    model = nn.Sequential(nn.Linear(16, 123), nn.ReLU(), nn.Linear(123, 4)).eval()
    x86quant.quantize(model, [torch.randn(8, 16)], progress=False)
    gc.collect()
    mine = {id(parameter) for parameter in model.parameters()}
    left = [
        x
        for x in gc.get_objects()
        if type(x) is nn.Parameter and x.shape == (123, 16) and id(x) not in mine
    ]
    assert not left

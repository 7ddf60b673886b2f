"""The default mappings on tiny models, through the stock FX workflow on the "x86" engine.

The engine is routed, so that the accuracy bounds hold on any CPU.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.ao import quantization as stock
from torch.ao.quantization.quantize_fx import convert_fx

import x86quant
from tests import models
from tests.stock_tensors import engine
from x86quant.errors import InvalidInputError
from x86quant.stock import qconfig

# Stock convert of dynamic LSTM and GRU copies a tensor the way torch warns about.
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")

FLOAT_TYPES = (nn.Linear, nn.LSTM, nn.GRU, nn.RNNCellBase, nn.Embedding, nn.EmbeddingBag)
CONV = (nn.modules.conv._ConvNd,)


@pytest.fixture(autouse=True)
def _routed():
    """Routing on, so that the tests hold at every ISA level; engines but x86 stay stock."""
    with x86quant.enable():
        yield


def convert(name: str, mapping: stock.QConfigMapping) -> tuple[nn.Module, float]:
    """Quantize under the x86 engine: the int8 model, and its SQNR against the float one."""
    case = models.make(name)
    with engine("x86"):
        quantized = models.quantize(case, mapping, backend_config=qconfig.get_backend_config())
        actual = quantized(*case.inputs)
        assert torch.backends.quantized.engine == "x86"
    return quantized, models.sqnr(case.model(*case.inputs), actual)


def float_layers(model: nn.Module, types: tuple[type, ...]) -> list[str]:
    # Quantized modules subclass nothing of these in torch.nn, except embeddings, so compare types.
    return [
        name
        for name, m in model.named_modules()
        if isinstance(m, types) and type(m).__module__.startswith("torch.nn")
    ]


@pytest.mark.parametrize("name", models.CASES)
def test_static_runs_and_is_accurate(name):
    quantized, decibels = convert(name, qconfig.get_default_qconfig_mapping())
    assert float_layers(quantized, FLOAT_TYPES + CONV) == []
    assert decibels > 25


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("channels", [(8, 12), (12, 8)])
def test_conv_transpose_with_other_channels_than_its_input(dims, channels):
    # The stock oneDNN kernel computes these wrongly, whatever the mapping; the router avoids it.
    case = models.conv_transpose(dims, channels)
    with engine("x86"):
        quantized = models.quantize(case, qconfig.get_default_qconfig_mapping())
        actual = quantized(*case.inputs)
    assert models.sqnr(case.model(*case.inputs), actual) > 25


@pytest.mark.parametrize(
    "name", ["linear", "embeddings", "lstm", "gru", "lstm_cell", "gru_cell", "rnn_cell"]
)
def test_dynamic_runs_and_is_accurate(name):
    quantized, decibels = convert(name, qconfig.get_default_dynamic_qconfig_mapping())
    assert float_layers(quantized, FLOAT_TYPES) == []
    assert decibels > 25


@pytest.mark.parametrize("name", ["residual", "conv_transpose2d", "functional"])
def test_dynamic_leaves_convolutions_float(name):
    quantized, decibels = convert(name, qconfig.get_default_dynamic_qconfig_mapping())
    expected = float_layers(models.make(name).model, CONV)
    assert len(float_layers(quantized, CONV)) == len(expected)
    assert decibels > 25


@pytest.mark.parametrize("name", models.CASES)
def test_qat_trains_and_converts(name):
    case = models.make(name)
    with engine("x86"):
        trained = models.train(
            case,
            qconfig.get_default_qat_qconfig_mapping(),
            backend_config=qconfig.get_backend_config(),
        )
        simulated = trained(*case.inputs)
        quantized = convert_fx(trained, backend_config=qconfig.get_backend_config())
        actual = quantized(*case.inputs)
        assert torch.backends.quantized.engine == "x86"
    # Training simulated what the int8 model computes; rounding ties may differ.
    assert models.sqnr(simulated, actual) > 25


@pytest.mark.parametrize(
    "mapping", [qconfig.get_default_qconfig_mapping, qconfig.get_default_qat_qconfig_mapping]
)
@pytest.mark.parametrize(("options", "top"), [({}, 255), ({"activation_bits": 7}, 127)])
def test_activations_use_the_chosen_range(mapping, options, top):
    prepared = models.prepare(models.make("residual"), mapping(**options))
    observers = [m for n, m in prepared.named_children() if n.startswith("activation_post_process")]
    assert len(observers) == 5
    for observer in observers:
        assert (observer.quant_min, observer.quant_max) == (0, top)
        low, high = observed_range(observer)
        scale, zero_point = observer.calculate_qparams()
        # The observed range fills the codes: nothing halves them behind our back.
        assert ((high - low) / scale).item() == pytest.approx(top, rel=0.1)
        assert 0 <= zero_point.item() <= top


def observed_range(observer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    inner = getattr(observer, "activation_post_process", observer)
    return inner.min_val.clamp(max=0), inner.max_val.clamp(min=0)


@pytest.mark.parametrize(
    "mapping", [qconfig.get_default_qconfig_mapping, qconfig.get_default_qat_qconfig_mapping]
)
@pytest.mark.parametrize("bits", [0, 6, 9, 8.5])
def test_other_activation_bits_are_refused(mapping, bits):
    with pytest.raises(InvalidInputError, match="7 or 8"):
        mapping(activation_bits=bits)


@pytest.mark.parametrize(
    "name", ["linear", "residual", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]
)
@pytest.mark.parametrize("workflow", ["static", "qat"])
def test_weights_are_symmetric_and_reach_127(name, workflow):
    case = models.make(name)
    with engine("x86"):
        if workflow == "static":
            quantized = models.quantize(case, qconfig.get_default_qconfig_mapping())
        else:
            mapping = qconfig.get_default_qat_qconfig_mapping()
            quantized = convert_fx(models.train(case, mapping))
    weights = [m.weight() for m in quantized.modules() if callable(getattr(m, "weight", None))]
    assert weights
    for weight in weights:
        assert weight.dtype == torch.qint8
        codes = weight.int_repr().to(torch.int32)
        if weight.qscheme() == torch.per_tensor_affine:
            assert "transpose" in name
            assert weight.q_zero_point() == 0
            assert codes.abs().max() == 127
        else:
            assert weight.q_per_channel_axis() == 0
            assert weight.q_per_channel_zero_points().count_nonzero() == 0
            assert (codes.abs().flatten(1).amax(1) == 127).all()


@pytest.mark.parametrize("kind", [None, nn.functional.conv_transpose2d])
def test_qat_weight_ranges_follow_growing_weights(kind):
    mapping = qconfig.get_default_qat_qconfig_mapping()
    chosen = mapping.object_type_qconfigs[kind] if kind else mapping.global_qconfig
    fake_quantize = chosen.weight()
    weight = torch.linspace(-1, 1, 32).reshape(2, 16)
    fake_quantize(weight)
    fake_quantize(2 * weight)
    scale, _ = fake_quantize.calculate_qparams()
    torch.testing.assert_close(scale.max().item(), 2 / 127)


def test_fixed_scale_ops_have_their_scale():
    quantized, _ = convert("sigmoid", qconfig.get_default_qconfig_mapping())
    scales = [v.item() for n, v in quantized.named_buffers() if "scale" in n]
    # The convolution's scale is inside its module: what is left are the input's and nothing else.
    assert len(scales) == 1
    case = models.make("sigmoid")
    before = nn.Sequential(*list(quantized.children())[:1])
    with engine("x86"):
        x = torch.quantize_per_tensor(case.inputs[0], scales[0], 128, torch.quint8)
        assert torch.sigmoid(before(x)).q_scale() == 1 / 256


@pytest.mark.parametrize(
    "make",
    [
        qconfig.get_default_qconfig_mapping,
        qconfig.get_default_qat_qconfig_mapping,
        qconfig.get_default_dynamic_qconfig_mapping,
    ],
)
def test_the_engine_neither_matters_nor_changes(make):
    texts = set()
    for name in ("x86", "fbgemm", "onednn", "qnnpack"):
        with engine(name):
            texts.add(describe(make()))
            qconfig.get_backend_config()
            assert torch.backends.quantized.engine == name
    assert len(texts) == 1


def describe(mapping: stock.QConfigMapping) -> str:
    rows = [("", mapping.global_qconfig), *mapping.object_type_qconfigs.items()]
    return "\n".join(f"{kind}: {value}" for kind, value in rows)


def test_backend_config_needs_no_other_import():
    # Stock code reaches a submodule that only quantize_fx, imported by this file, loads.
    code = "from x86quant.stock.qconfig import get_backend_config; get_backend_config()"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_mappings_are_independent():
    first = qconfig.get_default_qconfig_mapping()
    first.set_object_type(nn.Linear, None)
    assert nn.Linear not in qconfig.get_default_qconfig_mapping().object_type_qconfigs


def test_backend_config_fuses_no_add_into_conv():
    patterns = qconfig.get_backend_config().configs
    fused = [c for c in patterns if c._pattern_complex_format is not None]
    assert fused == []
    onednn = stock.backend_config.get_onednn_backend_config().configs
    assert [c for c in onednn if c._pattern_complex_format is not None] != []


# What stock PyTorch does where these mappings differ. A failure means that torch has changed and
# the mapping can be simplified.


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_stock_onednn_mapping_raises_on_conv_transpose(dims):
    case = models.make(f"conv_transpose{dims}d")
    mapping = stock.get_default_qconfig_mapping("onednn")
    with engine("onednn"), pytest.raises(AssertionError, match="Per channel"):
        models.quantize(case, mapping)


def test_unet_upsampling_which_no_stock_engine_gets_right():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(64, 32, 2, 2)).eval()
    case = models.Case(model, (torch.randn(1, 64, 8, 8),))
    decibels = {}
    for name in ("x86", "fbgemm", "onednn"):
        x86quant.disable()
        with engine(name):
            quantized = models.quantize(case, qconfig.get_default_qconfig_mapping())
            decibels[name] = models.sqnr(model(*case.inputs), quantized(*case.inputs))
    assert max(decibels.values()) < 25
    with engine("x86"), x86quant.enable():
        quantized = models.quantize(case, qconfig.get_default_qconfig_mapping())
        assert models.sqnr(model(*case.inputs), quantized(*case.inputs)) > 30


@pytest.mark.parametrize("name", ["fbgemm", "onednn"])
def test_stock_prepack_refuses_per_channel_conv_transpose(name):
    weight = torch.quantize_per_channel(
        torch.randn(8, 8, 3, 3),
        torch.full((8,), 0.02),
        torch.zeros(8, dtype=torch.int64),
        1,
        torch.qint8,
    )
    with engine(name), pytest.raises(RuntimeError, match="Per Channel"):
        torch.ops.quantized.conv_transpose2d_prepack(
            weight, None, [1, 1], [0, 0], [0, 0], [1, 1], 1
        )


@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
def test_stock_mapping_halves_the_range():
    prepared = models.prepare(models.make("linear"), stock.get_default_qconfig_mapping("x86"))
    assert prepared.activation_post_process_0.quant_max == 127


def test_stock_prelu_scales_positive_inputs():
    x = torch.quantize_per_tensor(torch.tensor([[[3.0]]]), 0.03, 128, torch.quint8)
    weight = torch.quantize_per_tensor(torch.tensor([0.25]), 0.25 / 255, 0, torch.quint8)
    assert torch.ops.quantized.prelu(x, weight, 0.03, 128).dequantize().item() < 1

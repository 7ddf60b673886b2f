"""int8 models as ONNX files: ONNX Runtime is an independent judge of our arithmetic."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.cli import main
from x86quant.errors import InvalidInputError, UnsupportedError

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.usefixtures("any_accuracy")


class ManySteps(nn.Module):
    """A convolutional network with most of what graphs know."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.grouped_up = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=4)
        self.deep = nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=16)
        self.last = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu6(self.first(x))
        y = torch.relu(self.norm(self.second(F.silu(x))) + x)
        z = F.avg_pool2d(self.up(y) - self.grouped_up(x), 2)
        x = torch.cat([y, z], 1) * torch.sigmoid(torch.cat([z, y], 1))
        x = F.hardswish(self.deep(F.interpolate(x, scale_factor=2.0)))
        x = F.adaptive_avg_pool2d(F.max_pool2d(x, 3, 2, 1), 1)
        return self.last(x.flatten(1))


class Recurrent(nn.Module):
    """An LSTM between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(12, 16)
        self.lstm = nn.LSTM(16, 24, batch_first=True)
        self.after = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(torch.relu(self.before(x)))
        return self.after(out[:, -1])


def session(path: Path) -> Any:
    """What the file says, on any CPU: without VNNI its products of u8 and s8 saturate."""
    proto = onnx.load(path)
    make_unsigned(proto.graph)
    options = onnxruntime.SessionOptions()  # fused, convolutions would be such products
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def make_unsigned(graph: Any) -> None:
    """Give integer products the same weights as u8 with a zero point."""
    numpy_helper, weights = onnx.numpy_helper, {x.name: x for x in graph.initializer}
    graph.initializer.append(numpy_helper.from_array(np.uint8(128).reshape(()), "middle"))
    for node in graph.node:
        if node.op_type == "MatMulInteger":
            assert len(node.input) == 2
            signed = numpy_helper.to_array(weights[node.input[1]])
            name = f"{node.name}_unsigned"
            unsigned = (signed.astype(np.int16) + 128).astype(np.uint8)
            graph.initializer.append(numpy_helper.from_array(unsigned, name))
            node.input[1:] = [name, "", "middle"]


def sqnr(wanted: torch.Tensor, found: torch.Tensor) -> float:
    noise = (wanted - found).double().square().mean().clamp(min=1e-30)
    return float(10 * torch.log10(wanted.double().square().mean() / noise))


def int8_cnn() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net = ManySteps().eval()
    batches = [torch.randn(4, 3, 16, 16) for _ in range(3)]
    return net, x86quant.quantize(net, batches, speed_check=False)


@torch.no_grad()
def test_a_convolutional_network_gives_the_same_in_onnx_runtime(tmp_path: Path) -> None:
    net, int8 = int8_cnn()
    path = tmp_path / "net.onnx"
    x86quant.export_onnx(int8, path)
    judge = session(path)
    for batch in (1, 3, 8):  # the batch is free
        x = torch.randn(batch, 3, 16, 16)
        (found,) = judge.run(None, {"input": x.numpy()})
        ours = int8(x)
        # Sums in another order may round a code to the next one here and there: far less than what
        # rounding itself costs.
        assert sqnr(ours, torch.tensor(found)) > sqnr(net(x), ours) + 3
    assert [*tmp_path.iterdir()] == [path]


@torch.no_grad()
def test_codes_differ_by_a_step_at_most(tmp_path: Path) -> None:
    torch.manual_seed(1)
    # Random weights, one layer of each kind: what differs is this layer's own rounding.
    layers: dict[str, nn.Module] = {
        "conv": nn.Conv2d(3, 16, 3, stride=2, padding=1),
        "conv relu": nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU()),
        "depthwise": nn.Conv2d(3, 6, 3, groups=3),
        "transposed": nn.ConvTranspose2d(3, 8, 3, stride=2),
        "PReLU": nn.Sequential(nn.Conv2d(3, 16, 3), nn.PReLU(16)),
    }
    for name, layer in layers.items():
        net = nn.Sequential(layer, nn.MaxPool2d(2)).eval()
        x = torch.randn(4, 3, 14, 14)
        int8 = x86quant.quantize(net, [x], speed_check=False)
        path = tmp_path / "layer.onnx"
        x86quant.export_onnx(int8, path, x)
        (found,) = session(path).run(None, {"input": x.numpy()})
        ours = int8(x)
        values = ours.unique()
        step = float(values.diff().min()) if len(values) > 1 else 0.0
        apart = (torch.tensor(found) - ours).abs()
        assert float(apart.max()) <= 1.01 * step, name
        assert float((apart > 0.01 * step).float().mean()) < 0.01, name


@torch.no_grad()
def test_a_convolution_that_stays_in_float_is_one_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 24, 1), nn.Hardswish(), nn.Conv2d(24, 4, 1)
    ).eval()
    x, path = torch.randn(2, 3, 15, 17), tmp_path / "net.onnx"
    int8 = x86quant.quantize(net, [x], speed_check=False, effort="fast", float_layers=["1"])
    x86quant.export_onnx(int8, path, x)
    (found,) = session(path).run(None, {"input": x.numpy()})
    assert sqnr(int8(x), torch.tensor(found)) > 45
    floats = [w for w in onnx.load(path).graph.initializer if list(w.dims) == [24, 8, 1, 1]]
    assert [w.data_type for w in floats] == [onnx.TensorProto.FLOAT]


class _Centred(nn.Module):
    """The norms of channels, which stay in float, read what a GELU gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.first(x))
        found: torch.Tensor = self.last(x * x.norm(dim=(2, 3), keepdim=True))
        return found


@torch.no_grad()
def test_tables_of_floats_are_looked_up_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(2, 3, 14, 14), tmp_path / "net.onnx"
    int8 = x86quant.quantize(_Centred().eval(), [x], speed_check=False)
    x86quant.export_onnx(int8, path, x)
    assert "Gelu" not in {node.op_type for node in onnx.load(path).graph.node}
    (found,) = session(path).run(None, {"input": x.numpy()})
    assert sqnr(int8(x), torch.tensor(found)) > 40


def test_runtimes_find_int8_kernels_for_it(tmp_path: Path) -> None:
    _, int8 = int8_cnn()
    path = tmp_path / "net.onnx"
    x86quant.export_onnx(int8, path)
    weights = [x for x in onnx.load(path).graph.initializer if x.data_type == onnx.TensorProto.INT8]
    assert len(weights) >= 5
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kinds = collections.Counter(
        n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node
    )
    # All but the one that takes a sum along, and those that are transposed.
    assert kinds["QLinearConv"] == 2, kinds


@torch.no_grad()
def test_a_transformer_gives_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    batches = [torch.randn(2, 7, 32) for _ in range(3)]
    int8 = x86quant.quantize(net, batches, fuse_blocks=True, speed_check=False)
    path = tmp_path / "encoder.onnx"
    x86quant.export_onnx(int8, path, input_names=["tokens"], output_names=["states"])
    judge = session(path)
    x = torch.randn(5, 7, 32)
    (found,) = judge.run(["states"], {"tokens": x.numpy()})
    ours = int8(x)
    assert sqnr(ours, torch.tensor(found)) > sqnr(net(x), ours) + 3


@torch.no_grad()
@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_recurrent_network_gives_the_same(mode: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Recurrent().eval()
    batches = [torch.randn(3, 6, 12) for _ in range(3)]
    int8 = x86quant.quantize(net, batches, mode=mode, speed_check=False)
    path = tmp_path / "lstm.onnx"
    x86quant.export_onnx(int8, path)
    (found,) = session(path).run(None, {"input": batches[0].numpy()})
    ours = int8(batches[0])
    assert sqnr(ours, torch.tensor(found)) > sqnr(net(batches[0]), ours) + 3


@torch.no_grad()
def test_a_loaded_model_is_exported_and_read_back(tmp_path: Path) -> None:
    _, int8 = int8_cnn()
    x86quant.save(int8, tmp_path / "net.x86q")
    x86quant.export_onnx(x86quant.load(tmp_path / "net.x86q"), tmp_path / "net.onnx")
    again = x86quant.from_onnx(tmp_path / "net.onnx")
    x = torch.randn(2, 3, 16, 16)
    assert sqnr(int8(x), again(x)) > 30


def test_the_same_model_gives_the_same_bytes_and_no_path(tmp_path: Path) -> None:
    written = []
    for _ in range(2):
        torch.manual_seed(0)
        x = torch.randn(2, 3, 8, 8)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
        int8 = x86quant.quantize(model, [x, x], speed_check=False, progress=False)
        x86quant.export_onnx(int8, tmp_path / "net.onnx", x)
        written.append((tmp_path / "net.onnx").read_bytes())
    assert written[0] == written[1]
    assert str(Path(x86quant.__file__).parent).encode() not in written[0]


def test_what_cannot_be_exported_is_said_and_leaves_no_file(tmp_path: Path) -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if float(x.sum()) > 0 else x

    path = tmp_path / "net.onnx"
    with pytest.raises(UnsupportedError, match=r"Sorted cannot be traced by torch\.export"):
        x86quant.export_onnx(Sorted(), path, torch.ones(2, 4))
    lstm = nn.LSTM(4, 6, proj_size=3, batch_first=True)
    with pytest.raises(UnsupportedError, match="LSTM is an LSTM with projections"):
        x86quant.export_onnx(lstm, path, torch.ones(2, 5, 4))
    with pytest.raises(InvalidInputError, match=r"what Linear takes is not known: give inputs"):
        x86quant.export_onnx(nn.Linear(2, 2), path)
    with pytest.raises(InvalidInputError, match="2 names for 1 tensors"):
        x86quant.export_onnx(nn.Linear(2, 2), path, torch.ones(1, 2), input_names=["a", "b"])
    with pytest.raises(InvalidInputError, match="is a folder"):
        x86quant.export_onnx(nn.Linear(2, 2), tmp_path, torch.ones(1, 2))
    assert not [*tmp_path.iterdir()]


def test_the_command_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def net(): return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())\n"
        "def data(): return [torch.randn(2, 3, 9, 9) for _ in range(2)]\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["quantize", "mine.py:net", "--data", "mine.py:data", "--out", "net.onnx"]
    assert main([*command, "--no-speed-check"]) == 0
    assert "wrote net.onnx" in capsys.readouterr().err
    assert session(tmp_path / "net.onnx").get_outputs()[0].shape[1:] == [4, 7, 7]


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    _, int8 = int8_cnn()
    before = str(int8.graph_module.graph)  # type: ignore[union-attr]
    keys = [*int8.state_dict()]
    x86quant.export_onnx(int8, tmp_path / "net.onnx")
    assert str(int8.graph_module.graph) == before  # type: ignore[union-attr]
    assert [*int8.state_dict()] == keys

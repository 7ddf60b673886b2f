"""ONNX Runtime's CPU provider, on a quantized model and on the float one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from x86quant.bench.backends import Bind, Prepared, Run, Task, first_tensor
from x86quant.given_model import Arguments

_FILE = "model.onnx"


class OnnxruntimeBackend:
    """``quantize_static``, QDQ, uint8 activations, per-channel int8 weights, for convolutional
    networks; ``quantize_dynamic`` for others."""

    def __init__(self, name: str) -> None:
        self.int8 = name == "onnxruntime"
        self.title = "ONNX Runtime int8" if self.int8 else "ONNX Runtime fp32"
        self.packages: Mapping[str, str] = {"onnx": "onnx", "onnxruntime": "onnxruntime"}

    def version(self) -> str:
        """What was measured."""
        return f"onnxruntime {metadata.version('onnxruntime')}"

    def refusal(self, task: Task) -> str | None:
        """Why it is not for this model."""
        return None if task.form == "float" else "needs the float model, and this one is int8"

    def prepare(self, task: Task) -> Prepared:
        """Export, quantize, and open a session."""
        path, method = _model(task, Path(tempfile.mkdtemp()), int8=self.int8)
        bind = _session(path, task.threads)
        return Prepared(bind, lambda folder: str(shutil.copy(path, folder / _FILE)), method)

    def load(self, folder: Path, threads: int) -> Bind:
        """Open a session on the file."""
        return _session(folder / _FILE, threads)


def _names(call: Arguments) -> list[str]:
    return [*(f"input{i}" for i in range(len(call.args))), *call.kwargs]


def _arrays(call: Arguments) -> dict[str, Any]:
    import numpy

    arrays = call.converted(numpy.asarray)
    return dict(zip(_names(call), (*arrays.args, *arrays.kwargs.values()), strict=True))


def _model(task: Task, folder: Path, *, int8: bool) -> tuple[Path, str]:
    import torch

    floating, folded, quantized = (folder / f"{step}.onnx" for step in ("float", "folded", "int8"))
    example = task.example

    class FirstResult(torch.nn.Module):
        """Without names of arguments, which the exporter would fill in with defaults."""

        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return first_tensor(self.model(*args, **kwargs))

    torch.onnx.export(
        FirstResult().eval(),
        example.args,
        str(floating),
        kwargs=example.kwargs or None,
        input_names=_names(example),
        dynamo=False,
    )
    if not int8:
        return floating, ""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    if not task.is_convolutional():
        quantization.quantize_dynamic(
            str(floating),
            str(quantized),
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
        )
        return quantized, "dynamic"
    quant_pre_process(str(floating), str(folded))
    quantization.quantize_static(
        str(folded),
        str(quantized),
        _reader(task.calibration),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
    )
    return quantized, "static, QDQ"


def _reader(calibration: Sequence[Arguments]) -> Any:
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._batches = iter(calibration)

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self._batches, None)
            return None if batch is None else _arrays(batch)

    return Reader()


def _session(path: Path, threads: int) -> Bind:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    # Its threads may spin while it runs, as they would alone, but not while others do.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    output = session.get_outputs()[0].name
    taken = {found.name for found in session.get_inputs()}  # export drops what is not used

    def bind(given: Arguments) -> Run:
        arrays = {name: array for name, array in _arrays(given).items() if name in taken}
        return lambda: session.run([output], arrays)[0]

    return bind


def backend(name: str) -> OnnxruntimeBackend:
    """The back end called ``name``."""
    return OnnxruntimeBackend(name)

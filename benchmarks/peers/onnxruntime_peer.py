"""ONNX Runtime's CPU provider on a statically quantized QDQ model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peers import Bind, Run

INPUT = "input"


class OnnxRuntime:
    """``quantize_static``, QDQ, uint8 activations, per-channel int8 weights."""

    packages: Mapping[str, str] = {"onnx": "onnx", "onnxruntime": "onnxruntime"}
    int8 = True

    def version(self) -> str:
        return f"onnxruntime {metadata.version('onnxruntime')}"

    def prepare(
        self,
        model: nn.Module,
        calibration: Sequence[torch.Tensor],
        example: torch.Tensor,
        threads: int,
    ) -> Bind:
        import onnxruntime

        with tempfile.TemporaryDirectory() as folder:
            path = _quantized(model, calibration, example, Path(folder))
            session = onnxruntime.InferenceSession(
                str(path), _options(threads), providers=["CPUExecutionProvider"]
            )
        output = session.get_outputs()[0].name

        def bind(x: torch.Tensor) -> Run:
            array = x.numpy()
            return lambda: torch.from_numpy(session.run([output], {INPUT: array})[0])

        return bind


def _quantized(
    model: nn.Module, calibration: Sequence[torch.Tensor], example: torch.Tensor, folder: Path
) -> Path:
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._batches = iter(calibration)

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self._batches, None)
            return None if batch is None else {INPUT: batch.numpy()}

    floating, folded, quantized = (folder / f"{step}.onnx" for step in ("float", "folded", "int8"))
    torch.onnx.export(model, (example,), str(floating), input_names=[INPUT], dynamo=False)
    quant_pre_process(str(floating), str(folded))
    quantization.quantize_static(
        str(folded),
        str(quantized),
        Reader(),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
    )
    return quantized


def _options(threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    # Its threads may spin while it runs, as they would alone, but not while others do.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def peer(name: str) -> OnnxRuntime:
    """The peer; it has one name."""
    return OnnxRuntime()

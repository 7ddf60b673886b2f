"""OpenVINO's CPU plugin, on a model quantized by NNCF and on the float one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from x86quant.bench.backends import Bind, Prepared, Run, Task
from x86quant.given_model import Arguments
from x86quant.hardware.isa import forced_level

_FILE = "model.xml"


class OpenvinoBackend:
    """``nncf.quantize`` with its defaults, compiled for latency on one stream."""

    def __init__(self, name: str) -> None:
        self.int8 = name == "openvino"
        self.title = "OpenVINO int8" if self.int8 else "OpenVINO fp32"
        tools = {"nncf": "nncf"} if self.int8 else {}
        self.packages: Mapping[str, str] = {"openvino": "openvino", **tools}

    def version(self) -> str:
        """What was measured."""
        versions = [f"{name} {metadata.version(name)}" for name in self.packages]
        return ", ".join(versions)

    def refusal(self, task: Task) -> str | None:
        """Why it is not for this model."""
        return None if task.form == "float" else "needs the float model, and this one is int8"

    def prepare(self, task: Task) -> Prepared:
        """Convert, quantize and compile."""
        import openvino

        call = task.example
        if call.kwargs and call.args:
            raise ValueError("inputs by position and by name at once")
        shapes: Any = (
            {name: list(x.shape) for name, x in call.kwargs.items()}
            if call.kwargs
            else [tuple(x.shape) for x in call.args]
        )
        example: Any = dict(call.kwargs) or (call.args if len(call.args) > 1 else call.args[0])
        model = openvino.convert_model(task.model, example_input=example, input=shapes)
        method = ""
        if self.int8:
            import nncf

            transformer = task.has("Attention")
            model = nncf.quantize(
                model,
                nncf.Dataset(task.calibration, _arrays),
                subset_size=len(task.calibration),
                model_type=nncf.ModelType.TRANSFORMER if transformer else None,
            )
            method = "static, NNCF" + (", as a transformer" if transformer else "")
        bind = _compiled(model, task.threads, int8=self.int8)
        return Prepared(bind, functools.partial(_save, model), method)

    def load(self, folder: Path, threads: int) -> Bind:
        """Read the model and compile it."""
        import openvino

        return _compiled(openvino.Core().read_model(folder / _FILE), threads, int8=self.int8)


def _arrays(call: Arguments) -> Any:
    """As OpenVINO takes them: by name or in order, without a copy."""
    import numpy

    arrays = call.converted(numpy.asarray)
    if arrays.kwargs:
        return arrays.kwargs
    return list(arrays.args) if len(arrays.args) > 1 else arrays.args[0]


def _compiled(model: Any, threads: int, *, int8: bool) -> Bind:
    import openvino

    compiled = openvino.Core().compile_model(
        model,
        "CPU",
        {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            # Pinned threads would stay on a core that something else may be using.
            "ENABLE_CPU_PINNING": False,
            **_precision(int8=int8),
        },
    )
    request = compiled.create_infer_request()

    def bind(given: Arguments) -> Run:
        import numpy

        arrays = given.converted(numpy.asarray)
        named: dict[Any, Any] = {**dict(enumerate(arrays.args)), **arrays.kwargs}
        tensors = {key: openvino.Tensor(x, shared_memory=True) for key, x in named.items()}

        def run() -> Any:
            for key, tensor in tensors.items():
                if isinstance(key, int):
                    request.set_input_tensor(key, tensor)
                else:
                    request.set_tensor(key, tensor)
            request.infer(share_outputs=True)
            # Where the next run writes too: whoever keeps it must copy it.
            return request.get_output_tensor(0).data

        return run

    return bind


def _precision(*, int8: bool) -> dict[str, str]:
    """What is left in float may be bfloat16 beside int8, as by default; fp32 is what it says.

    Held to a level without bfloat16, OpenVINO would still see that the CPU has it, ask its oneDNN,
    which is held, and fail.
    """
    by_default = int8 and forced_level() in (None, "amx_int8")
    return {} if by_default else {"INFERENCE_PRECISION_HINT": "f32"}


def _save(model: Any, folder: Path) -> None:
    import openvino

    openvino.save_model(model, folder / _FILE, compress_to_fp16=False)


def backend(name: str) -> OpenvinoBackend:
    """The back end called ``name``."""
    return OpenvinoBackend(name)

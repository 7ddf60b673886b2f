"""Ways to make a trained network int8, ours and others', each as a function of its inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import x86quant
from benchmarks.trained.network import Inputs, Trained
from x86quant.bench.backends import Task, backend, first_tensor
from x86quant.given_model import Arguments

#: The first result for some inputs, as a tensor of its own.
Way = Callable[[Inputs], torch.Tensor]


def of_torch(model: Callable[..., Any]) -> Way:
    """A torch module."""
    return lambda inputs: first_tensor(model(*inputs)).clone()


def ours(**arguments: Any) -> Callable[[Trained], Way]:
    """``quantize`` with these arguments."""
    return lambda network: of_torch(
        x86quant.quantize(network.model, network.calibration, progress=False, **arguments)
    )


def by_backend(name: str) -> Callable[[Trained], Way]:
    """One of the back ends of ``x86quant bench``."""

    def make(network: Trained) -> Way:
        calls = [Arguments(inputs) for inputs in network.calibration]
        example = Arguments(network.test[0])
        given = copy.deepcopy(network.model)
        task = Task(given, "float", calls, example, torch.get_num_threads())
        bind = backend(name).prepare(task).bind
        return lambda inputs: torch.tensor(np.array(bind(Arguments(inputs))()))

    return make


def by_nncf_at_its_best(network: Trained) -> Way:
    """NNCF's mixed preset with its full bias correction, run by OpenVINO."""
    import nncf
    import openvino

    inputs = network.test[0]
    converted = openvino.convert_model(
        copy.deepcopy(network.model),
        example_input=inputs if len(inputs) > 1 else inputs[0],
        input=[tuple(x.shape) for x in inputs],
    )
    int8 = nncf.quantize(
        converted,
        nncf.Dataset(network.calibration, lambda call: [x.numpy() for x in call]),
        subset_size=len(network.calibration),
        preset=nncf.QuantizationPreset.MIXED,
        fast_bias_correction=False,
    )
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "ENABLE_CPU_PINNING": False}
    run = openvino.Core().compile_model(int8, "CPU", threads)
    return lambda call: torch.tensor(run([x.numpy() for x in call])[0])


#: By the names that the command line takes.
WAYS: dict[str, Callable[[Trained], Way]] = {
    "x86quant": ours(),
    "x86quant-best": ours(effort="best"),
    "nncf": by_backend("openvino"),
    "nncf-best": by_nncf_at_its_best,
    "onnxruntime": by_backend("onnxruntime"),
    "fx": by_backend("x86"),
}

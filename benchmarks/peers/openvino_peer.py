"""OpenVINO's CPU plugin on a model quantized by NNCF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata

import torch
from torch import nn

from benchmarks.peers import Bind, Run


class OpenVino:
    """``nncf.quantize`` with its defaults, compiled for latency on one stream."""

    packages: Mapping[str, str] = {"openvino": "openvino", "nncf": "nncf"}
    int8 = True

    def version(self) -> str:
        return f"openvino {metadata.version('openvino')}, nncf {metadata.version('nncf')}"

    def prepare(
        self,
        model: nn.Module,
        calibration: Sequence[torch.Tensor],
        example: torch.Tensor,
        threads: int,
    ) -> Bind:
        import nncf
        import openvino

        converted = openvino.convert_model(
            model, example_input=example, input=[tuple(example.shape)]
        )
        quantized = nncf.quantize(
            converted,
            nncf.Dataset(calibration, lambda batch: batch.numpy()),
            subset_size=len(calibration),
        )
        compiled = openvino.Core().compile_model(
            quantized,
            "CPU",
            {
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": threads,
                "NUM_STREAMS": 1,
                # Pinned threads would stay on a core that something else may be using.
                "ENABLE_CPU_PINNING": False,
            },
        )
        request = compiled.create_infer_request()

        def bind(x: torch.Tensor) -> Run:
            tensor = openvino.Tensor(x.numpy(), shared_memory=True)

            def run() -> torch.Tensor:
                request.set_input_tensor(tensor)
                request.infer(share_outputs=True)
                # Where the next run writes too: whoever keeps it must copy it.
                return torch.from_numpy(request.get_output_tensor().data)

            return run

        return bind


def peer(name: str) -> OpenVino:
    """The peer; it has one name."""
    return OpenVino()

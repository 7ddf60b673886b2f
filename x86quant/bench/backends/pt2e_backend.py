"""PyTorch 2 export quantization, compiled by Inductor: torchao's x86 recipe."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from x86quant.bench.backends import Bind, Prepared, Run, Task
from x86quant.given_model import Arguments


class Pt2eBackend:
    """torchao's X86InductorQuantizer and ``torch.compile`` with freezing and the C++ wrapper."""

    title = "PT2E int8, Inductor"
    packages: Mapping[str, str] = {"torchao": "torchao==0.18.*"}
    int8 = True

    def version(self) -> str:
        """What was measured."""
        import torch

        return f"torchao {metadata.version('torchao')}, Inductor of torch {torch.__version__}"

    def refusal(self, task: Task) -> str | None:
        """Why it is not for this model."""
        return None if task.form == "float" else "needs the float model, and this one is int8"

    def prepare(self, task: Task) -> Prepared:
        """Export, calibrate, convert, compile."""
        import torch
        from torch._inductor import config
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
            X86InductorQuantizer,
            get_default_x86_inductor_quantization_config,
        )

        example = task.example
        quantizer: Any = X86InductorQuantizer()
        quantizer.set_global(get_default_x86_inductor_quantization_config())
        # Strict: without, every use of one ReLU module counts as one, and annotation fails.
        exported = torch.export.export(
            task.model, example.args, kwargs=example.kwargs, strict=True
        ).module()
        prepared = prepare_pt2e(exported, quantizer)
        for batch in task.calibration:
            prepared(*batch.args, **batch.kwargs)
        converted = convert_pt2e(prepared)
        # Int8 kernels need constant weights; the wrapper in Python costs small networks dear.
        # Set for good: compiled code asks again when it runs.
        config.freezing = True
        config.cpp_wrapper = True
        compiled: Any = torch.compile(converted)
        compiled(*example.args, **example.kwargs)

        def bind(given: Arguments) -> Run:
            return functools.partial(compiled, *given.args, **given.kwargs)

        return Prepared(bind, method="static, PT2E")

    def load(self, folder: Path, threads: int) -> Bind:
        """Never asked: what Inductor compiles is not saved."""
        raise NotImplementedError


def backend(name: str) -> Pt2eBackend:
    """The back end; it has one name."""
    return Pt2eBackend()

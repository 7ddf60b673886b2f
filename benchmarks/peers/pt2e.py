"""PyTorch 2 export quantization, compiled by Inductor: torchao's x86 recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata

import torch
from torch import nn

from benchmarks.peers import Bind, Run


class Pt2e:
    """torchao's X86InductorQuantizer and ``torch.compile`` with freezing and the C++ wrapper."""

    packages: Mapping[str, str] = {"torchao": "torchao==0.18.0"}
    int8 = True

    def version(self) -> str:
        return f"torchao {metadata.version('torchao')}, Inductor of torch {torch.__version__}"

    def prepare(
        self,
        model: nn.Module,
        calibration: Sequence[torch.Tensor],
        example: torch.Tensor,
        threads: int,
    ) -> Bind:
        from torch._inductor import config
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
            X86InductorQuantizer,
            get_default_x86_inductor_quantization_config,
        )

        quantizer = X86InductorQuantizer()
        quantizer.set_global(get_default_x86_inductor_quantization_config())
        # Strict: without, every use of one ReLU module counts as one, and annotation fails.
        exported = torch.export.export(model, (example,), strict=True).module()
        prepared = prepare_pt2e(exported, quantizer)
        for batch in calibration:
            prepared(batch)
        converted = convert_pt2e(prepared)
        # Int8 kernels need constant weights; the wrapper in Python costs small networks dear.
        # Set for good: compiled code asks again when it runs.
        config.freezing = True
        config.cpp_wrapper = True
        compiled = torch.compile(converted)
        compiled(example)

        def bind(x: torch.Tensor) -> Run:
            return lambda: compiled(x)

        return bind


def peer(name: str) -> Pt2e:
    """The peer; it has one name."""
    return Pt2e()

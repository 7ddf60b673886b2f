"""Which kernel runs each step of a compiled model, which rule chose it, and what was fused.

    x86quant explain torchvision.models:resnet18 --shape 1,3,224,224

To see what another machine would do, cap this one: X86QUANT_ISA=avx2 x86quant explain ...
"""

from __future__ import annotations

import argparse

from x86quant.cli import loading

HELP = "the kernel of every step of a model, and why"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    loading.add_model_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Compile the model and print what runs."""
    import torch

    import x86quant
    from x86quant.profiling.roofline import using_threads

    model = loading.load_model(options.model, packed_cache=options.packed_cache)
    call = loading.arguments_for(options, model)
    with using_threads(options.threads or torch.get_num_threads()):
        compiled = loading.compile_model(model, call.args, call.kwargs).compiled
        explanation = x86quant.explain(compiled, call.args, kwargs=call.kwargs)
    print(explanation.to_json() if options.json else explanation)
    return 0

"""Write a program file, which C++ runs without Python and without torch.

    x86quant export-program model.safetensors --shape 1,3,224,224 --shape 8,3,224,224 -o model.xq

Each --shape is a set of input shapes that the file can run; a model with several inputs takes them
in order, with a colon between them: --shape 1,13:1,26
"""

from __future__ import annotations

import argparse
from pathlib import Path

from x86quant.cli import loading

HELP = "write a saved model as a program that C++ runs"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", metavar="MODEL", type=Path, help="a model that x86quant saved")
    parser.add_argument(
        "--shape",
        type=_shapes,
        action="append",
        required=True,
        metavar="N,C,H,W[:…]",
        help="shapes of a call's inputs; once for each set of shapes",
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--threads",
        type=loading.thread_count,
        help="threads that the plans are for (default: torch's)",
    )
    loading.add_packed_cache(parser)


def _shapes(text: str) -> list[tuple[int, ...]]:
    return [loading.shape(part) for part in text.split(":")]


def run(options: argparse.Namespace) -> int:
    """Load, plan, write."""
    import torch

    from x86quant.artifacts import load
    from x86quant.files import check_target
    from x86quant.profiling.roofline import using_threads
    from x86quant.serving import export_program

    check_target(options.out, "--out")
    module = load(options.model, packed_cache=options.packed_cache)
    calls = [
        [torch.zeros(shape, dtype=torch.float32) for shape in shapes] for shapes in options.shape
    ]
    with using_threads(options.threads or torch.get_num_threads()):
        export_program(module, options.out, calls)
    size = options.out.stat().st_size / 1e6
    loading.tell(f"wrote {options.out}, {size:.2f} MB, for {len(calls)} sets of shapes")
    return 0

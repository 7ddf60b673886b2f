"""The zoo of architectures as ONNX files: ONNX Runtime as a judge of our arithmetic.

    pip install 'x86quant[onnx]' onnxruntime
    python -m benchmarks.onnx_out [--only plain_cnn hf_bert] [--every 4]

Each architecture is quantized, exported by ``x86quant.export_onnx`` and run by ONNX Runtime on
inputs that calibration has not seen. A row tells how far both int8 results are from each other and
ours from float, in dB, and how many int8 kernels ONNX Runtime found for the file. A file is wrong
if it is further from ours than ours is from float. What ONNX Runtime has no kernel for is not run.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch

import x86quant
from benchmarks.environment import print_environment
from tests.zoo import ZOO, Animal, call, sqnr
from x86quant.calling.call import Call
from x86quant.calling.running import tensors_in
from x86quant.errors import X86QuantError
from x86quant.terminal.text_table import text_table

_INT8 = ("QLinear", "MatMulInteger", "ConvInteger", "QGemm", "DynamicQuantizeMatMul")


def judged(animal: Animal, folder: Path) -> tuple[str, ...]:
    """Name, what came of it, dB between both, dB against float, int8 kernels, the problem."""
    model = animal.model()
    given = animal.sample(3, 1, 9)
    call_of = Call((), given) if isinstance(given, dict) else Call(given, {})
    path = folder / "model.onnx"
    try:
        int8 = x86quant.quantize(
            model, animal.calibration(), progress=False, speed_check=False, **animal.options
        )
        x86quant.export_onnx(int8, path, call_of.args, kwargs=call_of.kwargs)
    except X86QuantError as error:
        return animal.name, "refused", "", "", "", str(error).splitlines()[0][:100]
    ours, exact = call(int8, given), call(model, given)
    try:
        theirs, kernels = _run(path, call_of)
    except Exception as error:  # it may lack a kernel: of bfloat16, of convolutions in double
        return animal.name, "not run", "", "", "", str(error).splitlines()[0][:100]
    wanted = tensors_in(ours)  # a cache's, too
    between, rounding = sqnr(wanted, theirs), sqnr(tensors_in(exact), wanted)
    verdict = "same" if between >= min(rounding, 60.0) else "WRONG"
    return animal.name, verdict, f"{between:.1f}", f"{rounding:.1f}", str(kernels), ""


def _run(path: Path, given: Call) -> tuple[list[torch.Tensor], int]:
    """The results of ONNX Runtime, and how many int8 kernels ran."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    left: dict[str, Any] = dict(
        zip(_input_names(path), (x.numpy() for x in given.leaves), strict=True)
    )
    results = session.run(None, {name: left[name] for name in names})
    kinds = collections.Counter(
        node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node
    )
    count = sum(n for kind, n in kinds.items() if kind.startswith(_INT8))
    return [torch.from_numpy(x.copy()) for x in results], count


def _input_names(path: Path) -> list[str]:
    return [one.name for one in onnx.load(path).graph.input]


def main() -> int:
    """Judge them, print a table, and return 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--every", type=int, default=1, help="every so many of the zoo")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print_environment()
    chosen = [a for a in ZOO if not options.only or a.name in options.only][:: options.every]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for animal in chosen:
            if animal.refused is None and not animal.slow:
                rows.append(judged(animal, Path(folder)))
                print(*rows[-1], flush=True, file=sys.stderr)
    header = ("model", "", "dB between", "dB against float", "int8 kernels", "why")
    print(text_table(header, [list(row) for row in rows]))
    counts = collections.Counter(row[1] for row in rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())

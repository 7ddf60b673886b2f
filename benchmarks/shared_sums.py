"""Which products share a 16-bit sum? Asks FBGEMM, oneDNN and QNNPACK, and records the answer.

    python -m benchmarks.shared_sums            # print what this CPU does
    python -m benchmarks.shared_sums --write    # and record it in kernels/shared_sums.json
    python -m benchmarks.shared_sums --only qnnpack --only onednn/grouped

How is told in ``kernels/probing/shared_sums.py``. ``X86QUANT_ISA`` gives the answer of lower
levels, except where a library looks past it. Those need a CPU of the level, or one emulated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

import torch

from x86quant.hardware.cpu import cpu
from x86quant.kernels import saturation
from x86quant.kernels.probing.shared_sums import Answer, probe


def record(answer: Answer, machine: str) -> str:
    """The text of ``shared_sums.json`` with this answer, for an older one of this machine."""
    old = json.loads(saturation.PROBED.read_text())["probed"] if saturation.PROBED.exists() else []
    new = {**dataclasses.asdict(answer), "torch": torch.__version__.split("+")[0], "on": machine}
    keys = ("kernel", "family", "instructions", "on")
    merged = {tuple(one[key] for key in keys): one for one in (*old, new)}
    lines = ",\n".join(json.dumps(merged[key]) for key in sorted(merged))
    return f'{{\n"schema": 1,\n"probed": [\n{lines}\n]\n}}\n'


def main() -> None:
    """Print, and if asked record, what this CPU does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help=f"record it in {saturation.PROBED}")
    parser.add_argument("--machine", help="its name in the record, such as an emulated CPU's")
    parser.add_argument(
        "--only", action="append", default=[], metavar="KERNEL[/FAMILY]", help="may be repeated"
    )
    options = parser.parse_args()
    here = cpu()
    level = f" capped to {here.isa}" if here.withheld else ""
    for answer in probe(here, options.only):
        print(answer, flush=True)
        if options.write:  # each at once: an emulated CPU takes an hour for all
            machine = options.machine or f"{here.name}{level}"
            saturation.PROBED.write_text(record(answer, machine))


if __name__ == "__main__":
    main()

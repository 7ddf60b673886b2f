"""Tries out one library and prints what was seen: ``python -m x86quant.kernels.probing onednn``.

A line of JSON before each part and one behind it, so that who reads it knows in which it died.
Names of parts that follow are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from x86quant.hardware.cpu import cpu
from x86quant.spec import OpSpec
from x86quant.tables.errata import read_errata

from .. import all_kernels
from . import libraries, random_layers, shared_sums, trial

#: A part's name, and what runs it and answers with words for the one who reads.
Part = tuple[str, Callable[[], dict[str, Any]]]


def parts(library: str) -> Iterator[Part]:
    """Everything that is asked of ``library``."""
    here, kernel = cpu(), all_kernels()[library]
    errata = read_errata(libraries.judged_as(torch.__version__))
    known = [erratum for erratum in errata if erratum.kernel == library]

    def legal(spec: OpSpec) -> bool:
        return not kernel.not_supported_reasons(spec, here) and not any(
            erratum.matches(spec, here) for erratum in known
        )

    def layout(family: str) -> dict[str, Any]:
        try:
            (answer,) = shared_sums.probe(here, [f"{library}/{family}"])
        except ValueError as error:
            return {"why": str(error)}
        return {"instructions": answer.instructions, "layout": answer.layout}

    def layers(specs: list[OpSpec]) -> dict[str, Any]:
        found = random_layers.first_wrong(library, specs)
        return {} if found is None else {"why": str(found)}

    for name in shared_sums.families(library, here):
        yield f"sums {name}", lambda name=name: layout(name)  # type: ignore[misc]
    for op, family, specs in random_layers.families(kernel, legal):
        yield f"layers {op} {family}", lambda specs=specs: layers(specs)  # type: ignore[misc]


def main() -> None:
    """Run the parts of the library that is named first, but not those named behind it."""
    library, *skipped = sys.argv[1:]
    torch.set_num_threads(1)
    with trial.everything_trusted():
        for name, ask in parts(library):
            if name not in skipped:
                print(json.dumps({"begins": name}), flush=True)
                print(json.dumps({"part": name, **ask()}), flush=True)


if __name__ == "__main__":
    main()

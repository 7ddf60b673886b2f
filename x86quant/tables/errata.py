"""Errata: kernels that are wrong in some versions of torch, as data with references."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from x86quant.spec import OpSpec
from x86quant.tables.conditions import OPS, Pattern, Span
from x86quant.tables.features import FEATURES
from x86quant.tables.shipped import SHIPPED
from x86quant.tables.table import SCHEMA
from x86quant.tables.table_reader import read_patterns
from x86quant.tables.table_text import TableText, parse_toml, read_text

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu

#: The feature that packed layers look at as they run: see ``Erratum.widths``.
WIDTH = "out_width"


@dataclasses.dataclass(frozen=True)
class Erratum(Pattern):
    """Ops that ``kernel`` gets wrong in some versions of torch.

    What is unknown because the op has not run yet counts as matched: a kernel is not used where it
    may turn out wrong. The width of the output alone is left open, since packed layers look at it.
    """

    kernel: str
    because: str
    reference: str
    torch: str

    def matches(self, spec: OpSpec, cpu: Cpu) -> bool:
        """Whether ``kernel`` gets ``spec`` on ``cpu`` wrong, or may do so once it runs."""
        return self._concerns_op(spec, cpu, self.when.keys())

    def widths(self, spec: OpSpec, cpu: Cpu) -> tuple[Span, ...]:
        """The widths of the output, unknown so far, at which ``kernel`` is wrong."""
        if WIDTH not in self.when or FEATURES[WIDTH].get(spec, cpu) is not None:
            return ()
        others = self.when.keys() - {WIDTH}
        return self.when[WIDTH].spans if self._concerns_op(spec, cpu, others) else ()

    def _concerns_op(self, spec: OpSpec, cpu: Cpu, names: Iterable[str]) -> bool:
        """Whether ``spec`` is such an op as far as the features ``names`` tell."""
        if spec.op not in OPS[self.op]:
            return False
        for name in names:
            value = FEATURES[name].get(spec, cpu)
            open_until_run = value is None and FEATURES[name].run_time and name != WIDTH
            if not open_until_run and not self.when[name].matches(value):
                return False
        return True

    def concerns(self, torch_version: str) -> bool:
        """Whether ``torch_version`` is among the versions that are wrong."""
        found = _version(torch_version)
        tests = {
            ">=": lambda bound: found >= bound,
            ">": lambda bound: found > bound,
            "<=": lambda bound: found <= bound,
            "<": lambda bound: found < bound,
            "==": lambda bound: found == bound,
        }
        parts = _VERSIONS.findall(self.torch)
        return all(tests[sign](_version(bound)) for sign, bound in parts)


_VERSIONS = re.compile(r"(>=|<=|==|>|<) *(\d+(?:\.\d+)*)")
_ERRATUM_KEYS = {"kernel", "torch", "op", "when", "because", "reference"}


def _version(text: str) -> tuple[int, ...]:
    """``"2.13.0+cpu"`` as (2, 13, 0): three numbers, whatever was left out or follows."""
    numbers = [int(n) for n in re.findall(r"\d+", re.split(r"[+a-z]", text)[0])]
    return tuple([*numbers, 0, 0][:3])


def read_errata(
    torch_version: str, path: str | os.PathLike[str] = SHIPPED / "errata.toml"
) -> tuple[Erratum, ...]:
    """The errata in a file that concern a version of torch; RuleError if the file is wrong."""
    text = read_text(path)
    data, source = parse_toml(text, str(path)), TableText(text, str(path))
    if data.get("schema") != SCHEMA:
        source.fail(f"schema must be {SCHEMA}; upgrade x86quant if it is newer", key="schema")
    source.check_keys(data, {"schema", "erratum"})
    errata = []
    for index, item, op, when in read_patterns(
        source, data.get("erratum", []), "erratum", _ERRATUM_KEYS
    ):
        texts = {}
        for key in ("kernel", "because", "reference", "torch"):
            texts[key] = source.text(item, key, "erratum", index)
            if not texts[key]:
                source.fail(f"an erratum must give its {key}", "erratum", index, key)
        parts = texts["torch"].split(",")
        if not all(_VERSIONS.fullmatch(part.strip()) for part in parts):
            source.fail('write versions like ">=2.13, <2.14"', "erratum", index, "torch")
        errata.append(Erratum(op, when, **texts))
    return tuple(erratum for erratum in errata if erratum.concerns(torch_version))

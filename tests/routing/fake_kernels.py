"""Kernels that are none, for tests of the choose loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests import isa
from x86quant.hardware.cpu import Cpu
from x86quant.kernels.base import Situation
from x86quant.routing import in_force as active_rules
from x86quant.spec import OpSpec
from x86quant.tables.shipped import find_table
from x86quant.tables.table_reader import read_table

AMX = isa.at("amx_int8")


VNNI = isa.at("avx512_vnni")


@dataclasses.dataclass
class FakeKernel:
    """A kernel that refuses what ``refuse`` gives a reason for."""

    name: str
    requires: frozenset[str] = frozenset()
    refuse: Callable[[OpSpec], str | None] = lambda spec: None
    where: Mapping[Situation, str] = dataclasses.field(default_factory=dict)
    row_breaks: frozenset[int] = frozenset()

    def situations(self, spec: OpSpec, cpu: Cpu) -> Mapping[Situation, str]:
        return self.where

    def missing_features(self, cpu: Cpu) -> list[str]:
        return sorted(self.requires - cpu.features)

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        reason = self.refuse(spec)
        return [reason] if reason else []


def no_output_padding(spec: OpSpec) -> str | None:
    return "no output padding" if any(spec.output_padding) else None


KERNELS: dict[str, Any] = {
    "fbgemm": FakeKernel("fbgemm", frozenset({"avx2"})),
    "onednn": FakeKernel("onednn", frozenset({"avx2"}), no_output_padding),
    "native": FakeKernel("native", frozenset({"avx2"})),
    "qnnpack": FakeKernel("qnnpack"),
}


STOCK = read_table(find_table("pytorch-2.0"), KERNELS)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("X86QUANT_RULES", raising=False)
    # What is in force must not depend on which levels have a table of their own.
    monkeypatch.setattr(active_rules, "shipped_tables", lambda: {"default": find_table("default")})
    active_rules.reset()
    yield
    active_rules.reset()

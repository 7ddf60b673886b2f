"""The C interfaces of ``lookup.h`` and ``gates.h`` through ctypes and numpy, for tests."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.native.capi import ISAS, Bytes, Floats, Library

MODES = ("sum", "mean", "max")
FAULTS = ("", "index", "first", "offset", "last")
Integers = npt.NDArray[np.int32] | npt.NDArray[np.int64]


def _fields(text: str) -> list[tuple[str, Any]]:
    """Fields as C writes them: ``p rows; l count; i bits``, of pointers, int64, int32, floats."""
    types: dict[str, Any] = {
        "p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float
    }  # fmt: skip
    return [
        (name, types[group.split()[0]])
        for group in text.split(";")
        for name in group.split(maxsplit=1)[1].replace(",", " ").split()
    ]


class Lookup(ctypes.Structure):
    """``xq_lookup``."""

    _fields_ = _fields(
        "p rows; l row_count, row_stride; i dim, bits, codes_at, scale_at, half, mode, isa, "
        "long_indices; p indices, offsets; l index_count, bags, each; i last_offset; p weights; "
        "l padding; p out; l out_stride"
    )


class Fault(ctypes.Structure):
    """``xq_lookup_fault``."""

    _fields_ = _fields("i kind; l position, value")


class Interaction(ctypes.Structure):
    """``xq_interaction``."""

    _fields_ = _fields(
        "p first, in_, out; l samples, first_stride, in_stride, out_stride; "
        "i vectors, dim, isa, squares"
    )


class LstmGates(ctypes.Structure):
    """``xq_lstm_gates``."""

    _fields_ = _fields(
        "p own, hidden; l own_stride, hidden_stride; p c, h; l c_stride, h_stride, units; i isa"
    )


class GruGates(ctypes.Structure):
    """``xq_gru_gates``."""

    _fields_ = _fields(
        "p own, hidden; l own_stride, hidden_stride; p before, h; "
        "l before_stride, h_stride, units; i isa"
    )


class FloatProduct(ctypes.Structure):
    """``xq_float_product``."""

    _fields_ = _fields(
        "p in_, weight, bias, out; l in_stride, out_stride, features, out_features, panel; "
        "l skipped; i onto, isa"
    )


class FloatTaps(ctypes.Structure):
    """``xq_float_taps``."""

    _fields_ = _fields(
        "p in_, weight, bias, out, offsets, which; l in_stride, out_stride, channels, taps; "
        "i across, isa"
    )


class FloatFunction(ctypes.Structure):
    """``xq_float_function``."""

    _fields_ = _fields("i kind; f a")


@dataclasses.dataclass(frozen=True)
class Table:
    """Quantized rows and how they are laid out."""

    rows: Bytes
    dim: int
    bits: int
    half: bool
    front: bool = False

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes."""
        return (self.dim * self.bits + 7) // 8


class FaultError(ValueError):
    """An index or an offset is wrong; the text is the kind, the position and the value."""


def look_up(
    library: Library,
    isa: str,
    table: Table,
    indices: Integers,
    offsets: Integers | None,
    *,
    mode: str = "sum",
    weights: Floats | None = None,
    padding: int = -1,
    last_offset: bool = False,
    each: int = 0,
    parts: int = 1,
) -> Floats:
    """One table's pooled rows; ``parts`` is how many calls share the bags."""
    bags = len(indices) // each if offsets is None else len(offsets) - last_offset
    out = np.full((bags, table.dim + 3), np.nan, np.float32)
    scale_bytes = 0 if table.bits == 32 else 4 if table.half else 8
    op = Lookup(
        rows=table.rows.ctypes.data, row_count=len(table.rows), row_stride=table.rows.shape[1],
        dim=table.dim, bits=table.bits, codes_at=scale_bytes if table.front else 0,
        scale_at=0 if table.front else table.code_bytes, half=table.half,
        mode=MODES.index(mode), isa=ISAS[isa], long_indices=indices.dtype == np.int64,
        indices=indices.ctypes.data, offsets=None if offsets is None else offsets.ctypes.data,
        index_count=len(indices), bags=bags, each=each, last_offset=last_offset,
        weights=None if weights is None else weights.ctypes.data, padding=padding,
        out=out.ctypes.data, out_stride=out.shape[1],
    )  # fmt: skip
    library.check(library.lib.xq_lookup_check(ctypes.byref(op)))
    fault = Fault()
    for part in range(parts):
        begin, end = (ctypes.c_int64(bags * (part + i) // parts) for i in (0, 1))
        if not library.lib.xq_lookup_run(ctypes.byref(op), begin, end, ctypes.byref(fault)):
            raise FaultError(f"{FAULTS[fault.kind]} {fault.position} {fault.value}")
    assert np.isnan(out[:, table.dim :]).all()  # nothing beside a bag's columns is written
    return out[:, : table.dim].copy()


def interact(
    library: Library, isa: str, first: Floats, vectors: Floats, squares: bool = False
) -> Floats:
    """``first`` [samples, dim], then the products of ``vectors`` [samples, vectors, dim]."""
    samples, count, dim = vectors.shape
    products = count * (count + 1) // 2 + squares * (count + 1)
    out = np.full((samples, dim + products), np.nan, np.float32)
    op = Interaction(
        first=first.ctypes.data, in_=vectors.ctypes.data, out=out.ctypes.data, samples=samples,
        first_stride=dim, in_stride=count * dim, out_stride=out.shape[1], vectors=count, dim=dim,
        isa=ISAS[isa], squares=squares,
    )  # fmt: skip
    library.check(library.lib.xq_interaction_check(ctypes.byref(op)))
    library.lib.xq_interaction_run(ctypes.byref(op), ctypes.c_int64(0), ctypes.c_int64(samples))
    return out


def lstm_gates(
    library: Library, isa: str, own: Floats, hidden: Floats, c: Floats
) -> tuple[Floats, Floats]:
    """The new h and c of sequences [n, units]."""
    c, h = c.copy(), np.empty_like(c)
    gates, units = own.shape[1], c.shape[1]
    op = LstmGates(
        own=own.ctypes.data, hidden=hidden.ctypes.data, own_stride=gates, hidden_stride=gates,
        c=c.ctypes.data, h=h.ctypes.data, c_stride=units, h_stride=units, units=units,
        isa=ISAS[isa],
    )  # fmt: skip
    library.lib.xq_lstm_gates_run(ctypes.byref(op), ctypes.c_int64(0), ctypes.c_int64(len(c)))
    return h, c


def gru_gates(library: Library, isa: str, own: Floats, hidden: Floats, before: Floats) -> Floats:
    """The new state of sequences [n, units]."""
    h = np.empty_like(before)
    gates, units = own.shape[1], before.shape[1]
    op = GruGates(
        own=own.ctypes.data, hidden=hidden.ctypes.data, own_stride=gates, hidden_stride=gates,
        before=before.ctypes.data, h=h.ctypes.data, before_stride=units, h_stride=units,
        units=units, isa=ISAS[isa],
    )  # fmt: skip
    library.lib.xq_gru_gates_run(ctypes.byref(op), ctypes.c_int64(0), ctypes.c_int64(len(h)))
    return h


def float_product(
    library: Library, isa: str, rows: Floats, weight: Floats, bias: Floats, width: int,
    parts: Sequence[int] = (),
) -> Floats:  # fmt: skip
    """Rows [n, features] times weights [panel, feature, 16], in rows that are ``width`` apart.

    In calls of the features up to each of ``parts`` and the rest.
    """
    outputs, features = len(bias), weight.shape[1]
    biases = np.zeros(weight.shape[0] * 16, np.float32)
    biases[:outputs] = bias
    out = np.full((len(rows), width), np.nan, np.float32)
    for begin, end in itertools.pairwise([0, *parts, features]):
        op = FloatProduct(
            in_=rows.ctypes.data + 4 * begin, weight=weight.ctypes.data, bias=biases.ctypes.data,
            out=out.ctypes.data, in_stride=rows.shape[1], out_stride=width, features=end - begin,
            out_features=outputs, panel=features, skipped=begin, onto=begin > 0, isa=ISAS[isa],
        )  # fmt: skip
        rows_of = (ctypes.c_int64(0), ctypes.c_int64(len(out)))
        library.lib.xq_float_product_run(ctypes.byref(op), *rows_of)
    return out


def float_taps(
    library: Library, isa: str, pixels: Floats, weight: Floats, bias: Floats,
    taps: tuple[Integers, Integers], count: int, across: int = 1,
) -> Floats:  # fmt: skip
    """``count`` pixels, one behind the other, whose taps are offsets and rows of ``weight``."""
    channels = weight.shape[1]
    offsets, which = taps[0].astype(np.int64), taps[1].astype(np.int32)
    out = np.full((count, channels + 1), np.nan, np.float32)
    op = FloatTaps(
        in_=pixels.ctypes.data, weight=weight.ctypes.data, bias=bias.ctypes.data,
        out=out.ctypes.data, offsets=offsets.ctypes.data, which=which.ctypes.data,
        in_stride=channels, out_stride=channels + 1, channels=channels, taps=len(offsets),
        across=across, isa=ISAS[isa],
    )  # fmt: skip
    library.lib.xq_float_taps_run(ctypes.byref(op), ctypes.c_int64(0), ctypes.c_int64(count))
    return out


def float_functions(
    library: Library, isa: str, functions: list[tuple[int, float]], values: Floats
) -> Floats:
    """``functions``, each a kind and a number, of each value."""
    out = values.copy()
    given = (FloatFunction * len(functions))(*(FloatFunction(*one) for one in functions))
    library.lib.xq_float_functions_run(
        given, ctypes.c_int64(len(functions)), ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(out.size), ctypes.c_int32(ISAS[isa]),
    )  # fmt: skip
    return out

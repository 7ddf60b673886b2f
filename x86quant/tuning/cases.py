"""What to measure: shapes of layers, times batch or rows, threads, post-op and cache.

Shapes come from a CSV file (``rules/layers.csv`` or the user's own), whose columns are ``op``,
``net``, ``layer`` (``name*3`` occurs three times in its network), ``groups``, ``ic``, ``oc`` and,
for depth, height and width, the input size ``id,ih,iw`` and ``k``, ``s``, ``p``, ``d`` (kernel,
stride, padding, dilation) alike; ``transposed`` and the output padding ``od,oh,ow`` may be there.
An ``embedding_bag`` is a table: ``ic`` are its rows, ``oc`` the values of each.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from x86quant.errors import InvalidInputError, MeasurementError
from x86quant.spec import ROUTED_KINDS, OpSpec, lookup_spec
from x86quant.tables.conditions import did_you_mean
from x86quant.tables.shipped import SHIPPED
from x86quant.tuning.layer_shapes import TABLE_BITS, WEIGHT_BITS, nonsense, with_rows
from x86quant.tuning.measurement_files import Row, read_lines, rows
from x86quant.tuning.measurements import Cache, Caller, Case

#: The public networks' layers that come with x86quant.
LAYERS = SHIPPED / "layers.csv"
#: Shapes between and around those of networks, which rules are learned from but not judged by.
PROBES = SHIPPED / "probes.csv"
#: Embedding tables of recommenders and language models, and probes between them.
EMBEDDINGS = SHIPPED / "embeddings.csv"

#: What each caller fuses behind an op; None is nothing.
POST_OPS: Mapping[Caller, tuple[str | None, ...]] = {
    "stock": (None, "relu"),
    "graph": (None, "relu", "add", "lut"),
}

_AXES = "dhw"
_SIDES = tuple(prefix + axis for prefix in "ikspd" for axis in _AXES)
_COLUMNS = ("op", "net", "layer", "groups", "ic", "oc", *_SIDES)
_OPTIONAL = ("transposed", "od", "oh", "ow")
_FIELDS = {"k": "kernel", "s": "stride", "p": "padding", "d": "dilation", "o": "output_padding"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer of a network. ``spec`` has batch and rows only where they are fixed."""

    spec: OpSpec
    net: str
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Grid:
    """What each shape is measured with; every combination is a case.

    A shape whose batch or rows are known keeps them.

    Attributes:
        callers: who calls the kernels.
        threads: numbers of threads.
        batches: batch sizes of convolutions.
        rows: rows of linears.
        bags: bags of a call of embedding tables.
        each: indices of a bag.
        bits: bits of a code of embedding tables.
        dynamic: linears with static (False) and dynamic (True) activations.
        weight_bits: bits of the weights of linears; of 4, all input features are in groups.
        weight_groups: input features that share a scale then.
        post_ops: what is fused behind the op; None is nothing.
        caches: whether operands stay in the caches.
        most_work: multiply-adds above which a case with more than the smallest batch is left out.
    """

    callers: tuple[Caller, ...] = get_args(Caller)
    threads: tuple[int, ...] = (1,)
    batches: tuple[int, ...] = (1, 8)
    rows: tuple[int, ...] = (1, 4, 16, 64, 256)
    bags: tuple[int, ...] = (1, 128, 2048)
    each: tuple[int, ...] = (1, 20)
    bits: tuple[int, ...] = TABLE_BITS
    dynamic: tuple[bool, ...] = (False, True)
    weight_bits: tuple[int, ...] = WEIGHT_BITS
    weight_groups: tuple[int, ...] = (32, 128)
    post_ops: tuple[str | None, ...] = (None,)
    caches: tuple[Cache, ...] = get_args(Cache)
    most_work: int = 8 * 10**9


def read_shapes(path: str | os.PathLike[str]) -> tuple[Shape, ...]:
    """The layers in a CSV file; MeasurementError names the line that makes no sense."""
    where = os.fspath(path)
    found = tuple(
        _read_shape(row) for row in rows(read_lines(path), where, _COLUMNS, optional=_OPTIONAL)
    )
    if not found:
        raise MeasurementError(f"{where}: no shapes below the header; add one line a layer")
    return found


def _read_shape(row: Row) -> Shape:
    op = row.text("op", ROUTED_KINDS)
    dims = int(op[4]) if op.startswith("conv") else 0
    sizes: dict[str, Any] = {field: _sides(row, prefix, dims) for prefix, field in _FIELDS.items()}
    spec = OpSpec(
        op=op,  # type: ignore[arg-type]
        in_channels=row.integer("ic"),
        out_channels=row.integer("oc"),
        groups=row.integer("groups", default=1),
        transposed=row.text("transposed", ("", "true", "false")) == "true",
        spatial=_sides(row, "i", dims) if dims else None,
        **sizes,
    )
    spec = spec.replace(per_channel=not spec.transposed)
    if op == "embedding_bag":
        spec = lookup_spec(
            spec.in_channels, spec.out_channels, None, "sum", stock_rows=True, caller=None
        )
    if problem := nonsense(spec):
        field, why = problem
        row.fail(_column_of(field, dims), why)
    return Shape(spec, row.text("net") or "shapes", _count(row.text("layer")))


def _sides(row: Row, prefix: str, dims: int) -> tuple[int, ...]:
    """The last ``dims`` of depth, height and width; the others must be empty."""
    for axis in _AXES[: 3 - dims]:
        if row.text(prefix + axis):
            row.fail(prefix + axis, f"a {row.text('op')} has none; leave it empty")
    default = 0 if prefix == "o" else None
    return tuple(row.integer(prefix + axis, default=default) for axis in _AXES[3 - dims :])


def _column_of(field: str, dims: int) -> str:
    """The column of the shapes file in which a field of the spec stands."""
    prefixes = {name: prefix for prefix, name in _FIELDS.items()} | {"spatial": "i"}
    if field in prefixes:
        return prefixes[field] + (_AXES[3 - dims] if dims else _AXES[0])
    return {"in_channels": "ic", "out_channels": "oc"}.get(field, field)


def _count(layer: str) -> int:
    found = re.search(r"\*(\d{1,6})$", layer)
    return int(found[1]) if found else 1


def select(
    shapes: Sequence[Shape], *, ops: Sequence[str] = (), nets: Sequence[str] = ()
) -> tuple[Shape, ...]:
    """The shapes of these ops and networks; all where none are named.

    Raises:
        InvalidInputError: one of them does not occur.
    """
    for wanted, present, what in (
        (ops, {s.spec.op for s in shapes}, "op"),
        (nets, {s.net for s in shapes}, "network"),
    ):
        for name in wanted:
            if name not in present:
                raise InvalidInputError(
                    f"no shape has the {what} {name!r}; {did_you_mean(name, sorted(present))}"
                )
    return tuple(s for s in shapes if (not ops or s.spec.op in ops) and (not nets or s.net in nets))


def supports(caller: Caller, spec: OpSpec) -> bool:
    """Whether ``caller`` has an op like this at all."""
    if spec.post_op not in POST_OPS[caller]:
        return False
    if spec.weight_group and caller == "stock":
        return False
    if spec.op == "embedding_bag":  # the stock modules' tables have no 2 bits
        return not spec.post_op and (caller == "graph" or spec.bits != 2)
    if caller == "graph" and spec.dynamic:  # a linear on float tensors
        return spec.post_op in (None, "relu")
    if caller == "graph":
        return True
    # The stock operators have no transposed convolution with a fused ReLU.
    return not (spec.transposed and spec.post_op)


def jobs(
    shapes: Iterable[Shape], grid: Grid, *, machine: str, isa: str
) -> tuple[tuple[Case, ...], ...]:
    """Every case of the shapes, each once, with all networks it occurs in.

    Cases of one job share their op, and so their operands. The smallest batch of every shape comes
    first, so that a budget that ends too early has still seen all shapes.
    """
    nets: dict[OpSpec, dict[str, int]] = {}
    for shape in shapes:
        counts = nets.setdefault(shape.spec, {})
        counts[shape.net] = counts.get(shape.net, 0) + shape.count
    sized = [
        (order, spec.replace(threads=threads, post_op=post_op), tuple(sorted(counts.items())))
        for shape_spec, counts in nets.items()
        for order, spec in enumerate(_sizes(shape_spec, grid))
        for threads in grid.threads
        for post_op in grid.post_ops
    ]
    found = (
        tuple(
            Case(machine, isa, caller, spec, cache, occurs)
            for caller in grid.callers
            if supports(caller, spec)
            for cache in grid.caches
        )
        for _, spec, occurs in sorted(sized, key=lambda item: item[0])
    )
    return tuple(job for job in found if job)


def _sizes(spec: OpSpec, grid: Grid) -> Iterator[OpSpec]:
    """A shape at every batch size, or number of rows or bags, that is not too much work."""
    if spec.op == "linear":
        sizes = grid.rows if spec.rows is None else (spec.rows,)
        forms = tuple(_forms(spec, grid))
        options = [form.replace(rows=n) for n in sizes for form in forms]
    elif spec.op == "embedding_bag":
        bits = [n for n in grid.bits if spec.out_channels * n % 8 == 0]
        choices = itertools.product(grid.bags, grid.each, bits)
        options = [spec.replace(rows=n, each=each, bits=b) for n, each, b in choices]
    else:
        sizes = grid.batches if spec.batch is None else (spec.batch,)
        options = [with_rows(spec.replace(batch=n, dynamic=False)) for n in sizes]
    for number, option in enumerate(options):
        if number == 0 or (option.multiply_adds or 0) <= grid.most_work:
            yield option


def _forms(spec: OpSpec, grid: Grid) -> Iterator[OpSpec]:
    """A linear in every way that activations and weights may be quantized."""
    if 8 in grid.weight_bits:
        yield from (spec.replace(dynamic=dynamic) for dynamic in grid.dynamic)
    if 4 in grid.weight_bits and True in grid.dynamic:
        for group in grid.weight_groups:
            if spec.in_channels % group == 0:
                yield spec.replace(dynamic=True, bits=4, weight_group=group)

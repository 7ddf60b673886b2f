"""A step as the extension takes it: a kind, and the fields that its file in kernels/steps reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from x86quant.errors import NoKernelError
from x86quant.runtime import layout
from x86quant.runtime.plan import Value


@dataclasses.dataclass(eq=False, slots=True)
class NativeTensor:
    """A value as native kernels see it: n, d, h, w, c and the strides of the first four."""

    value: Value
    sizes: Sequence[int]
    strides: Sequence[int]  # in elements

    def words(self) -> list[int]:
        """The field of a step: base, offset, sizes, and strides in bytes."""
        size = self.value.meta.element_size()
        strides = self.strides if size == 1 else [stride * size for stride in self.strides]
        return [*address(self.value), *self.sizes, *strides]


@dataclasses.dataclass(eq=False, slots=True)
class NativeStep:
    """One step of a program.

    Attributes:
        kind: one of ``extension.native().step_kinds()``.
        fields: what a step of this kind reads, by name: tensors of the plan (``NativeTensor``, or
            a bare ``Value`` for the address alone), numbers, flags, lists of numbers of one type,
            tables (tensors), objects of the extension.
    """

    kind: str
    fields: Mapping[str, Any]

    def plain_fields(self) -> dict[str, Any]:
        """The fields, a base and an offset for each tensor: its buffers have places by now."""
        return {
            name: field.words() if type(field) is NativeTensor else _plain(field)
            for name, field in self.fields.items()
        }

    def add_to(self, program: Any) -> None:
        """Append the step to ``program``."""
        program.add_step(self.kind, self.plain_fields())


def _plain(field: Any) -> Any:
    return address(field) if isinstance(field, Value) else field


def address(value: Value) -> list[int]:
    """Base and offset of the first byte."""
    buffer, meta = value.buffer, value.meta
    first = meta.storage_offset()
    inside = int(first) * meta.element_size() if first else 0
    return [buffer.base, buffer.offset + inside]


def as_image(value: Value) -> NativeTensor:
    """A tensor [N, C, *spatial]."""
    return NativeTensor(value, *value.image)


def as_rows(values: Sequence[Value], channel: int) -> list[NativeTensor]:
    """Tensors that differ at most in their channels, as rows of these.

    Raises:
        NoKernelError: they have more dimensions than a native tensor.
    """
    found = layout.rows([value.meta for value in values], channel)
    if found is None:
        raise NoKernelError("its tensors have too many dimensions that lie apart")
    return [NativeTensor(value, *sizes) for value, sizes in zip(values, found, strict=True)]


def rows_of(values: Sequence[Value], out: Value, channel: int) -> dict[str, NativeTensor]:
    """Fields ``a``, perhaps ``b``, and ``out``: tensors of one shape as rows of channels."""
    names = [*"ab"[: len(values)], "out"]
    return dict(zip(names, as_rows([*values, out], channel), strict=True))


def images_of(x: Value, out: Value) -> dict[str, NativeTensor]:
    """Fields ``a`` and ``out``: images."""
    return {"a": as_image(x), "out": as_image(out)}

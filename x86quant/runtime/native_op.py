"""Ops on codes in the terms of the native kernels: see ``kernels/native/native.h``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.errors import NoKernelError
from x86quant.runtime import layout
from x86quant.runtime.plan import Value

_Kwargs = Mapping[str, Any]
_Sizes = tuple[list[int], list[int]]


@dataclasses.dataclass(frozen=True)
class NativeOp:
    """One ``xq_op``: its kind, its tensors with their sizes and strides, its other fields."""

    name: str
    tensors: Mapping[str, tuple[Value, _Sizes]]
    integers: Mapping[str, list[int]] = dataclasses.field(default_factory=dict)
    reals: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    tables: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def add_to(self, program: Any) -> None:
        """Append the op to ``program``; its buffers have their places by now."""
        program.add_op(
            self.name,
            {name: self.words(value, *sizes) for name, (value, sizes) in self.tensors.items()},
            dict(self.integers),
            dict(self.reals),
            dict(self.tables),
        )

    @staticmethod
    def address(value: Value) -> list[int]:
        """Base and offset of the first byte."""
        inside = int(value.meta.storage_offset()) * value.meta.element_size()
        return [value.buffer.base, value.buffer.offset + inside]

    @staticmethod
    def words(value: Value, sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
        """A tensor as ``Program`` takes it: base, offset, n, d, h, w, c and strides in bytes."""
        size = value.meta.element_size()
        return [*NativeOp.address(value), *sizes, *(stride * size for stride in strides)]

    @classmethod
    def copying(cls, source: Value, target: Value) -> NativeOp | None:
        """A copy between tensors of one shape; None if no native op can do it."""
        if source.meta.dtype != torch.uint8 or source.meta.dim() == 0:
            return None
        innermost = layout.order_of(target.meta)[-1]
        if layout.fits(source.meta, innermost) and layout.fits(target.meta, innermost):
            rows = layout.rows([source.meta, target.meta], innermost)
            if rows is None:
                return None
            return cls("copy", {"a": (source, rows[0]), "out": (target, rows[1])})
        return cls._shuffling(source, target)

    @classmethod
    def _shuffling(cls, source: Value, target: Value) -> NativeOp | None:
        """Channels that are groups of adjacent codes in ``source``, interleaved in ``target``."""
        axes = [i for i in layout.order_of(target.meta) if target.meta.shape[i] != 1]
        if len(axes) < 2:
            return None
        within, group = axes[-2:]
        each, groups = target.meta.shape[within], target.meta.shape[group]
        strides = [(m.stride(within), m.stride(group)) for m in (source.meta, target.meta)]
        if strides != [(1, each), (groups, 1)]:
            return None
        rest = [i for i in range(target.meta.dim()) if i not in (within, group)]
        joined = [_joined(m, rest, each * groups) for m in (source.meta, target.meta)]
        rows = layout.rows(joined, -1)
        if rows is None:
            return None
        return cls(
            "shuffle", {"a": (source, rows[0]), "out": (target, rows[1])}, {"groups": [groups]}
        )

    @classmethod
    def quantize(cls, node: Node, x: Value, out: Value) -> NativeOp:
        """From float32 of any strides."""
        kwargs: Any = node.kwargs
        channel, (of_x, of_out) = _float_and_codes(x.meta, out.meta)
        return cls(
            "quantize",
            {"a": (x, of_x), "out": (out, of_out)},
            {"out_zp": [kwargs["out_zp"]], "a_stride_c": [4 * x.meta.stride(channel)]},
            {"a_mult": [1.0 / kwargs["out_scale"]]},
        )

    @classmethod
    def dequantize(cls, node: Node, x: Value, out: Value) -> NativeOp:
        """To float32."""
        kwargs: Any = node.kwargs
        channel, (of_out, of_x) = _float_and_codes(out.meta, x.meta)
        return cls(
            "dequantize",
            {"a": (x, of_x), "out": (out, of_out)},
            {"a_zp": [kwargs["x_zp"]], "out_stride_c": [4 * out.meta.stride(channel)]},
            {"a_mult": [kwargs["x_scale"]]},
        )

    @classmethod
    def lut(
        cls, table: torch.Tensor, values: Sequence[Value], out: Value, channel: int
    ) -> NativeOp:
        """A table look-up."""
        return cls("lut", _in_rows(values, out, channel), tables={"lut": table})

    @classmethod
    def requantize(
        cls, kwargs: _Kwargs, values: Sequence[Value], out: Value, channel: int
    ) -> NativeOp:
        """The same reals in other codes."""
        return cls(
            "requantize",
            _in_rows(values, out, channel),
            {"a_zp": [kwargs["x_zp"]], "out_zp": [kwargs["out_zp"]]},
            {"a_mult": [kwargs["x_scale"] / kwargs["out_scale"]]},
        )

    @classmethod
    def add(
        cls,
        kwargs: _Kwargs,
        tables: Mapping[str, torch.Tensor],
        values: Sequence[Value],
        out: Value,
        channel: int,
    ) -> NativeOp:
        """A sum of tensors of one shape."""
        reals = {f"{x}_mult": [kwargs[f"{x}_scale"] / kwargs["out_scale"]] for x in "ab"}
        return cls("add", _in_rows(values, out, channel), _binary(kwargs), reals, tables)

    @classmethod
    def mul(
        cls,
        kwargs: _Kwargs,
        tables: Mapping[str, torch.Tensor],
        values: Sequence[Value],
        out: Value,
        channel: int,
    ) -> NativeOp:
        """A product of tensors of one shape."""
        return cls("mul", _in_rows(values, out, channel), _binary(kwargs), _product(kwargs), tables)

    @classmethod
    def mul_by_point(
        cls,
        kwargs: _Kwargs,
        tables: Mapping[str, torch.Tensor],
        a: Value,
        b: Value,
        out: Value,
        swapped: bool,
    ) -> NativeOp:
        """A product with one pixel an image, ``b``; ``swapped`` if the node has them reversed."""
        tensors = {
            name: (value, layout.image(value.meta))
            for name, value in (("a", a), ("b", b), ("out", out))
        }
        integers = _binary(kwargs)
        if swapped:
            integers["a_zp"], integers["b_zp"] = integers["b_zp"], integers["a_zp"]
        return cls("mul", tensors, integers, _product(kwargs), tables)

    @classmethod
    def affine(
        cls,
        kwargs: _Kwargs,
        tables: Mapping[str, torch.Tensor],
        x: Value,
        out: Value,
        channel: int,
    ) -> NativeOp:
        """A scale and a shift a channel."""
        out_scale = kwargs["out_scale"]
        scale = (tables["scale"].double() * (kwargs["x_scale"] / out_scale)).float()
        shift = (tables["shift"].double() / out_scale).float()
        fields = {
            "scale_c": scale.expand(x.shape[channel]).contiguous(),
            "shift_c": shift.expand(x.shape[channel]).contiguous(),
        }
        if "lut" in tables:
            fields["lut"] = tables["lut"]
        integers = {name: [kwargs[name]] for name in ("out_zp", "lo", "hi")}
        integers["a_zp"] = [kwargs["x_zp"]]
        return cls("affine", _in_rows([x], out, channel), integers, {}, fields)

    @classmethod
    def layer_norm(
        cls,
        kwargs: _Kwargs,
        tables: Mapping[str, torch.Tensor],
        x: Value,
        out: Value,
        channel: int,
    ) -> NativeOp:
        """Normalization over the channels."""
        out_scale = kwargs["out_scale"]
        fields = {
            # One value may stand for all channels; the kernel reads one for each.
            name: (tables[source].double() / out_scale)
            .float()
            .expand(x.shape[channel])
            .contiguous()
            for name, source in (("scale_c", "weight"), ("shift_c", "bias"))
            if source in tables
        }
        return cls(
            "layer_norm",
            _in_rows([x], out, channel),
            {"a_zp": [kwargs["x_zp"]], "out_zp": [kwargs["out_zp"]]},
            {"a_mult": [1.0 / out_scale], "eps": [kwargs["eps"] / kwargs["x_scale"] ** 2]},
            fields,
        )

    @classmethod
    def pool(cls, name: str, kwargs: _Kwargs, x: Value, out: Value) -> NativeOp:
        """Any of the three pools."""
        integers: dict[str, list[int]] = {}
        if name != "adaptive_avg_pool":
            for field, source, missing in (
                ("kernel", "kernel_size", 1),
                ("stride", "stride", 1),
                ("padding", "padding", 0),
                ("dilation", "dilation", 1),
            ):
                integers[field] = _three(kwargs.get(source, ()), missing)
        reals: dict[str, list[float]] = {}
        if name != "max_pool":
            integers["a_zp"], integers["out_zp"] = [kwargs["x_zp"]], [kwargs["out_zp"]]
            reals["a_mult"] = [kwargs["x_scale"] / kwargs["out_scale"]]
        if name == "avg_pool":
            integers["count_include_pad"] = [int(kwargs["count_include_pad"])]
        return cls(name, _images(x, out), integers, reals)

    @classmethod
    def upsample(cls, name: str, kwargs: _Kwargs, x: Value, out: Value) -> NativeOp:
        """Nearest or bilinear."""
        factors = kwargs["scale_factor"] or [None] * (x.meta.dim() - 2)
        align = bool(kwargs["align_corners"])
        scales = [
            _source_step(size_in, size_out, factor, align)
            for size_in, size_out, factor in zip(x.shape[2:], out.shape[2:], factors, strict=True)
        ]
        return cls(
            kwargs["mode"],
            _images(x, out),
            {
                "a_zp": [kwargs["x_zp"]],
                "out_zp": [kwargs["out_zp"]],
                "align_corners": [int(align)],
            },
            {
                "a_mult": [kwargs["x_scale"] / kwargs["out_scale"]],
                "scale": [1.0] * (3 - len(scales)) + scales,
            },
        )


def _source_step(size_in: int, size_out: int, factor: float | None, align: bool) -> float:
    """Source pixels a destination pixel, as ``F.interpolate`` computes them."""
    if align:
        return (size_in - 1) / (size_out - 1) if size_out > 1 else 0.0
    return 1.0 / factor if factor else size_in / size_out


def _three(values: Sequence[int], missing: int) -> list[int]:
    return [missing] * (3 - len(values)) + list(values)


def _images(x: Value, out: Value) -> dict[str, tuple[Value, _Sizes]]:
    return {"a": (x, layout.image(x.meta)), "out": (out, layout.image(out.meta))}


def _in_rows(values: Sequence[Value], out: Value, channel: int) -> dict[str, tuple[Value, _Sizes]]:
    """Tensors of one shape, ``a``, perhaps ``b``, and ``out``, as rows of channels."""
    every = [*values, out]
    sizes = layout.rows([v.meta for v in every], channel)
    if sizes is None:
        raise NoKernelError("its tensors have too many dimensions that lie apart")
    names = [*"ab"[: len(values)], "out"]
    return dict(zip(names, zip(every, sizes, strict=True), strict=True))


def _binary(kwargs: _Kwargs) -> dict[str, list[int]]:
    return {name: [kwargs[name]] for name in ("a_zp", "b_zp", "out_zp", "lo", "hi")}


def _product(kwargs: _Kwargs) -> dict[str, list[float]]:
    return {"a_mult": [kwargs["a_scale"] * kwargs["b_scale"] / kwargs["out_scale"]]}


def _float_and_codes(real: torch.Tensor, codes: torch.Tensor) -> tuple[int, list[_Sizes]]:
    """The dimension of the channels, which are adjacent in ``codes``, and both tensors' sizes.

    Rows stay apart, so that there is something to share among threads.
    """
    rank = codes.dim()
    if 3 <= rank <= 5 and layout.fits(codes, 1) and codes.stride(-1) >= codes.shape[1]:
        return 1, [layout.image(real), layout.image(codes)]
    if rank == 0:
        raise NoKernelError("its tensor has no dimensions")
    channel = layout.order_of(codes)[-1]
    found = layout.rows([real, codes], channel)
    if found is None:
        raise NoKernelError("its tensors have too many dimensions that lie apart")
    return channel, found


def _joined(meta: torch.Tensor, rest: Sequence[int], channels: int) -> torch.Tensor:
    """``meta`` with two of its dimensions as one, the last."""
    return torch.empty_strided(
        [*(meta.shape[i] for i in rest), channels],
        [*(meta.stride(i) for i in rest), 1],
        dtype=meta.dtype,
        device="meta",
    )

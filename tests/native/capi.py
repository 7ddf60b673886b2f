"""The C interface of ``native.h`` through ctypes and numpy, for tests and measurements.

Tensors are numpy uint8 arrays ``(n, d, h, w, c)`` with adjacent channels; other strides are free.
The input of ``quantize`` and the output of ``dequantize`` are float32 of any strides.
"""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ISAS = {
    "reference": 0,
    "avx2": 1,
    "avx_vnni": 2,
    "avx512": 3,
    "avx512_vnni": 4,
    "amx_int8": 5,
}
ALGOS = {
    "auto": 0,
    "reference": 1,
    "dense": 2,
    "depthwise": 3,
    "grouped": 4,
    "winograd": 5,
    "winograd4": 6,
}
OPS = (
    "copy",
    "lut",
    "requant",
    "add",
    "mul",
    "shuffle",
    "max_pool",
    "avg_pool",
    "adaptive_pool",
    "nearest",
    "bilinear",
    "quantize",
    "dequantize",
    "affine",
    "layer_norm",
    "lut_real",
)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Triple = tuple[int, int, int]
_I32x3 = ctypes.c_int32 * 3


class Tensor(ctypes.Structure):
    """``xq_tensor``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("n", "d", "h", "w", "c")),
        *((f"stride_{name}", ctypes.c_int64) for name in ("n", "d", "h", "w")),
    ]

    @classmethod
    def of(cls, array: Bytes | Floats | None) -> Tensor:
        """A view of ``array``, which must outlive it."""
        if array is None:
            return cls()
        if array.ndim != 5 or array.dtype not in (np.uint8, np.float32):
            raise ValueError(
                f"need a uint8 or float32 array (n, d, h, w, c), got {array.dtype} {array.shape}"
            )
        return cls(array.ctypes.data, *array.shape, *array.strides[:4])


class Conv(ctypes.Structure):
    """``xq_conv``."""

    _fields_ = [
        ("in_channels", ctypes.c_int32),
        ("out_channels", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("kernel", _I32x3),
        ("stride", _I32x3),
        ("padding", _I32x3),
        ("dilation", _I32x3),
        ("transposed", ctypes.c_int32),
        ("algo", ctypes.c_int32),
        ("pixels", ctypes.c_int32),
    ]


class Requant(ctypes.Structure):
    """``xq_requant``."""

    _fields_ = [
        ("mult", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("lut", ctypes.c_void_p),
        ("in_zp", ctypes.c_int32),
        ("out_zp", ctypes.c_int32),
        ("lo", ctypes.c_int32),
        ("hi", ctypes.c_int32),
        ("residual", ctypes.c_int32),
        ("res_zp", ctypes.c_int32),
        ("res_mult", ctypes.c_float),
        ("slopes", ctypes.c_void_p),
    ]


class ConvCall(ctypes.Structure):
    """``xq_conv_call``."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("in_", Tensor),
        ("out", Tensor),
        ("residual", Tensor),
        ("threads", ctypes.c_int32),
    ]


class Op(ctypes.Structure):
    """``xq_op``."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("isa", ctypes.c_int32),
        ("a", Tensor),
        ("b", Tensor),
        ("out", Tensor),
        ("lut", ctypes.c_void_p),
        ("a_mult", ctypes.c_float),
        ("b_mult", ctypes.c_float),
        ("a_zp", ctypes.c_int32),
        ("b_zp", ctypes.c_int32),
        ("out_zp", ctypes.c_int32),
        ("lo", ctypes.c_int32),
        ("hi", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("kernel", _I32x3),
        ("stride", _I32x3),
        ("padding", _I32x3),
        ("dilation", _I32x3),
        ("count_include_pad", ctypes.c_int32),
        ("align_corners", ctypes.c_int32),
        ("scale", ctypes.c_float * 3),
        ("a_stride_c", ctypes.c_int64),
        ("out_stride_c", ctypes.c_int64),
        ("scale_c", ctypes.c_void_p),
        ("shift_c", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("reals", ctypes.c_void_p),
    ]


class Linear(ctypes.Structure):
    """``xq_linear``."""

    _fields_ = [(name, ctypes.c_int32) for name in ("in_features", "out_features", "activation")]


class Groups(ctypes.Structure):
    """``xq_groups``."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "in_features", "out_features", "activation", "groups", "bits", "half", "offsets",
            "unpack_from", "unpack_to",
        )
    ]  # fmt: skip


class Codes(ctypes.Structure):
    """``xq_codes``."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("codes", "scale", "zp")]


class Rows(ctypes.Structure):
    """``xq_rows``."""

    _fields_ = [
        ("isa", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("features", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("in_", Codes),
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("norm", ctypes.c_int32),
        ("norm_weight", ctypes.c_void_p),
        ("norm_bias", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("total", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("out", Codes),
        ("threads", ctypes.c_int32),
    ]


class Attention(ctypes.Structure):
    """``xq_attention``."""

    _fields_ = [
        ("isa", ctypes.c_int32),
        *(
            (name, ctypes.c_int64)
            for name in ("batch", "queries", "keys", "heads", "kv_heads", "size")
        ),
        *((name, ctypes.c_void_p) for name in "qkv"),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in "qkv"),
        ("mask", ctypes.c_void_p),
        ("mask_is_bool", ctypes.c_int32),
        ("mask_stride", ctypes.c_int64 * 3),
        ("causal", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("out", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("past", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        *((f"{name}_codes", ctypes.c_void_p) for name in "kv"),
        *((f"{name}_scale", ctypes.c_void_p) for name in "kv"),
        *((f"{name}_scale_stride", ctypes.c_int64 * 2) for name in "kv"),
    ]


class OneQuery(ctypes.Structure):
    """``xq_one_query``."""

    _fields_ = [
        ("isa", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("batch", "keys", "heads", "kv_heads", "size")),
        *((name, ctypes.c_void_p) for name in "qkv"),
        ("q_stride", ctypes.c_int64 * 2),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in "kv"),
        ("scale", ctypes.c_float),
        ("out", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
    ]


class NativeError(ValueError):
    """The library refused a call; the text is the status's."""


def aligned(size: int, alignment: int = 64) -> Bytes:
    """``size`` zero bytes at an aligned address."""
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size]


@dataclasses.dataclass(frozen=True)
class ConvSpec:
    """A convolution and how its results become bytes; see ``native.h`` for the formula."""

    weight: npt.NDArray[np.int8]
    mult: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32] | None = None
    lut: Bytes | None = None
    groups: int = 1
    stride: Triple = (1, 1, 1)
    padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)
    transposed: bool = False
    in_zp: int = 0
    out_zp: int = 0
    lo: int = 0
    hi: int = 255
    residual: bool = False
    res_zp: int = 0
    res_mult: float = 0.0
    output_padding: Triple = (0, 0, 0)
    slopes: npt.NDArray[np.float32] | None = None

    def out_size(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """The output's (d, h, w) for an input's (d, h, w)."""
        out = []
        axes = (size, self.weight.shape[2:], self.stride, self.padding, self.dilation)
        for n, k, s, p, d, more in zip(*axes, self.output_padding, strict=True):
            reach = d * (k - 1) + 1
            if self.transposed:
                out.append((n - 1) * s - 2 * p + reach + more)
            else:
                out.append((n + 2 * p - reach) // s + 1)
        return tuple(out)


class Library:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.lib.xq_status_text.restype = ctypes.c_char_p
        self.lib.xq_conv_packed_size.restype = ctypes.c_size_t
        self.lib.xq_conv_scratch.restype = ctypes.c_size_t
        self.lib.xq_conv_items.restype = ctypes.c_int64
        self.lib.xq_op_items.restype = ctypes.c_int64
        for name in (
            "xq_linear_packed_size", "xq_groups_packed_size", "xq_rows_shared", "xq_rows_scratch"
        ):  # fmt: skip
            getattr(self.lib, name).restype = ctypes.c_size_t
        self.lib.xq_rows_items.restype = ctypes.c_int64
        self.lib.xq_attention_scratch.restype = ctypes.c_size_t
        self.lib.xq_attention_items.restype = ctypes.c_int64
        self.lib.xq_attention_coded_keys.restype = ctypes.c_int64
        self.lib.xq_one_query_scratch.restype = ctypes.c_size_t
        self.lib.xq_one_query_items.restype = ctypes.c_int64
        self.lib.xq_one_query_run.argtypes = [
            ctypes.POINTER(OneQuery),
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]
        self.lib.xq_attention_run.argtypes = [
            ctypes.POINTER(Attention),
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]
        self.lib.xq_rows_run.argtypes = [
            ctypes.POINTER(Rows),
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        for name in ("xq_conv_run", "xq_op_run", "xq_set_caches"):
            getattr(self.lib, name).restype = None
        self.lib.xq_conv_run.argtypes = [
            ctypes.POINTER(ConvCall),
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]
        self.lib.xq_set_caches.argtypes = [ctypes.c_int64, ctypes.c_int64]
        self.lib.xq_op_run.argtypes = [ctypes.POINTER(Op), ctypes.c_int64, ctypes.c_int64]

    def check(self, status: int) -> None:
        """Raise unless ``status`` is XQ_OK."""
        if status:
            raise NativeError(self.lib.xq_status_text(status).decode())

    def enable_amx(self) -> bool:
        """Ask for AMX; False where the system refuses."""
        return bool(self.lib.xq_enable_amx() == 0)

    def set_caches(self, l1: int, l2: int) -> None:
        """The caches, in bytes, that weights are packed for from now on; 0 where unknown."""
        self.lib.xq_set_caches(l1, l2)

    def pack(self, spec: ConvSpec, isa: str, algo: str = "auto") -> Bytes:
        """Weights packed for ``isa``."""
        out, per, *kernel = spec.weight.shape
        conv = Conv(per * spec.groups, out, spec.groups, _I32x3(*kernel), _I32x3(*spec.stride))
        conv.padding, conv.dilation = _I32x3(*spec.padding), _I32x3(*spec.dilation)
        conv.transposed, conv.algo = int(spec.transposed), ALGOS[algo]
        size = self.lib.xq_conv_packed_size(ctypes.byref(conv), ISAS[isa])
        if size == 0:
            raise NativeError(f"{algo} on {isa} refuses this convolution")
        packed = aligned(size)
        weight = np.ascontiguousarray(spec.weight, np.int8)
        requant = Requant(spec.mult.ctypes.data)
        requant.bias = None if spec.bias is None else spec.bias.ctypes.data
        requant.lut = None if spec.lut is None else spec.lut.ctypes.data
        requant.slopes = None if spec.slopes is None else spec.slopes.ctypes.data
        for name in ("in_zp", "out_zp", "lo", "hi", "residual", "res_zp", "res_mult"):
            setattr(requant, name, getattr(spec, name))
        self.check(
            self.lib.xq_conv_pack(
                ctypes.byref(conv),
                ISAS[isa],
                ctypes.c_void_p(weight.ctypes.data),
                ctypes.byref(requant),
                ctypes.c_void_p(packed.ctypes.data),
            )
        )
        return packed

    def conv(
        self,
        packed: Bytes,
        x: Bytes,
        out: Bytes,
        residual: Bytes | None = None,
        *,
        threads: int = 1,
        scratch: Bytes | None = None,
    ) -> None:
        """Run all items of one convolution, on this thread."""
        call = ConvCall(packed.ctypes.data, Tensor.of(x), Tensor.of(out), Tensor.of(residual))
        call.threads = threads
        self.check(self.lib.xq_conv_check(ctypes.byref(call)))
        if scratch is None:
            scratch = aligned(self.lib.xq_conv_scratch(ctypes.byref(call)))
        items = self.lib.xq_conv_items(ctypes.byref(call))
        self.lib.xq_conv_run(ctypes.byref(call), 0, items, scratch.ctypes.data)

    def pack_linear(
        self,
        weight: npt.NDArray[np.int8],
        scale: Floats,
        bias: Floats | None,
        isa: str,
        activation: int = 0,
    ) -> Bytes:
        """Weights (out, in) of a linear with float output, for an ``xq_activation``."""
        linear = Linear(weight.shape[1], weight.shape[0], activation)
        return self._pack("xq_linear", linear, isa, weight, scale, bias)

    def _pack(self, kind: str, linear: ctypes.Structure, isa: str, *arrays: Any) -> Bytes:
        """What ``kind`` packs of ``linear``, a description, and its weight, scale and bias."""
        at, level = ctypes.byref(linear), ISAS[isa]
        size = getattr(self.lib, f"{kind}_packed_size")(at, level)
        if size == 0:
            raise NativeError(f"{isa} refuses this linear")
        packed = aligned(size)
        places = [None if x is None else x.ctypes.data for x in (*arrays, packed)]
        self.check(getattr(self.lib, f"{kind}_pack")(at, level, *map(ctypes.c_void_p, places)))
        return packed

    def pack_groups(
        self,
        weight: npt.NDArray[Any],
        scale: npt.NDArray[Any],
        bias: Floats | None,
        isa: str,
        activation: int = 0,
        unpack: tuple[int, int] = (0, 0),
    ) -> Bytes:
        """The same of weights with scales for groups of features: see ``groups.h``.

        ``unpack``: from how many rows on blocks become bytes first, and from how many on no more.
        """
        bits = 4 if weight.dtype == np.uint8 else 8
        features = weight.shape[1] * 8 // bits
        half, offsets = scale.dtype == np.float16, scale.ndim == 3
        sizes = (features, weight.shape[0], activation, scale.shape[1])
        linear = Groups(*sizes, bits, half, offsets, *unpack)
        return self._pack("xq_groups", linear, isa, weight, scale, bias)

    def rows(self, op: Rows) -> None:
        """Run all items of an op on row codes, each with its own scratch, on this thread."""
        at = ctypes.byref(op)
        self.check(self.lib.xq_rows_check(at))
        shared = aligned(self.lib.xq_rows_shared(at))
        for phase in (0, 1):
            for item in range(self.lib.xq_rows_items(at, phase)):
                scratch = aligned(self.lib.xq_rows_scratch(at))
                scratch[:] = 0xFF  # NaN, as floats
                where = (shared.ctypes.data, scratch.ctypes.data)
                self.lib.xq_rows_run(at, phase, item, item + 1, *where)

    def attention(self, op: Attention) -> None:
        """Run all items of an attention, each with scratch memory of its own, on this thread."""
        at = ctypes.byref(op)
        self.check(self.lib.xq_attention_check(at))
        for item in range(self.lib.xq_attention_items(at)):
            scratch = aligned(self.lib.xq_attention_scratch(at))
            scratch[:] = 0xFF  # NaN, as floats
            self.lib.xq_attention_run(at, item, item + 1, scratch.ctypes.data)

    def cache_codes(self, isa: str, x: Floats, codes: npt.NDArray[np.int8], scale: Floats) -> None:
        """Codes of one row ``x`` and their scale, written to ``codes`` and ``scale``."""
        at = (ctypes.c_void_p(part.ctypes.data) for part in (codes, scale))
        size = ctypes.c_int64(x.size)
        self.lib.xq_cache_codes(ISAS[isa], ctypes.c_void_p(x.ctypes.data), size, *at)

    def one_query(self, op: OneQuery) -> None:
        """Run all items of an attention of one query a head, on this thread."""
        at = ctypes.byref(op)
        self.check(self.lib.xq_one_query_check(at))
        for item in range(self.lib.xq_one_query_items(at)):
            scratch = aligned(self.lib.xq_one_query_scratch(at))
            scratch[:] = 0xFF  # NaN, as floats
            self.lib.xq_one_query_run(at, item, item + 1, scratch.ctypes.data)

    def op(
        self, kind: str, isa: str, a: Bytes | Floats, out: Bytes | Floats, **fields: Any
    ) -> None:
        """Run all items of one op; ``fields`` are those of ``xq_op``."""
        op = Op(OPS.index(kind), ISAS[isa], Tensor.of(a), Tensor(), Tensor.of(out))
        op.hi, op.groups = 255, 1
        op.a_stride_c, op.out_stride_c = a.strides[4], out.strides[4]
        for name in ("kernel", "stride", "dilation"):
            setattr(op, name, _I32x3(1, 1, 1))
        for name, value in fields.items():
            if name == "b":
                op.b = Tensor.of(value)
            elif name in ("lut", "scale_c", "shift_c", "reals"):
                setattr(op, name, value.ctypes.data)
            elif name == "scale":
                op.scale = (ctypes.c_float * 3)(*value)
            else:
                setattr(op, name, _I32x3(*value) if isinstance(value, tuple) else value)
        self.check(self.lib.xq_op_check(ctypes.byref(op)))
        self.lib.xq_op_run(ctypes.byref(op), 0, self.lib.xq_op_items(ctypes.byref(op)))

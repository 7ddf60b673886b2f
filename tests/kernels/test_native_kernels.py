"""The native convolutions against plain loops, and those against torch."""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import itertools
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.native import capi
from tests.native.levels import ISAS, lib

__all__ = ["lib"]

Triple = tuple[int, int, int]


KINDS = (
    "dense",
    "pointwise",
    "depthwise",
    "deep_depthwise",
    "nine_taps",
    "grouped",
    "spatial3d",
    "transposed",
    "first",
    "three",
)


class Case:
    """A random convolution of one kind, with strided views and every feature now and then."""

    def __init__(self, kind: str, seed: int) -> None:
        self.rng = r = np.random.default_rng(seed)
        self.groups = 1
        self.kernel, self.stride = (1, self.upto(4), self.upto(4)), (1, self.upto(3), self.upto(3))
        self.dilation = (1, self.upto(2), self.upto(2))
        self.cin, self.cout = self.upto(139), self.upto(139)
        self.size = (1, self.upto(17), self.upto(39))
        self.transposed = kind == "transposed"
        getattr(self, f"as_{kind}")()
        padding = tuple(int(r.integers(0, k)) for k in self.kernel)
        shape = (self.cout, self.cin // self.groups, *self.kernel)
        # Small weights are safe for saturating instructions, large ones are not, most are mixed.
        weight = np.clip(r.normal(0, r.choice([20, 40, 90]), shape), -128, 127).astype(np.int8)
        if r.random() < 0.1:
            weight[:] = r.choice([-128, 127])
        spread = 74 * 74 * np.sqrt(weight[0].size)
        mult = ((r.random(self.cout) + 0.1) * 60 / spread).astype(np.float32)
        if r.random() < 0.1:
            mult *= 1e7  # sums leave int32 once multiplied
        low, high = sorted(map(int, r.integers(0, 256, 2))) if r.random() < 0.5 else (0, 255)
        self.spec = capi.ConvSpec(
            weight,
            mult.astype(np.float32),
            (r.standard_normal(self.cout) * 10).astype(np.float32) if r.random() < 0.7 else None,
            r.integers(0, 256, 256).astype(np.uint8) if r.random() < 0.3 else None,
            self.groups,
            self.stride,
            padding,  # type: ignore[arg-type]
            self.dilation,
            self.transposed,
            in_zp=int(r.integers(0, 256)),
            out_zp=int(r.integers(0, 256)),
            lo=low,
            hi=high,
            residual=bool(r.random() < 0.4),
            res_zp=int(r.integers(0, 256)),
            res_mult=float(r.random()),
            output_padding=self.output_padding(),
            slopes=r.standard_normal(self.cout).astype(np.float32) if r.random() < 0.3 else None,
        )
        self.batch = int(r.choice([0, 1, 1, 1, 2, 3]))

    def upto(self, most: int) -> int:
        return int(self.rng.integers(1, most + 1))

    def as_dense(self) -> None:
        pass

    def as_pointwise(self) -> None:
        self.kernel = (1, 1, 1)
        if self.rng.random() < 0.7:
            self.stride = (1, 1, 1)

    def as_depthwise(self) -> None:
        self.groups = self.cin = self.cout = 1 + self.upto(150)
        self.kernel = (1, self.upto(8), self.upto(8))

    def as_deep_depthwise(self) -> None:
        """A kernel with depth, with or without height; more slices than are computed together."""
        self.as_depthwise()
        self.kernel = (1 + self.upto(5), self.upto(self.upto(6)), self.upto(4))
        self.stride = (self.upto(3), self.upto(3), self.upto(2))
        self.dilation = (self.upto(3), self.upto(2), self.upto(2))
        self.size = (self.upto(self.upto(40)), self.upto(9), self.upto(14))

    def as_nine_taps(self) -> None:
        """What AVX2 multiplies without strips, and what is like it."""
        self.groups = self.cin = self.cout = 1 + self.upto(150)
        height, width = self.rng.choice([[3, 3], [3, 3], [1, 9], [9, 1]])
        self.kernel = (1, int(height), int(width))
        self.stride = (self.upto(2), self.upto(3), self.upto(3))
        self.size = (self.upto(3), self.upto(17), self.upto(60))

    def as_grouped(self) -> None:
        each = int(self.rng.choice([1, 2, 3, 4, 4, 5, 8, 8, 16, 32]))
        out = each if self.rng.random() < 0.6 else self.upto(40)
        self.groups = 1 + self.upto(18)
        self.cin, self.cout = self.groups * each, self.groups * out

    def as_spatial3d(self) -> None:
        self.kernel = (self.upto(3), self.upto(3), self.upto(3))
        self.stride, self.size = (self.upto(2),) * 3, (self.upto(6), self.upto(8), self.upto(8))
        self.dilation = (self.upto(2), 1, 1)

    def as_transposed(self) -> None:
        self.groups = int(self.rng.choice([1, 1, 2, 4]))
        self.cin, self.cout = self.groups * self.upto(12), self.groups * self.upto(20)
        self.size = (1, self.upto(6), self.upto(8))
        if self.rng.random() < 0.4:
            self.kernel = (1, 1, 1)
            if self.rng.random() < 0.6:
                self.stride = (1, 1, 1)

    def output_padding(self) -> Triple:
        """Whatever torch allows, mostly the most of it."""
        if not self.transposed:
            return (0, 0, 0)
        most = [max(pair) - 1 for pair in zip(self.stride, self.dilation, strict=True)]
        d, h, w = (n if self.rng.random() < 0.5 else int(self.rng.integers(0, n + 1)) for n in most)
        return d, h, w

    def as_first(self) -> None:
        self.cin = self.upto(4)

    def as_three(self) -> None:
        """What Winograd's algorithm takes."""
        self.groups, self.kernel = int(self.rng.choice([1, 1, 2, 3])), (1, 3, 3)
        self.cin, self.cout = self.groups * 16 * self.upto(5), self.groups * self.upto(50)
        self.stride = self.dilation = (1, 1, 1)
        self.size = (self.upto(2), self.upto(17), self.upto(25))

    def view(self, *shape: int) -> tuple[capi.Bytes, slice]:
        """Random bytes of a wider tensor, and the channels in use."""
        extra = int(self.rng.integers(0, 20)) if self.rng.random() < 0.5 else 0
        start = int(self.rng.integers(0, extra + 1))
        full = self.rng.integers(0, 256, (*shape[:-1], shape[-1] + extra)).astype(np.uint8)
        return full, slice(start, start + shape[-1])


def conv_with_torch(spec: capi.ConvSpec, x: capi.Bytes, residual: capi.Bytes | None) -> capi.Bytes:
    """The formula of native.h; float64 convolution is exact here."""
    shifted = torch.from_numpy(x.astype(np.float64)).permute(0, 4, 1, 2, 3) - spec.in_zp
    weight = torch.from_numpy(spec.weight.astype(np.float64))
    if spec.transposed:
        out, per, *kernel = weight.shape
        weight = weight.reshape(spec.groups, out // spec.groups, per, *kernel).transpose(1, 2)
        weight = weight.reshape(spec.groups * per, out // spec.groups, *kernel)
        sums = torch.nn.functional.conv_transpose3d(
            shifted,
            weight,
            None,
            spec.stride,
            spec.padding,
            spec.output_padding,
            spec.groups,
            spec.dilation,
        )
    else:
        sums = torch.nn.functional.conv3d(
            shifted, weight, None, spec.stride, spec.padding, spec.dilation, spec.groups
        )
    v = sums.permute(0, 2, 3, 4, 1).numpy().astype(np.float32).astype(np.float64) * spec.mult
    if spec.bias is not None:
        v = v + spec.bias
    if residual is not None:
        v = v + (residual.astype(np.float64) - spec.res_zp) * np.float32(spec.res_mult)
    if spec.slopes is not None:
        v = np.where(v < 0, v * spec.slopes, v)
    out = np.clip(np.rint(v) + spec.out_zp, spec.lo, spec.hi).astype(np.uint8)
    return out if spec.lut is None else spec.lut[out]


def run_case(lib: capi.Library, case: Case, isa: str, threads: int, algo: str = "auto") -> None:
    """Compare one ISA's bytes, also those around the output, with the plain loops'."""
    spec = case.spec
    size = spec.out_size(case.size)
    if min(size) < 1:
        return
    x_full, x_slice = case.view(case.batch, *case.size, case.cin)
    r_full, r_slice = case.view(case.batch, *size, case.cout)
    out_full, out_slice = case.view(case.batch, *size, case.cout)
    residual = r_full[..., r_slice] if spec.residual else None
    want, got = out_full.copy(), out_full.copy()
    x = x_full[..., x_slice]
    lib.conv(lib.pack(spec, "reference"), x, want[..., out_slice], residual)
    lib.conv(lib.pack(spec, isa, algo), x, got[..., out_slice], residual, threads=threads)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), threads=st.sampled_from([1, 2, 5]))
def test_every_isa_gives_the_bytes_of_the_plain_loops(
    lib: capi.Library, isa: str, kind: str, seed: int, threads: int
) -> None:
    run_case(lib, Case(kind, seed), isa, threads)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["depthwise", "grouped"]))
def test_the_dense_algorithm_takes_any_groups(
    lib: capi.Library, isa: str, seed: int, kind: str
) -> None:
    run_case(lib, Case(kind, seed), isa, 1, "dense")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("algo", ["winograd", "winograd4"])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), threads=st.sampled_from([1, 2, 5]))
def test_winograd_tiles_of_either_size(
    lib: capi.Library, isa: str, algo: str, seed: int, threads: int
) -> None:
    if isa != "amx_int8":
        run_case(lib, Case("three", seed), isa, threads, algo)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "amx_int8"])
@pytest.mark.parametrize("channels", [112, 128, 256])
@pytest.mark.parametrize("weight", [127, -128])
def test_sums_that_winograd_tiles_may_not_hold(
    lib: capi.Library, isa: str, channels: int, weight: int
) -> None:
    """All is known of sums of 25 bits, as of 112 channels; others must go another way."""
    spec = capi.ConvSpec(
        np.full((16, channels, 1, 3, 3), weight, np.int8),
        np.full(16, 1 / 16384, np.float32),
        np.full(16, 128 - 255 * 9 * channels * weight / 16384, np.float32),
    )
    # All sums, and those around the largest.
    x = np.full((1, 1, 11, 11, channels), 255, np.uint8)
    x[:, :, 2, 3, :40] = 3
    sizes = spec.out_size((1, 11, 11))
    want = np.zeros((1, *sizes, 16), np.uint8)
    lib.conv(lib.pack(spec, "reference"), x, want)
    assert 128 in want
    for algo in ("winograd", "winograd4", "auto"):
        got = np.zeros_like(want)
        lib.conv(lib.pack(spec, isa, algo), x, got)
        np.testing.assert_array_equal(got, want, err_msg=algo)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("channels", [5, 32])
def test_output_padding_of_a_transposed_kernel_of_one(
    lib: capi.Library, isa: str, channels: int
) -> None:
    """The output is longer than the input, although each pixel is made of one."""
    rng = np.random.default_rng(channels)
    weight = rng.integers(-128, 128, (24, channels, 1, 1, 1)).astype(np.int8)
    bias = rng.standard_normal(24).astype(np.float32)
    spec = capi.ConvSpec(
        weight,
        np.full(24, 1e-3, np.float32),
        bias * 40,
        dilation=(1, 3, 2),
        transposed=True,
        in_zp=9,
        out_zp=100,
        output_padding=(0, 2, 1),
    )
    x, free = guarded(rng.integers(0, 256, (2, 1, 5, 7, channels)).astype(np.uint8))
    out = np.zeros((2, 1, 7, 8, 24), np.uint8)
    lib.conv(lib.pack(spec, isa), x, out)
    np.testing.assert_array_equal(out, conv_with_torch(spec, x, None))
    free()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("side", [1, 3])
def test_a_tile_of_few_rows_writes_no_more(lib: capi.Library, isa: str, side: int) -> None:
    """Kernels compute several pixels at once; of the last ones there may be fewer."""
    rng = np.random.default_rng(side)
    for channels in (16, 32, 64):
        weight = rng.integers(-127, 128, (channels, 32, 1, side, side)).astype(np.int8)
        spec = capi.ConvSpec(weight, np.full(channels, 1e-3, np.float32))
        packed, plain = lib.pack(spec, isa), lib.pack(spec, "reference")
        for pixels in range(1, 36):
            x = rng.integers(0, 256, (1, 1, side, pixels + side - 1, 32)).astype(np.uint8)
            around = np.full((1, 1, 1, pixels + 40, channels), 77, np.uint8)
            want = around.copy()
            lib.conv(packed, x, around[:, :, :, :pixels])
            lib.conv(plain, x, want[:, :, :, :pixels])
            np.testing.assert_array_equal(around, want, f"{channels} channels, {pixels} pixels")
            assert (around[:, :, :, pixels:] == 77).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("side", [1, 3])
@pytest.mark.parametrize(("out_zp", "lo"), [(0, 0), (0, 3), (5, 0)])
@pytest.mark.parametrize("residual", [False, True])
def test_rows_of_an_image_of_any_width(
    lib: capi.Library, isa: str, side: int, out_zp: int, lo: int, residual: bool
) -> None:
    """Narrow rows are computed two at a time, odd ones begin early; none reads beyond the input."""
    rng = np.random.default_rng(side)
    weight = rng.integers(-127, 128, (48, 36, 1, side, side)).astype(np.int8)
    spec = capi.ConvSpec(
        weight,
        np.full(48, 1e-3, np.float32),
        padding=(0, side // 2, side // 2),
        in_zp=7,
        out_zp=out_zp,
        lo=lo,
        residual=residual,
        res_zp=11,
        res_mult=0.7,
    )
    packed, plain = lib.pack(spec, isa), lib.pack(spec, "reference")
    for height, width in itertools.product([1, 2, 3], [*range(1, 17), 28, 29]):
        x, free = guarded(rng.integers(0, 256, (1, 1, height, width, 36)).astype(np.uint8))
        more = rng.integers(0, 256, (1, 1, height, width, 48)).astype(np.uint8)
        got, want = np.zeros_like(more), np.zeros_like(more)
        lib.conv(packed, x, got, more if residual else None)
        lib.conv(plain, x, want, more if residual else None)
        np.testing.assert_array_equal(got, want, f"{height} by {width} pixels")
        free()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("channels", [64, 192, 720])
@pytest.mark.parametrize("change", [{}, {"residual": True}, {"hi": 90}, {"padding": (0, 0, 0)}])
def test_bytes_that_are_made_later_go_where_they_belong(
    lib: capi.Library, isa: str, channels: int, change: dict[str, Any]
) -> None:
    """Sums of a tile may wait for the next one's: of another row, block of channels or image."""
    rng = np.random.default_rng(channels)
    weight = rng.integers(-127, 128, (72, channels, 1, 3, 3)).astype(np.int8)
    spec = capi.ConvSpec(
        weight, np.full(72, 2e-4, np.float32), padding=(0, 1, 1), res_zp=9, res_mult=0.4
    )
    spec = dataclasses.replace(spec, **change)
    packed, plain = lib.pack(spec, isa), lib.pack(spec, "reference")
    for batch, width in [(1, 1), (2, 3), (3, 7), (1, 33)]:
        x = rng.integers(0, 256, (batch, 1, 5, width + 2, channels)).astype(np.uint8)
        more = rng.integers(0, 256, (batch, *spec.out_size(x.shape[1:4]), 72)).astype(np.uint8)
        got, want = np.zeros_like(more), np.zeros_like(more)
        lib.conv(packed, x, got, more if spec.residual else None)
        lib.conv(plain, x, want, more if spec.residual else None)
        np.testing.assert_array_equal(got, want, f"{batch} images, {width} pixels")


# A core's L1 and L2 in bytes: real ones, and sizes no core has.
CACHES = [(48 << 10, 2 << 20), (32 << 10, 512 << 10), (32 << 10, 256 << 10), (1, 1), (1 << 30,) * 2]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_the_sizes_of_caches(
    lib: capi.Library, isa: str, kind: str
) -> None:
    for seed in range(12):
        case = Case(kind, seed)
        if seed % 3 == 0:  # more than one piece for every cache
            case.size = (case.size[0], 4 * case.size[1], 4 * case.size[2])
        size = case.spec.out_size(case.size)
        if min(size) < 1:
            continue
        x = case.rng.integers(0, 256, (case.batch, *case.size, case.cin)).astype(np.uint8)
        shape = (case.batch, *size, case.cout)
        residual = case.rng.integers(0, 256, shape).astype(np.uint8) if case.spec.residual else None
        results = []
        for caches in CACHES:
            lib.set_caches(*caches)
            out = np.zeros(shape, np.uint8)
            lib.conv(lib.pack(case.spec, isa), x, out, residual)
            results.append(out)
        lib.set_caches(0, 0)
        for out in results[1:]:
            np.testing.assert_array_equal(out, results[0])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_the_plain_loops_agree_with_torch(lib: capi.Library, kind: str, seed: int) -> None:
    case = Case(kind, seed)
    size = case.spec.out_size(case.size)
    if min(size) < 1 or case.batch == 0:
        return
    x = case.rng.integers(0, 256, (case.batch, *case.size, case.cin)).astype(np.uint8)
    residual = None
    if case.spec.residual:
        residual = case.rng.integers(0, 256, (case.batch, *size, case.cout)).astype(np.uint8)
    got = np.zeros((case.batch, *size, case.cout), np.uint8)
    lib.conv(lib.pack(case.spec, "reference"), x, got, residual)
    want = conv_with_torch(case.spec, x, residual)
    if case.spec.lut is None:
        assert np.abs(got.astype(int) - want).max() <= 1
    # Only a tie that float32 and float64 round apart may differ.
    assert (got != want).mean() <= 0.001 + 1.5 / got.size


def guarded(array: capi.Bytes) -> tuple[capi.Bytes, Callable[[], None]]:
    """A copy that ends where unmapped memory begins, and what frees it."""
    page = mmap.PAGESIZE
    room = -(-array.size // page) * page
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = libc.mmap(None, room + 2 * page, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    assert libc.mprotect(base, page, 0) == 0
    assert libc.mprotect(base + page + room, page, 0) == 0
    start = base + page + room - array.size
    buffer = (ctypes.c_uint8 * array.size).from_address(start)
    copy = np.frombuffer(memoryview(buffer), np.uint8).reshape(array.shape)
    copy[...] = array
    return copy, lambda: libc.munmap(base, room + 2 * page)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outside_a_tensor_is_touched(lib: capi.Library, isa: str, kind: str) -> None:
    for seed in range(25):
        case = Case(kind, seed)
        size = case.spec.out_size(case.size)
        if min(size) < 1 or case.batch == 0:
            continue
        x_shape, out_shape = (case.batch, *case.size, case.cin), (case.batch, *size, case.cout)
        x, free_x = guarded(case.rng.integers(0, 256, x_shape).astype(np.uint8))
        r, free_r = guarded(case.rng.integers(0, 256, out_shape).astype(np.uint8))
        out, free_out = guarded(np.zeros(out_shape, np.uint8))
        lib.conv(lib.pack(case.spec, isa), x, out, r if case.spec.residual else None)
        for free in (free_x, free_r, free_out):
            free()


@pytest.mark.parametrize("isa", ISAS)
def test_scratch_is_not_overrun(lib: capi.Library, isa: str) -> None:
    for seed in range(20):
        case = Case(KINDS[seed % len(KINDS)], seed)
        size = case.spec.out_size(case.size)
        if min(size) < 1 or case.batch == 0:
            continue
        x = np.zeros((case.batch, *case.size, case.cin), np.uint8)
        out = np.zeros((case.batch, *size, case.cout), np.uint8)
        packed = lib.pack(case.spec, isa)
        residual = out.copy() if case.spec.residual else None
        call = capi.ConvCall(packed.ctypes.data, *map(capi.Tensor.of, (x, out, residual)), 1)
        need = lib.lib.xq_conv_scratch(ctypes.byref(call))
        scratch = capi.aligned(need + 4096)
        scratch[need:] = 77
        lib.conv(packed, x, out, residual, scratch=scratch)
        assert (scratch[need:] == 77).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_residual_may_be_the_output_itself(lib: capi.Library, isa: str) -> None:
    rng = np.random.default_rng(0)
    weight = rng.integers(-128, 128, (64, 40, 1, 3, 3)).astype(np.int8)
    mult = np.full(64, 1e-4, np.float32)
    spec = capi.ConvSpec(weight, mult, padding=(0, 1, 1), residual=True, res_zp=9, res_mult=0.7)
    x = rng.integers(0, 256, (1, 1, 7, 7, 40)).astype(np.uint8)
    residual = rng.integers(0, 256, (1, 1, 7, 7, 64)).astype(np.uint8)
    apart = np.zeros_like(residual)
    lib.conv(lib.pack(spec, isa), x, apart, residual)
    lib.conv(lib.pack(spec, isa), x, residual, residual)
    np.testing.assert_array_equal(residual, apart)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("height", [1, 5])
def test_strides_of_axes_of_one_pixel_mean_nothing(
    lib: capi.Library, isa: str, height: int
) -> None:
    rng = np.random.default_rng(0)
    weight = rng.integers(-128, 128, (70, 40, 1, 1, 1)).astype(np.int8)
    mult = np.full(70, 1e-3, np.float32)
    packed = lib.pack(capi.ConvSpec(weight, mult, in_zp=3, residual=True, res_mult=0.5), isa)
    x = rng.integers(0, 256, (9, 1, height, 1, 40)).astype(np.uint8)
    residual = rng.integers(0, 256, (9, 1, height, 1, 70)).astype(np.uint8)
    expected = np.zeros_like(residual)
    lib.conv(packed, x, expected, residual)

    def strided(array: capi.Bytes, single: int) -> capi.Bytes:
        sizes = zip(array.shape, array.strides, strict=True)
        strides = [single if size == 1 else stride for size, stride in sizes]
        return np.lib.stride_tricks.as_strided(array, strides=strides)

    for stride in (1, 40, 1 << 40):
        actual = np.zeros_like(residual)
        views = [strided(array, stride) for array in (x, actual, residual)]
        assert views[0].strides[3] == stride
        lib.conv(packed, *views)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_threads_may_share_packed_weights(lib: capi.Library, isa: str) -> None:
    rng = np.random.default_rng(0)
    weight = rng.integers(-128, 128, (96, 48, 1, 3, 3)).astype(np.int8)
    spec = capi.ConvSpec(weight, np.full(96, 1e-3, np.float32), padding=(0, 1, 1), in_zp=5)
    packed, inputs = lib.pack(spec, isa), rng.integers(0, 256, (8, 1, 1, 20, 20, 48), np.uint8)

    def run(x: capi.Bytes) -> capi.Bytes:
        out = np.zeros((*x.shape[:-1], 96), np.uint8)
        lib.conv(packed, x, out)
        return out

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, inputs))
    for x, out in zip(inputs, together, strict=True):
        np.testing.assert_array_equal(out, run(x))


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_sums_fit(lib: capi.Library, isa: str) -> None:
    rng = np.random.default_rng(0)
    signs = rng.choice([-128, 127], (5, 1024, 1, 3, 3))
    signs[0], signs[1] = -128, 127
    for zero_point in (0, 255):
        spec = capi.ConvSpec(
            signs.astype(np.int8), np.full(5, 4e-7, np.float32), padding=(0, 1, 1), in_zp=zero_point
        )
        x = (rng.integers(0, 2, (2, 1, 5, 6, 1024)) * 255).astype(np.uint8)
        x[1] = 255 - zero_point
        got, want = np.zeros((2, 1, 5, 6, 5), np.uint8), np.zeros((2, 1, 5, 6, 5), np.uint8)
        lib.conv(lib.pack(spec, isa), x, got)
        lib.conv(lib.pack(spec, "reference"), x, want)
        np.testing.assert_array_equal(got, want)


# Products of 255 with these sum to just within 16 bits, or just beyond, in pairs and in fours.
EDGES = [[64, 64], [64, 65], [65, 65], [127, 1], [127, 2], [-128, 1], [-64, -65], [-128, -1]]


EDGES += [[32] * 4, [33, 32, 32, 32], [33] * 4, [-32] * 4, [-33, -32, -32, -32], [64, 64, 1, 0]]


EDGES += [[32] * 4 + [33, 32, 32, 32], [-32] * 4 + [-33, -32, -32, -32]]  # two quads, not one


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "kind", ["regrouped", "words", "narrow", "strided", "grouped 4", "grouped 8"]
)
@pytest.mark.parametrize("pattern", EDGES, ids=str)
def test_sums_at_the_edge_of_16_bits(
    lib: capi.Library, isa: str, kind: str, pattern: list[int]
) -> None:
    groups = 8 if kind.startswith("grouped") else 1
    each = {"regrouped": 160, "narrow": 12, "grouped 4": 4, "grouped 8": 8}.get(kind, 64)
    size = 1 if kind in ("regrouped", "words", "narrow") else 3
    out = each if groups > 1 else 40
    weight = np.resize(np.array(pattern, np.int8), (out * groups, size * size, each))
    weight = weight.transpose(0, 2, 1).reshape(out * groups, each, 1, size, size)
    totals = 255 * weight.astype(int).sum((1, 2, 3, 4))
    spec = capi.ConvSpec(
        weight,
        np.full(out * groups, 1 / 32, np.float32),
        (128 - totals / 32).astype(np.float32),
        groups=groups,
        stride=(1, 2, 2) if kind == "strided" else (1, 1, 1),
    )
    x = np.full((1, 1, 7, 7, each * groups), 255, np.uint8)
    got = np.zeros((1, *spec.out_size((1, 7, 7)), out * groups), np.uint8)
    lib.conv(lib.pack(spec, isa), x, got)
    assert (got == 128).all()


def adversarial(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights that are hard to sum in 16 bits, or whose order an algorithm might trust."""
    rng = np.random.default_rng(7)
    if name == "normal":
        w = rng.standard_normal(shape)
        biggest = np.abs(w).max(tuple(range(1, w.ndim)), keepdims=True)
        return np.rint(w / biggest * 127).astype(np.int8)
    size = int(np.prod(shape))
    if name == "random":
        flat = rng.integers(-128, 128, size)
    elif name == "small":  # any order will do: fours everywhere
        flat = rng.integers(-32, 33, size)
    elif name == "alternating":
        flat = np.resize([127, -128], size)
    elif name == "sorted":
        flat = np.sort(rng.integers(-128, 128, size))
    else:
        flat = np.full(size, int(name))
    return flat.reshape(shape).astype(np.int8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize(
    "weights", ["normal", "random", "small", "alternating", "sorted", "127", "-128", "-127"]
)
def test_no_input_takes_sums_beyond_16_bits(
    lib: capi.Library, isa: str, taps: int, weights: str
) -> None:
    """For each channel the inputs that make every partial sum as big, or as small, as can be."""
    for channels in (
        (16, 20, 31, 64, 128, 129, 132, 141, 144, 159, 200) if taps == 1 else (3, 5, 20, 36)
    ):
        shape = (40, channels, 1, taps, taps)
        weight = adversarial(weights, shape)
        positive = weight.transpose(0, 2, 3, 4, 1) > 0
        inputs = {sign: np.ascontiguousarray(positive == sign) for sign in (True, False)}
        for sign, x in inputs.items():
            ones = x & (weight.transpose(0, 2, 3, 4, 1) != 0)
            reached = 255 * (ones * weight.transpose(0, 2, 3, 4, 1).astype(int)).sum((1, 2, 3, 4))
            spec = capi.ConvSpec(
                weight,
                np.full(40, 1 / 32, np.float32),
                (128 - reached / 32).astype(np.float32),
                stride=(1, 2, 2) if taps > 1 else (1, 1, 1),
            )
            codes = x.astype(np.uint8) * np.uint8(255)
            got, want = (np.zeros((40, 1, 1, 1, 40), np.uint8) for _ in range(2))
            lib.conv(lib.pack(spec, isa, "dense"), codes, got)
            lib.conv(lib.pack(spec, "reference"), codes, want)
            case = f"{channels} channels, inputs at {255 * sign} where weights are positive"
            assert (np.diagonal(got[:, 0, 0, 0]) == 128).all(), case
            np.testing.assert_array_equal(got, want, err_msg=case)


def test_winograd_serves_where_its_weights_are_not_too_many(lib: capi.Library) -> None:
    def sizes(isa: str, channels: int, *algos: str) -> list[int]:
        weight = np.ones((channels, channels, 1, 3, 3), np.int8)
        spec = capi.ConvSpec(weight, np.ones(channels, np.float32))
        return [lib.pack(spec, isa, algo).size for algo in algos]

    for isa in ISAS:
        if isa == "amx_int8":
            with pytest.raises(capi.NativeError, match="winograd"):
                sizes(isa, 32, "winograd")
            continue
        chosen, small, large, dense = sizes(isa, 32, "auto", "winograd", "winograd4", "dense")
        assert large > small > dense
        narrow = isa in ("avx2", "avx512")
        assert chosen == large + (small if narrow else dense), "one more for calls of few tiles"
        chosen, other = sizes(isa, 512, "auto", "winograd" if narrow else "dense")
        assert chosen == other

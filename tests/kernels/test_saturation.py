"""The overflow proof: exact against brute force, and layouts against the libraries themselves."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import isa
from tests.packs import Problem
from x86quant.hardware.cpu import Cpu, cpu
from x86quant.kernels import all_kernels, dynamic_kernels, fbgemm, graph_kernels, saturation
from x86quant.kernels.probing import shared_sums
from x86quant.spec import OpSpec

FBGEMM, ONEDNN = all_kernels()["fbgemm"], all_kernels()["onednn"]


def brute_force(rows, pairs):
    """(lowest, highest) over the given pairs of columns of every row."""
    low = high = 0
    for row in rows.tolist():
        for pair in pairs:
            values = [row[i] for i in pair]
            low = min(low, sum(min(v, 0) for v in values))
            high = max(high, sum(max(v, 0) for v in values))
    return low, high


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_facts_equal_brute_force(seed, length, rows):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (rows, length), generator=generator).to(torch.int8)
    facts = saturation.weight_facts(weight)
    neighbours = [tuple(range(i, min(i + 2, length))) for i in range(0, length, 2)]
    assert facts.pair_extremes(saturation.TAPS) == brute_force(weight, neighbours)
    anything = [(0,), *itertools.combinations(range(length), 2)]
    assert facts.pair_extremes(saturation.ANY) == brute_force(weight, anything)


@pytest.mark.parametrize("value", [-128, 127])
def test_extreme_weights_do_not_wrap(value):
    facts = saturation.weight_facts(torch.full((3, 5), value, dtype=torch.int8))
    low, high = facts.pair_extremes(saturation.TAPS)
    assert (low, high) == (2 * min(value, 0), 2 * max(value, 0))


def test_blocks_cover_every_row(monkeypatch):
    weight = torch.zeros(50, 8, dtype=torch.int8)
    weight[49, 6:] = 100
    monkeypatch.setattr(saturation, "_BLOCK", 64)
    assert saturation.weight_facts(weight).pair_extremes(saturation.TAPS) == (0, 200)


def test_empty_weight():
    facts = saturation.weight_facts(torch.empty(4, 0, dtype=torch.int8))
    assert facts.pair_extremes(saturation.TAPS) == (0, 0)


@pytest.mark.parametrize("transposed", [False, True])
def test_taps_come_before_channels(transposed):
    """One pair large: channels 0 and 1 of one tap, or tap 0 and 1 of one channel."""
    channels = torch.zeros(2, 4, 3, dtype=torch.int8)  # [out, in, taps]
    channels[0, 0, 1] = channels[0, 1, 1] = 100
    taps = torch.zeros(2, 4, 3, dtype=torch.int8)
    taps[0, 0, 0] = taps[0, 0, 1] = 100
    sums = []
    for weight in (channels, taps):
        stored = weight.transpose(0, 1) if transposed else weight
        facts = saturation.weight_facts(stored, transposed=transposed)
        sums.append(facts.pair_extremes(saturation.TAPS)[1])
    assert sums == [200, 100]


def test_transposed_groups_keep_their_channels_apart():
    weight = torch.zeros(4, 1, 1, dtype=torch.int8)  # two groups of two inputs, one output each
    weight[1] = weight[2] = 100  # neighbours in memory, of different groups
    facts = saturation.weight_facts(weight, groups=2, transposed=True)
    assert facts.pair_extremes(saturation.ANY) == (0, 100)


@pytest.mark.parametrize(
    ("extremes", "activation_max", "expected"),
    [
        ((-128, 128), 255, False),
        ((-128, 129), 255, True),
        ((-129, 128), 255, True),
        ((-256, 254), 127, False),  # 7-bit activations never saturate
        ((-256, 256), 128, True),
    ],
)
def test_saturation_bounds(extremes, activation_max, expected):
    assert saturation.can_saturate(extremes, activation_max) is expected


@pytest.mark.parametrize("times", [1, 7])
def test_sums_at_the_very_bound_are_safe_and_one_more_is_not(times):
    for can, low, high in (
        (saturation.can_saturate, -(2**15), 2**15 - 1),
        (saturation.can_overflow, -(2**31 - 1), 2**31 - 1),  # either way, for any zero point
    ):
        least, most = -(-low // times), high // times
        assert not can((least, most), times)
        assert can((least - 1, 0), times)
        assert can((0, most + 1), times)


def test_weights_are_symmetric_unless_it_is_said():
    weight = torch.ones(2, 4, dtype=torch.int8)
    assert saturation.weight_facts(weight).symmetric
    assert not saturation.weight_facts(weight, symmetric=False).symmetric


def test_seven_bits_are_always_safe_and_the_bound_is_reached():
    assert 127 * (127 + 127) <= 32767
    assert 127 * (-128 - 128) >= -32768
    assert 255 * 128 <= 32767 < 255 * 129


@pytest.mark.parametrize(("length", "overflows"), [(66_000, False), (67_000, True)])
def test_accumulator_overflow(length, overflows):
    facts = saturation.weight_facts(torch.full((1, length), 127, dtype=torch.int8))
    assert saturation.can_overflow(facts.pair_extremes(saturation.CHANNEL), 255) is overflows
    spec = OpSpec("linear", length, 1, weights=facts)
    for kernel in all_kernels().values():
        refused = any("32-bit" in r for r in kernel.not_supported_reasons(spec, cpu()))
        assert refused is (overflows and kernel.name != "reference")


# What each library really multiplies as neighbours: one weight pair a layer, activations 255.


def conv(op="conv2d", channels=8, out=8, groups=1, k=3, transposed=False):
    dims = int(op[4])
    unit = (1,) * dims
    return OpSpec(
        op,
        channels,
        out,
        groups,
        (k,) * dims,
        unit,
        (k // 2,) * dims,
        unit,
        transposed=transposed,
        per_channel=False,
        bias=False,
    )


SHAPES = {
    "gemm": OpSpec("linear", 9, 4, per_channel=False, bias=False),
    "pointwise": conv(channels=9, k=1),
    "im2col": conv(channels=5),
    "im2col groups": conv(channels=10, groups=2),
    "im2col transposed": conv(channels=5, transposed=True),
    "conv1d": conv("conv1d", channels=5),
    "conv3d": conv("conv3d", channels=3),
    "depthwise": conv(channels=8, groups=8),
    "depthwise two each": conv(channels=8, out=16, groups=8),
    "depthwise 5": conv(channels=16, out=16, groups=16, k=5),
    "depthwise 7": conv(channels=8, groups=8, k=7),
    "depthwise 3d": conv("conv3d", channels=8, groups=8),
    "depthwise slow": conv(channels=7, out=7, groups=7),
    "groupwise 2": conv(channels=16, out=16, groups=8),
    "groupwise 2, few groups": conv(channels=8, out=8, groups=4),
    "groupwise 4": conv(channels=32, out=32, groups=8),
    "groupwise 8": conv(channels=32, out=32, groups=4),
    "groupwise 16": conv(channels=64, out=64, groups=4),
    "groupwise 3d": conv("conv3d", channels=16, out=16, groups=8),
}


def with_pair(spec, pair, value=127):
    """All weights 0 but two along K (taps, then channels) of every output channel."""
    in_group, out_group = spec.in_channels // spec.groups, spec.out_channels // spec.groups
    taps = torch.Size(spec.kernel).numel()
    rows = torch.zeros(spec.out_channels, taps * in_group, dtype=torch.int8)
    rows[:, list(pair)] = value
    weight = rows.view(spec.out_channels, taps, in_group).transpose(1, 2)
    if spec.transposed:
        weight = weight.view(spec.groups, out_group, in_group, taps).transpose(1, 2)
        weight = weight.reshape(spec.in_channels, out_group, taps)
    weight = weight.reshape(*weight.shape[:2], *spec.kernel).contiguous()
    x = torch.full((1, spec.in_channels, *(k + 4 for k in spec.kernel)), 255, dtype=torch.uint8)
    return Problem(spec, x, weight)


def pairs_of(spec):
    length = torch.Size(spec.kernel).numel() * spec.in_channels // spec.groups
    chosen = [(i, i + 1) for i in range(min(length - 1, 10))]
    return [*chosen, (0, 2), (0, length - 1), (length - 2, length - 1)]


@pytest.mark.parametrize("name", SHAPES)
def test_fbgemm_is_legal_exactly_where_it_is_right(name):
    spec = SHAPES[name]
    path = fbgemm.path(spec)
    known = saturation.probed_layout("fbgemm", path, fbgemm.instructions(path, cpu())) is not None
    for pair in pairs_of(spec):
        for value in (127, -128):
            problem = with_pair(spec, pair, value)
            refused = bool(FBGEMM.not_supported_reasons(problem.spec, cpu()))
            wrong = problem.error(FBGEMM) > 1
            assert refused or not wrong, (pair, value)
            assert wrong or not refused or not known, (pair, value)
            assert known or refused


@pytest.mark.parametrize("name", [n for n in SHAPES if "transposed" not in n])
def test_onednn_is_right_where_it_is_legal(name):
    spec = SHAPES[name]
    for pair in pairs_of(spec):
        problem = with_pair(spec, pair)
        if not ONEDNN.not_supported_reasons(problem.spec, cpu()):
            assert problem.error(ONEDNN) <= 1, pair


# FBGEMM's own answer to which path it takes, asked of the library torch carries.

_PATHS = ("depthwise", "groupwise", "pointwise", "fastpath1d", "im2col", "directconv")
_TORCH = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def library_path(spec):
    kernel, stride, padding, dilation = fbgemm._as_2d_or_3d(spec)
    n = len(kernel)
    array = ctypes.c_int * n

    class ConvParam(ctypes.Structure):
        _fields_ = (
            *((name, ctypes.c_int) for name in ("MB", "IC", "OC")),
            ("IN_DIM", array),
            ("G", ctypes.c_int),
            ("K", array),
            ("stride", array),
            ("pad", ctypes.c_int * (2 * n)),
            *((name, array) for name in ("dilation", "OUT_DIM", "IN_DIMP", "output_pad")),
            ("transposed", ctypes.c_bool),
        )

    ints = array(*[9] * n)
    param = ConvParam(
        *(1, spec.in_channels, spec.out_channels, ints, spec.groups, array(*kernel)),
        *(array(*stride), (ctypes.c_int * (2 * n))(*padding, *padding), array(*dilation)),
        *(ints, ints, array(*[0] * n), spec.transposed),
    )
    name = f"_ZN6fbgemm12ConvFastPathILi{n}EiEENS_16optimized_conv_tERKNS_12conv_param_tIXT_EEE"
    return _PATHS[getattr(_TORCH, name)(ctypes.byref(param))]


@st.composite
def shapes(draw):
    """Around the fast paths: each condition is met most of the time."""
    dims = draw(st.sampled_from((1, 2, 2, 3)))

    def each(usual, *others):
        values = st.sampled_from((usual,) * 4 + others)
        return tuple(draw(values) for _ in range(dims))

    groups = draw(st.sampled_from((1, 2, 3, 4, 7, 8, 12, 16, 24)))
    in_group = draw(st.sampled_from((1, 1, 2, 3, 4, 8, 16)))
    out_group = in_group * draw(st.sampled_from((1, 1, 1, 2, 3)))
    k = draw(st.sampled_from((1, 3, 3, 3, 5, 7, 9)))
    return OpSpec(
        f"conv{dims}d",
        groups * in_group,
        groups * out_group,
        groups,
        each(k, 3),
        each(draw(st.sampled_from((1, 1, 2, 3))), 1),
        each((k - 1) // 2, 0),
        each(1, 2),
        transposed=draw(st.sampled_from((False, False, False, True))),
    )


@given(shapes())
@settings(max_examples=1500, deadline=None, derandomize=True)
def test_fbgemm_path_is_the_librarys(spec):
    ours, theirs = fbgemm.path(spec), library_path(spec)
    # With long vectors the library groups more at a time than the conservative restatement.
    assert ours == theirs or (ours, theirs) == ("groupwise", "im2col")
    if ours != theirs:
        assert torch.cpu.get_capabilities()["avx512_f"]


# Which products share a sum: the record against the libraries.

PROBED = {
    (kernel, family): [
        spec
        for spec in shared_sums.SHAPES
        if shared_sums.family(kernel, spec) == family and spec.in_channels <= 16
    ][:3]
    for kernel in ("fbgemm", "onednn", "qnnpack")
    for family in dict.fromkeys(shared_sums.family(kernel, spec) for spec in shared_sums.SHAPES)
}


@pytest.mark.parametrize(("kernel", "family"), PROBED, ids=str)
def test_the_record_covers_what_a_library_does_here(kernel, family):
    instructions = shared_sums.instructions(kernel, family, cpu())
    recorded = saturation.probed_layout(kernel, family, instructions)
    for spec in PROBED[kernel, family]:
        seen = shared_sums.layout_of(kernel, shared_sums.shared_pairs(kernel, spec))
        if recorded is not None:
            at_most = saturation.LAYOUTS.index(recorded)
            assert saturation.LAYOUTS.index(seen) <= at_most, f"{spec}: {seen}, not {recorded}"


def capped(level: str) -> Cpu:
    """This level, on a CPU that has more."""
    return dataclasses.replace(isa.at(level), withheld=frozenset({"avx512", "avx512_vnni"}))


@pytest.mark.parametrize(
    ("kernel", "spec", "on"),
    [
        # It looks past every cap, and no CPU with AVX-512 and without VNNI was at hand.
        ("fbgemm", SHAPES["groupwise 4"], isa.at("avx512")),
        ("fbgemm", SHAPES["groupwise 4"], capped("avx2")),
        ("onednn", SHAPES["im2col"], dataclasses.replace(isa.at("avx2"), isa="avx10")),
        ("qnnpack", SHAPES["im2col"], dataclasses.replace(isa.at("avx2"), isa="avx10")),
    ],
    ids=str,
)
def test_what_was_never_probed_is_not_legal(kernel, spec, on):
    (reason,) = all_kernels()[kernel].not_supported_reasons(spec, on)
    assert "nobody has seen" in reason


#: Kernels whose sums are in 32 bits by what this package or the instruction says, so that nobody
#: has to ask: the native ones and the reference are ours.
NOT_ASKED = {"native", "native_blocks", "reference"}


@pytest.mark.parametrize("level", isa.LEVELS)
def test_a_kernel_is_legal_only_where_its_record_stands(monkeypatch, level):
    """Every kernel of every caller, every family, every level: a new one cannot be forgotten."""
    on = isa.at(level)
    registries = (all_kernels(), graph_kernels(), dynamic_kernels())
    for kernel in (one for kernels in registries for one in kernels.values()):
        for spec in shared_sums.SHAPES:
            asked = kernel.name not in NOT_ASKED
            family = shared_sums.family(kernel.name, spec)
            key = (kernel.name, family, shared_sums.instructions(kernel.name, family, on))
            for record in ({}, {key: saturation.NONE}):
                monkeypatch.setattr(saturation, "_probed", lambda record=record: record)
                reasons = kernel.not_supported_reasons(spec, on)
                unseen = any("nobody has seen" in reason for reason in reasons)
                assert unseen is (asked and not record), (kernel.name, family, level)


def test_everything_else_was_probed_at_every_level():
    for level in isa.LEVELS:
        for kernel, family in PROBED:
            instructions = shared_sums.instructions(kernel, family, isa.at(level))
            known = saturation.probed_layout(kernel, family, instructions)
            never = (kernel, family, instructions) == ("fbgemm", "groupwise", "avx512")
            assert (known is None) is never, (kernel, family, level)


def test_more_than_two_products_in_a_sum_are_noticed(monkeypatch):
    """No kernel does so; a pretended one that adds four is refused, one that adds two is read."""

    def adds(count):
        def wrong(kernel, spec, weight, zero_point):
            steps = weight.int().unflatten(1, (-1, count)) * 255
            return ((steps.sum(2) > 32767) | (steps.sum(2) < -32768)).any(1)

        return wrong

    spec = OpSpec("linear", 16, 8)
    monkeypatch.setattr(shared_sums, "_wrong_channels", adds(2))
    assert shared_sums.shared_pairs("none", spec) == {(i, i + 1) for i in range(0, 16, 2)}
    monkeypatch.setattr(shared_sums, "_wrong_channels", adds(4))
    with pytest.raises(ValueError, match="more than two products"):
        shared_sums.shared_pairs("none", spec)


def test_row_sums_of_large_depthwise_kernels_may_saturate():
    """FBGEMM needs them where weights have a zero point, and adds them in 16 bits."""
    wide, small = conv("conv3d", channels=8, groups=8, k=7), conv("conv3d", 8, groups=8, k=5)
    weight = torch.ones(8, 1, 7, 7, 7, dtype=torch.int8)
    for symmetric in (True, False):
        facts = saturation.weight_facts(weight, groups=8, symmetric=symmetric)
        for spec, refused in ((wide, not symmetric), (small, False)):
            reasons = FBGEMM.not_supported_reasons(spec.replace(weights=facts), cpu())
            assert any("sums of activations" in r for r in reasons) is refused

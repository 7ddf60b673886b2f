"""Every registered kernel equals the reference within one step, wherever it says it is legal.

The tests loop over the registry and are run again, in a subprocess each, held to every lower ISA
level that this CPU has.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import isa
from tests.packs import Y_ZERO_POINT, Problem
from x86quant.hardware.cpu import cpu
from x86quant.kernels import _register, all_kernels, reference
from x86quant.kernels.base import Kernel
from x86quant.routing.router import Routing
from x86quant.spec import OpSpec
from x86quant.tables.errata import read_errata
from x86quant.tables.table import RuleTable

KERNELS = all_kernels()
CPU = cpu()
ERRATA = read_errata(torch.__version__)
CASES: collections.Counter[str] = collections.Counter()

by_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda k: k.name)
few = settings(max_examples=400, deadline=None, derandomize=True)


@pytest.fixture(scope="module", autouse=True)
def _count():
    yield
    print(f"\nconformance: {CASES.total()} cases at {CPU.isa} {dict(CASES)}")


@st.composite
def problems(draw, spec):
    """Operands for ``spec``: mostly extreme, so that what can overflow does."""
    in_group = spec.in_channels // spec.groups
    shape = (spec.out_channels, in_group, *spec.kernel)
    if spec.transposed:
        shape = (spec.in_channels, spec.out_channels // spec.groups, *spec.kernel)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    low, high = draw(st.sampled_from(((-128, 127), (-128, 127), (-64, 64))))
    weight = torch.randint(low, high + 1, shape, generator=generator)
    x = torch.randint(
        0,
        spec.activation_max + 1,
        (spec.batch or 0, spec.in_channels, *(spec.spatial or ())),
        generator=generator,
    )
    if draw(st.booleans()):
        weight = torch.where(weight > (low + high) // 2 - draw(st.sampled_from((0, 99))), high, low)
        x = torch.where(x > spec.activation_max // 3, spec.activation_max, 0)
    channels = shape[1] if spec.transposed else spec.out_channels
    scales = torch.rand(channels if spec.per_channel else 1, generator=generator) + 0.5
    return Problem(
        spec,
        x.to(torch.uint8),
        weight.to(torch.int8),
        x_zero_point=min(draw(st.sampled_from((0, 3, 128, 255))), spec.activation_max),
        weight_zero_point=draw(st.sampled_from((0, 0, 0, 5))),
        weight_scale=scales,
        bias=torch.randn(spec.out_channels, generator=generator) * 9 if spec.bias else None,
        relu=draw(st.booleans()) and not spec.transposed,
    )


@st.composite
def convolutions(draw):
    dims = draw(st.sampled_from((1, 2, 2, 2, 3)))
    groups = draw(st.sampled_from((1, 1, 2, 3, 8, 16)))
    in_group, out_group = draw(
        st.sampled_from(((1, 1), (1, 2), (2, 2), (3, 5), (4, 4), (8, 8), (16, 16), (16, 9)))
    )
    transposed = draw(st.sampled_from((False, False, False, True)))

    def each(*values):
        same = draw(st.booleans())
        first = draw(st.sampled_from(values))
        return tuple(first if same else draw(st.sampled_from(values)) for _ in range(dims))

    kernel, stride, dilation = each(3, 1, 2, 5), each(1, 2, 3), each(1, 1, 2)
    padding = tuple((k - 1) // 2 for k in kernel) if draw(st.booleans()) else each(0, 1, 2)
    spec = OpSpec(
        f"conv{dims}d",
        groups * in_group,
        groups * out_group,
        groups,
        kernel,
        stride,
        padding,
        dilation,
        transposed=transposed,
        per_channel=draw(st.booleans()),
        bias=draw(st.booleans()),
        batch=draw(st.sampled_from((1, 0, 2))),
        spatial=tuple(draw(st.integers(2, 8)) for _ in range(dims)),
        activation_max=draw(st.sampled_from((255, 127))),
    )
    if transposed:
        most = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
        spec = spec.replace(output_padding=tuple(draw(st.integers(0, n)) for n in most))
        per_dim = zip(spec.spatial, stride, padding, dilation, kernel, strict=True)
        assume(all((n - 1) * s - 2 * p + d * (k - 1) >= 0 for n, s, p, d, k in per_dim))
    else:
        assume(all(n > 0 for n in spec.output_size))
    return draw(problems(spec))


@st.composite
def linears(draw):
    spec = OpSpec(
        "linear",
        draw(st.sampled_from((1, 3, 16, 37, 64, 257, 600))),
        draw(st.sampled_from((1, 5, 16, 33, 64))),
        per_channel=draw(st.booleans()),
        bias=draw(st.booleans()),
        batch=draw(st.sampled_from((1, 0, 2, 7, 33))),
        activation_max=draw(st.sampled_from((255, 127))),
    )
    return draw(problems(spec))


def refusals(kernel, spec, on=CPU):
    """What the router is told: the kernel's own reasons, and errata."""
    return Routing(on, RuleTable("none", ()), {kernel.name: kernel}, (), ERRATA).refusals(spec)


def tries_at_least(number):
    """The test checked this kernel so often: a refusal of everything must not pass as a success."""

    def wrap(test):
        @functools.wraps(test)
        def counted(kernel, **drawn):
            before = CASES[kernel.name]
            test(kernel=kernel, **drawn)
            never = test.__name__ != "test_convolutions" and kernel.name == "native"
            if not never and not kernel.missing_features(CPU):
                assert CASES[kernel.name] - before >= number

        return counted

    return wrap


def check(kernel, problem):
    if refusals(kernel, problem.spec):
        return
    CASES[kernel.name] += 1
    assert problem.error(kernel) <= 1, problem.spec


@by_kernel
@tries_at_least(20)
@given(problem=convolutions())
@few
def test_convolutions(kernel, problem):
    check(kernel, problem)


@by_kernel
@tries_at_least(20)
@given(problem=linears())
@few
def test_linears(kernel, problem):
    check(kernel, problem)


@by_kernel
@tries_at_least(20)
@given(st.integers(0, 2**31), st.sampled_from((1, 5, 64, 129)), st.integers(0, 4), st.booleans())
@few
def test_dynamic_linears(kernel, seed, length, rows, relu):
    generator = torch.Generator().manual_seed(seed)
    limit = 64 if seed % 2 else 127
    weight = torch.randint(-limit, limit + 1, (9, length), generator=generator).to(torch.int8)
    scales = torch.rand(9, generator=generator) * 0.01 + 0.001
    spec = OpSpec("linear", length, 9, dynamic=True)
    codes = torch.zeros(rows, length, dtype=torch.uint8)
    problem = Problem(spec, codes, weight, weight_scale=scales, bias=torch.ones(9))
    if refusals(kernel, problem.spec):
        return
    CASES[kernel.name] += 1
    x = torch.randn(rows, length, generator=generator) + (seed % 5 - 2)
    run = torch.ops.quantized.linear_relu_dynamic if relu else torch.ops.quantized.linear_dynamic
    want = reference.linear_dynamic(x, weight, scales, 0, problem.bias, relu=relu)
    # One code of one or two inputs may round the other way.
    step = (float(x.max().clamp(min=0) - x.min().clamp(max=0)) / 255) if rows else 0.0
    torch.testing.assert_close(
        run(x, problem.pack(kernel)), want, rtol=1e-5, atol=2 * step * 127 * 0.011
    )


# What a runtime has to know of QNNPACK, since no shape and no weight tells.


@pytest.mark.parametrize(
    ("x_scale", "x_zero_point", "y_factor", "right"),
    [(1.0, 0, 1, True), (1.0, 50, 1, False), (1.0, 0, 2, False), (0.5, 50, 2, True)],
)
def test_qnnpack_pack_holds_its_first_quantization(x_scale, x_zero_point, y_factor, right):
    """Until the input scale changes, which is the last case."""
    geometry = ((3, 3), (1, 1), (1, 1), (4, 4))
    spec = conv("conv2d", 8, 4, 1, *geometry, per_channel=False, bias=False)
    codes = torch.full((1, 8, 4, 4), 100, dtype=torch.uint8)
    first = Problem(spec, codes, torch.ones(4, 8, 3, 3, dtype=torch.int8), x_scale=1.0)
    packed = first.pack(KERNELS["qnnpack"])

    def run(problem):
        x = torch._make_per_tensor_quantized_tensor(codes, problem.x_scale, problem.x_zero_point)
        return torch.ops.quantized.conv2d(x, packed, problem.y_scale, Y_ZERO_POINT).int_repr()

    assert torch.equal(run(first), first.expected())
    second = dataclasses.replace(first, x_scale=x_scale, x_zero_point=x_zero_point)
    second.y_scale = first.y_scale * y_factor
    assert torch.allclose(run(second).float(), second.expected().float(), atol=1) is right


@pytest.mark.parametrize(("weight_scale", "wrong"), [(1e-6, False), (1e-12, True)])
def test_qnnpack_bias_must_fit_int32(weight_scale, wrong):
    """The bias is held in units of x_scale * weight_scale."""
    weight = torch.zeros(4, 8, dtype=torch.int8)
    problem = Problem(
        OpSpec("linear", 8, 4),
        torch.zeros(1, 8, dtype=torch.uint8),
        weight,
        weight_scale=torch.full((4,), weight_scale),
        bias=torch.full((4,), 1e-3),
    )
    assert (problem.error(KERNELS["qnnpack"]) > 1) is wrong


# Refusals that no weight can lift: (kernel, spec, words of the reason, levels). At those levels
# (None: at all) it is run all the same and has to fail, so that a refusal goes when the library
# gets it right. Nowhere, where what goes wrong is to read memory that is not its own.


def conv(op, channels, out, groups, kernel, stride, padding, spatial, **more):
    unit = (1,) * len(kernel)
    return OpSpec(
        op,
        channels,
        out,
        groups,
        kernel,
        stride,
        padding,
        unit,
        spatial=spatial,
        batch=1,
        **{"per_channel": False, "bias": False, **more},
    )


def transposed(dims, channels, out, groups=1, kernel=3, stride=1, **more):
    each = [(v,) * dims for v in (kernel, stride, 0, 5)]
    return conv(f"conv{dims}d", channels, out, groups, *each, transposed=True, **more)


VNNI = {"avx_vnni", "avx512_vnni", "amx_int8"}
REFUSED = [
    ("onednn", transposed(2, 8, 16), "unless they are as many", set()),
    ("onednn", transposed(2, 16, 16, 1, 1, 3), "exceeds its kernel", set()),
    ("onednn", transposed(2, 8, 8, stride=2, output_padding=(1, 1)), "output padding", None),
    (
        "onednn",
        conv("conv2d", 16, 16, 16, (1, 1), (1, 1), (2, 0), (7, 7)),
        "reaches their kernel",
        VNNI,
    ),
    (
        "onednn",
        conv("conv2d", 16, 16, 1, (3, 3), (1, 2), (1, 1), (9, 2)),
        "one column wide",
        {"amx_int8"},
    ),
    (
        "onednn",
        conv("conv2d", 16, 48, 1, (3, 1), (1, 1), (1, 0), (14, 16)),
        "multiple of 16 wide",
        {"amx_int8"},
    ),
    ("qnnpack", transposed(3, 8, 8), "three-dimensional", None),
    ("qnnpack", transposed(2, 8, 8, 2, per_channel=True), "scale for each channel", None),
    ("fbgemm", transposed(2, 8, 8, per_channel=True), "per-channel", None),
    ("onednn", transposed(2, 8, 8, per_channel=True), "per-channel", None),
]


@pytest.mark.parametrize(
    ("name", "spec", "reason", "levels"), REFUSED, ids=[f"{r[0]}-{r[2]}" for r in REFUSED]
)
def test_refusals_are_needed(name, spec, reason, levels):
    generator = torch.Generator().manual_seed(0)
    shape = (spec.out_channels, spec.in_channels // spec.groups)
    if spec.transposed:
        shape = (spec.in_channels, spec.out_channels // spec.groups)
    weight = torch.randint(-60, 61, shape + spec.kernel, generator=generator).to(torch.int8)
    x = torch.randint(0, 256, (1, spec.in_channels, *spec.spatial), generator=generator)
    scales = torch.ones(shape[1] if spec.per_channel else 1)
    problem = Problem(spec, x.to(torch.uint8), weight, x_zero_point=101, weight_scale=scales)
    most = isa.at("amx_int8")  # some refusals are of the highest level's kernels alone
    assert any(reason in r for r in refusals(KERNELS[name], problem.spec, most)[name])
    if levels is not None and CPU.isa not in levels:
        return
    try:
        error = problem.error(KERNELS[name])
    except RuntimeError:
        return
    assert error > 1


def test_onednn_refuses_weight_zero_points():
    spec = OpSpec("linear", 4, 4)
    weight = torch.ones(4, 4, dtype=torch.int8)
    asymmetric = Problem(spec, weight.to(torch.uint8), weight, weight_zero_point=1)
    reasons = KERNELS["onednn"].not_supported_reasons(asymmetric.spec, CPU)
    assert reasons == ["weights with a zero point other than 0 are not supported"]


@by_kernel
def test_empty_weights_are_refused(kernel):
    if kernel.name == "reference":
        return  # which says what PyTorch's own convolution says
    reasons = kernel.not_supported_reasons(OpSpec("linear", 0, 4), CPU)
    assert "the weight is empty: 0→4 channels" in reasons


@pytest.mark.parametrize("name", ["fbgemm", "onednn"])
def test_missing_features_are_named(name):
    bare = isa.bare()
    assert KERNELS[name].missing_features(bare) == ["avx2"]


def test_unknown_weights_leave_the_shape_alone_to_judge():
    plain = isa.at("avx2")
    for kernel in KERNELS.values():
        spec = OpSpec("conv2d", 24, 24, 1, (3, 3), (1, 1), (1, 1), (1, 1), (0, 0))
        assert kernel.not_supported_reasons(spec, plain) == []


def test_fallback_order_ends_with_a_kernel_that_refuses_nothing():
    assert list(KERNELS) == ["fbgemm", "onednn", "native", "qnnpack", "reference"]
    bare = isa.bare()
    assert KERNELS["reference"].not_supported_reasons(OpSpec("linear", 0, 0), bare) == []


def test_the_registry_rejects_a_name_taken_twice():
    class Impostor(Kernel):
        name, engine = "onednn", "onednn"

        def not_supported_reasons(self, spec, cpu):
            return []

    with pytest.raises(ValueError, match=r"'onednn'.*OnednnKernel.*Impostor"):
        _register([*KERNELS.values(), Impostor()])


@pytest.mark.parametrize("level", [level for level in isa.LEVELS if level != CPU.isa])
def test_every_isa_level(level, capsys):
    """This module, and the adversarial weights of the proof, held to a lower level."""
    if not isa.has(level):
        pytest.skip(f"NOT TESTED: this CPU has no {level}")
    here = Path(__file__).parent
    files = [str(here / name) for name in ("test_conformance.py", "test_saturation.py")]
    select = "not test_every_isa_level and not librarys and not facts"
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-k", select, *files]
    done = subprocess.run(
        command, env=isa.environment(level), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = re.search(rf"conformance: (\d+) cases at {level} .*", done.stdout)
    assert found is not None
    assert int(found[1]) > 0
    with capsys.disabled():
        print(f"\n{found[0]}")

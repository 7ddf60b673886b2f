"""Every shipped erratum is true of the installed torch, and no wider than its examples show.

Each case runs in a process of its own: what an erratum denies may corrupt memory.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from typing import Literal

import pytest

from tests import isa
from x86quant.kernels import fbgemm
from x86quant.spec import OpSpec
from x86quant.tables.errata import Erratum, read_errata

ERRATA = read_errata(importlib.metadata.version("torch"))


# What oneDNN is capped to, so that it runs as on such a CPU; FBGEMM's errata need none.
TRIES = 8  # what reads memory that nobody wrote is right now and then
CAPS = {"avx2": "AVX2", "avx_vnni": "AVX2_VNNI", "avx512": "AVX512_CORE", "amx_int8": "ALL"}


def conv(
    op: Literal["conv2d", "conv3d"],
    channels: int,
    outputs: int,
    kernel: int | tuple[int, ...],
    groups: int = 1,
    *,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    size: int | tuple[int, ...] = 6,
    transposed: bool = False,
) -> OpSpec:
    n = int(op[4])

    def each(value: int | tuple[int, ...]) -> tuple[int, ...]:
        return (value,) * n if isinstance(value, int) else value

    return OpSpec(
        op, channels, outputs, groups, each(kernel), each(stride), each(padding), (1,) * n,
        (0,) * n, transposed, per_channel=not transposed, spatial=each(size),
    )  # fmt: skip


# engine, an op it gets wrong, a neighbour it gets right, the level of CPU
CASES: list[tuple[str, OpSpec, OpSpec, str]] = [
    (
        "onednn",
        conv("conv2d", 16, 8, 3, padding=1, transposed=True),
        conv("conv2d", 16, 16, 3, padding=1, transposed=True),
        "avx_vnni",
    ),
    (
        "fbgemm",
        conv("conv2d", 16, 16, 2, stride=2, transposed=True),
        conv("conv2d", 16, 12, 2, stride=2, transposed=True),
        "avx_vnni",
    ),
    (
        "fbgemm",
        conv("conv2d", 40, 40, 3, 20, padding=1),
        conv("conv2d", 48, 48, 3, 24, padding=1),
        "avx512",
    ),
    (
        "fbgemm",
        conv("conv3d", 24, 24, 3, 12, padding=1),
        conv("conv3d", 32, 32, 3, 16, padding=1),
        "avx512",
    ),
    (
        "fbgemm",
        conv("conv2d", 40, 40, 3, 10, padding=1),
        conv("conv2d", 48, 48, 3, 12, padding=1),
        "avx512",
    ),
    (
        "fbgemm",
        conv("conv3d", 24, 24, 3, 6, padding=1),
        conv("conv3d", 32, 32, 3, 8, padding=1),
        "avx512",
    ),
    (
        "onednn",
        conv("conv2d", 160, 160, 3, 2, size=(13, 9)),
        conv("conv2d", 128, 128, 3, 2, size=(13, 9)),
        "avx512",
    ),
    (
        "onednn",
        conv("conv2d", 160, 160, 1, 2, size=14),
        conv("conv2d", 128, 128, 1, 2, size=14),
        "avx_vnni",
    ),
    (
        "onednn",
        conv("conv2d", 96, 96, 3, 2, size=(15, 13)),
        conv("conv2d", 64, 64, 3, 2, size=(15, 13)),
        "amx_int8",
    ),
    (
        "onednn",
        conv("conv2d", 48, 192, 5, 2, padding=1, size=15),
        conv("conv2d", 192, 192, 5, 2, padding=1, size=15),
        "amx_int8",
    ),
    (
        "onednn",
        conv("conv2d", 16, 16, 1, 16, padding=(2, 0), size=7),
        conv("conv2d", 16, 16, 3, 16, padding=(2, 0), size=7),
        "avx_vnni",
    ),
    (
        "onednn",
        conv("conv2d", 16, 16, 3, stride=(1, 2), padding=1, size=(9, 2)),
        conv("conv2d", 16, 16, 3, stride=(1, 2), padding=1, size=(9, 4)),
        "amx_int8",
    ),
    (
        "onednn",
        conv("conv2d", 16, 48, (3, 1), padding=(1, 0), size=(14, 16)),
        conv("conv2d", 16, 48, (3, 1), padding=(1, 0), size=(14, 15)),
        "amx_int8",
    ),
    (
        "qnnpack",
        conv("conv3d", 8, 8, 3, transposed=True),
        conv("conv2d", 8, 8, 3, transposed=True),
        "avx_vnni",
    ),
    (
        "qnnpack",
        conv("conv2d", 8, 8, 3, 2, transposed=True).replace(per_channel=True),
        conv("conv2d", 8, 8, 3, 2, transposed=True),
        "avx_vnni",
    ),
    (
        "fbgemm",
        conv("conv3d", 32, 32, 7, 32, padding=3, size=(1, 24, 24)),
        conv("conv3d", 32, 32, 3, 32, padding=1, size=(1, 24, 24)),
        "avx_vnni",
    ),
    (
        "fbgemm",
        conv("conv2d", 14, 14, 3, 7, padding=1),
        conv("conv2d", 40, 40, 3, 20, padding=1),
        "avx2",
    ),
    (
        "fbgemm",
        conv("conv3d", 14, 14, 3, 7, padding=1),
        conv("conv3d", 40, 40, 3, 20, padding=1),
        "avx2",
    ),
    (
        "fbgemm",
        conv("conv2d", 20, 20, 3, 5, padding=1),
        conv("conv2d", 24, 24, 3, 6, padding=1),
        "avx2",
    ),
    (
        "fbgemm",
        conv("conv3d", 20, 20, 3, 5, padding=1),
        conv("conv3d", 24, 24, 3, 6, padding=1),
        "avx2",
    ),
    (
        "onednn",
        conv("conv2d", 1, 13, 3, padding=3, size=30),
        conv("conv2d", 1, 13, 3, padding=2, size=30),
        "avx512",
    ),
]


def concerning(engine: str, spec: OpSpec, level: str) -> list[Erratum]:
    return [e for e in ERRATA if e.kernel == engine and e.matches(spec, isa.at(level))]


def test_every_erratum_has_a_case() -> None:
    shown = [
        erratum for engine, wrong, _, level in CASES for erratum in concerning(engine, wrong, level)
    ]
    assert len(shown) == len(CASES)
    assert set(map(id, shown)) == set(map(id, ERRATA))
    assert not [right for engine, _, right, level in CASES if concerning(engine, right, level)]


def has_avx512() -> bool:
    """Of the CPU itself, which is what these kernels ask."""
    import torch

    return bool(torch.cpu.get_capabilities()["avx512_f"])


@pytest.mark.parametrize("number", range(len(CASES)))
def test_an_erratum_is_true_and_its_neighbour_is_not_hit(number: int) -> None:
    engine, wrong, _, level = CASES[number]
    erratum = concerning(engine, wrong, level)[0]
    if engine == "onednn" and not isa.has(level):
        pytest.skip(f"this CPU has no {level}")
    if fbgemm.path(wrong) == "groupwise" and has_avx512() is not (level == "avx512"):
        pytest.skip("FBGEMM's group-wise kernels end after other groups with AVX-512 than without")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.test_errata", str(number)],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": CAPS[level], "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,  # emulated CPUs are slow
        check=False,
    )
    outcomes = done.stdout.split()
    if done.returncode < 0:  # a crash is as wrong as can be
        outcomes = [*outcomes, "wrong"][:2]
    assert outcomes == ["right", "wrong"], f"narrow or delete: {erratum.because}\n{done.stderr}"


def run_case(engine: str, spec: OpSpec) -> str:
    """ "right" if the stock engine is within one step of float arithmetic, else "wrong"."""
    import torch

    generator = torch.Generator().manual_seed(0)
    per_group = (spec.in_channels, spec.out_channels // spec.groups)
    if not spec.transposed:
        per_group = (spec.out_channels, spec.in_channels // spec.groups)
    # Small weights, 7-bit inputs: nothing can saturate.
    w = torch.randint(-60, 61, (*per_group, *spec.kernel), generator=generator).float()
    x = torch.randint(-7, 121, (2, spec.in_channels, *(spec.spatial or ())), generator=generator)
    geometry = [spec.stride, spec.padding, spec.dilation, spec.groups]
    name: str = spec.op
    if spec.transposed:
        name = spec.op.replace("conv", "conv_transpose")
        rest = (spec.output_padding, spec.groups, spec.dilation)
        wanted = getattr(torch.nn.functional, name)(
            x.float(), w, None, spec.stride, spec.padding, *rest
        )
        geometry.insert(2, spec.output_padding)
    else:
        wanted = getattr(torch.nn.functional, name)(x.float(), w, None, *geometry)
    scale = float(wanted.abs().max()) / 127
    torch.backends.quantized.engine = engine
    weight = torch.quantize_per_tensor(w, 1.0, 0, torch.qint8)
    if spec.transposed and spec.per_channel:
        ones, zeros = torch.ones(w.shape[1]), torch.zeros(w.shape[1], dtype=torch.long)
        weight = torch.quantize_per_channel(w, ones, zeros, 1, torch.qint8)
    packed = getattr(torch.ops.quantized, f"{name}_prepack")(weight, None, *geometry)
    quantized = torch.quantize_per_tensor(x.float(), 1.0, 7, torch.quint8)
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}[spec.dims]
    quantized = quantized.contiguous(memory_format=layout)
    result = getattr(torch.ops.quantized, name)(quantized, packed, scale, 128)
    codes = torch.quantize_per_tensor(wanted, scale, 128, torch.quint8)
    apart = (result.int_repr().int() - codes.int_repr().int()).abs().max()
    return "right" if apart <= 1 else "wrong"


if __name__ == "__main__":
    engine, wrong, right, _ = CASES[int(sys.argv[1])]
    for spec in (right, wrong):
        outcome = "right"
        for _try in range(TRIES):
            try:
                outcome = run_case(engine, spec)
            except RuntimeError as error:  # of scales read past their end, as of anything else
                print(error, file=sys.stderr)
                outcome = "wrong"
            if outcome == "wrong":
                break
        print(outcome, flush=True)

"""Programs and their steps: what they take, and what they refuse in one clear error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests.lowering.test_lowering import IMAGE, Convolutions, Residual
from tests.runtime.compiled_models import compiled, loaded, plan_of
from tests.step_files import copy_step
from tests.torch_threads import threads_of
from x86quant import extension
from x86quant.kernels import graph_kernels
from x86quant.runtime.native_forms import FORMS
from x86quant.runtime.programs import NativeStep
from x86quant.runtime.segment import Segment

__all__ = ["loaded"]

# Stock PyTorch warns of its own default observers.
pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")


# ------------------------------------------------------------------------ the direct call


class Tagged(torch.Tensor):
    """A subclass: what it holds is its own business."""


def test_a_second_run_calls_the_program_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    module = compiled(Residual(), *IMAGE)
    x = torch.randn(IMAGE)
    expected = module(x)
    monkeypatch.setattr(Segment, "plan", None)  # no look-up of plans: it would raise
    assert torch.equal(module(x), expected)
    assert torch.equal(module(x.clone()), expected)
    with pytest.raises(TypeError):
        module(x[:1])


def test_what_the_direct_call_does_not_take_runs_all_the_same() -> None:
    module = compiled(Residual(), *IMAGE)
    x = torch.randn(IMAGE)
    expected = module(x)
    assert torch.equal(module(x.as_subclass(Tagged)), expected)
    assert torch.equal(module((-x).conj().resolve_conj()), module.graph_module(-x))
    assert torch.equal(module(torch._neg_view(-x)), expected)
    assert torch.equal(module(x.to(memory_format=torch.channels_last)), expected)
    with pytest.raises(x86quant.InvalidInputError, match="float32"):
        module(x.double())
    with pytest.raises(x86quant.InvalidInputError, match="takes 1 inputs"):
        module(x, x)


def test_a_program_refuses_inputs_it_was_not_planned_for() -> None:
    """Never a read out of bounds, whoever calls."""
    module = compiled(Convolutions(nn.Conv2d(4, 4, 3)), 1, 4, 8, 8)
    program = plan_of(module).program
    for wrong in ([], [torch.randn(1, 4, 8, 7)], [torch.randn(1, 4, 8, 8).double()],
                  [torch.randn(2, 4, 8, 8)[:1].transpose(2, 3)]):  # fmt: skip
        with pytest.raises(ValueError, match="other inputs"):
            program.run(wrong)


# ------------------------------------------------------------------------ layouts and threads


def test_what_is_no_call_of_a_program_is_refused() -> None:
    program = extension.native().Program(0, 1)
    assert program.try_run(()) is None  # it takes one input
    no_lists: tuple[Any, ...] = ({}, None, torch.ones(1))
    for wrong in no_lists:
        with pytest.raises(TypeError, match="list or a tuple"):
            program.try_run(wrong)
    with pytest.raises(TypeError, match="not an object of type int"):
        program.run([1])
    with pytest.raises(TypeError):
        type(program)(0)
    with pytest.raises(TypeError, match="pickle"):
        copy.deepcopy(program)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
def test_copies_move_whole_elements(size: int) -> None:
    x = torch.randint(0, 256, (3, 4, 5 * size), dtype=torch.uint8)
    program = extension.native().Program(0, 1)
    program.expect([3, 4, 5 * size], [20 * size, 5 * size, 1], "uint8")
    program.add_output([5, 3, 4 * size], [12 * size, 4 * size, 1], "uint8")
    NativeStep("strided_copy", {
        "element_size": size, "sizes": [5, 3, 4], "from": [1, 0],
        "from_strides": [size, 20 * size, 5 * size],
        "to": [2, 0], "to_strides": [12 * size, 4 * size, size],
    }).add_to(program)  # fmt: skip
    with pytest.raises(ValueError, match="once check_reach has found it right"):
        program.run([x])
    program.check_reach()
    (copy,) = program.run([x])
    assert torch.equal(copy, x.view(3, 4, 5, size).permute(2, 0, 1, 3).reshape(5, 3, 4 * size))


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("rows", [1, 3, 4, 15, 16, 37])
@pytest.mark.parametrize("columns", [1, 5, 16, 19, 64, 83])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_become_columns(size: int, rows: int, columns: int, threads: int) -> None:
    """By tiles, what is left at their borders one by one; what lies between rows stays."""
    images, gap = 2, 3
    x = torch.randint(0, 256, (images, columns, rows * size), dtype=torch.uint8)
    line = (columns + gap) * size
    program = extension.native().Program(0, 1)
    program.expect([*x.shape], [*x.stride()], "uint8")
    program.add_output([images, rows, line], [rows * line, line, 1], "uint8")
    program.add_step(
        "strided_copy",
        {
            "element_size": 1, "sizes": [images, rows, line],
            "from": [1, 0], "from_strides": [0, 0, 0],
            "to": [2, 0], "to_strides": [rows * line, line, 1],
        },
    )  # fmt: skip
    program.add_step(
        "strided_copy",
        {
            "element_size": size, "sizes": [images, rows, columns],
            "from": [1, 0], "from_strides": [columns * rows * size, size, rows * size],
            "to": [2, 0], "to_strides": [rows * line, line, size],
        },
    )  # fmt: skip
    program.check_reach()
    with threads_of(threads):
        (found,) = program.run([x])
    moved = x.view(images, columns, rows, size).transpose(1, 2).reshape(images, rows, -1)
    assert torch.equal(found[..., : columns * size], moved)
    assert bool((found[..., columns * size :] == x[0, 0, 0]).all())


@pytest.mark.parametrize("name", [
    "bool", "uint8", "int8", "int16", "float16", "bfloat16", "int32", "float32", "int64", "float64",
])  # fmt: skip
def test_tensors_are_as_large_as_their_types_say(name: str) -> None:
    x = torch.tensor([0, 1, 1], dtype=getattr(torch, name))
    beyond = f"reaches bytes 0 to {x.nbytes + 1} of {x.nbytes}"
    for more, refused in ((-1, "no step of a plan writes all"), (0, None), (1, beyond)):
        program = extension.native().Program(0, 1)
        program.expect([3], [1], name)
        program.add_output([3], [1], name)
        NativeStep(*copy_step((1, 0), (2, 0), x.nbytes + more)).add_to(program)
        if refused is None:
            program.check_reach()
            assert torch.equal(program.run([x])[0], x)
        else:
            with pytest.raises(ValueError, match=refused):
                program.check_reach()


def test_a_step_that_does_not_update_an_input_cannot_write_to_it() -> None:
    program = extension.native().Program(16, 1)
    program.expect([4], [1], "uint8")
    program.add_output([4], [1], "uint8")
    NativeStep(*copy_step((1, 0), (2, 0), 4)).add_to(program)
    program.check_reach()
    NativeStep(*copy_step((2, 0), (1, 0), 4)).add_to(program)
    with pytest.raises(ValueError, match="writes to input 0"):
        program.check_reach()


# A step of each kind that is right, but for what a test changes.
_WORDS = [1, 0, 1, 1, 1, 1, 4, 4, 4, 4, 4]


_TENSORS = {"a": _WORDS, "out": [2, *_WORDS[1:]]}


_CODES = {"a_zp": 0, "out_zp": 0}


_WINDOW = {"kernel": [1] * 3, "stride": [1] * 3, "padding": [0] * 3, "dilation": [1] * 3}


_FLOATS, _TABLE = torch.ones(4), torch.zeros(256, dtype=torch.uint8)


_STEPS: dict[str, dict[str, Any]] = {
    "requantize": {**_TENSORS, **_CODES, "a_mult": 1.0},
    "max_pool": {**_TENSORS, **_WINDOW},
    "pad": {**_TENSORS, "before": [0] * 3, "mode": 0, "a_zp": 0},
    "lut": {**_TENSORS, "lut": _TABLE},
    "affine": {**_TENSORS, **_CODES, "scale_c": _FLOATS, "shift_c": _FLOATS},
    "rows": {
        "rows": 2, "features": 4, "x": [1, 0], "out_codes": [2, 0], "out_scale": [3, 0],
        "out_zero_point": [4, 0],
    },
    "attention": {
        "batch": 1, "queries": 2, "keys": 3, "heads": 2, "kv_heads": 1, "size": 8, "q": [1, 0],
        "k": [2, 0], "v": [3, 0], "out": [4, 0], "q_strides": [32, 16, 8], "k_strides": [24, 8, 8],
        "v_strides": [24, 8, 8], "causal": False, "scale": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", _STEPS)
def test_steps_take_their_fields(kind: str) -> None:
    NativeStep(kind, _STEPS[kind]).add_to(extension.native().Program(0, 1))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("eclipse", {}, 'no kind of step "eclipse"'),
        ("requantize", {"eps": 1.0}, '"requantize" .* "eps" is not one of this kind'),
        ("requantize", {"a_zp": [1, 2]}, '"a_zp" takes an integer'),
        ("requantize", {"a_zp": 1.0}, '"a_zp" takes an integer, got Double'),
        ("requantize", {"a_zp": 1 << 40}, '"a_zp" is no code'),
        ("requantize", {"lo": 1 << 40}, '"lo" is too large'),
        ("requantize", {"a_zp": 256}, '"a_zp" is no code: 256'),
        ("requantize", {"hi": 256}, "out-of-range argument"),
        ("requantize", {"a_mult": 1}, '"a_mult" takes a real, got Int'),
        ("requantize", {"a_mult": float("nan")}, "not finite"),
        ("requantize", {"lut": [1]}, '"lut" takes a tensor'),
        ("requantize", {"a": None}, '"a" takes integers'),
        ("requantize", {"a": _WORDS[1:]}, '"a" takes 11 integers, got 10'),
        ("requantize", {"out": [2, *_WORDS[1:5], 2, *_WORDS[6:]]}, "do not fit"),
        ("max_pool", {"kernel": [2, 2]}, '"kernel" takes 3 integers, got 2'),
        ("max_pool", {"stride": [1 << 40, 1, 1]}, '"stride" is too large'),
        ("pad", {"mode": 3}, "is no way to pad"),
        ("pad", {"mode": 1, "before": [-1, 0, 0]}, "is no margin"),
        ("pad", {"mode": 2, "before": [0, 1, 0]}, "is no margin"),
        ("pad", {"mode": 2, "out": [2, 0, 1, 1, 2, *_WORDS[5:]]}, "wider margin"),
        ("pad", {"out": [2, 0, 2, *_WORDS[3:]]}, "other images"),
        ("lut", {"lut": _TABLE[1:]}, "256 elements .* got 255"),
        ("lut", {"lut": torch.zeros(256)}, "of type Byte, got 256 of type Float"),
        ("affine", {"shift_c": torch.ones(3)}, "takes a tensor of 4 elements"),
        ("affine", {"scale_c": torch.ones(4).double()}, "of type Float"),
        ("rows", {"rows": -1}, "impossible sizes"),
        ("rows", {"norm": 3, "eps": 1e-5}, "out-of-range argument"),
        ("rows", {"norm": 1, "eps": float("nan")}, "out-of-range argument"),
        ("rows", {"normed": [5, 0]}, "out-of-range argument"),
        ("rows", {"norm": 1, "eps": 1e-5, "norm_bias": _TABLE}, "of 4 elements of type Float"),
        ("attention", {"heads": 3, "kv_heads": 2}, "do not fit"),
        ("attention", {"scale": float("inf")}, "not finite"),
        ("attention", {"mask": [5, 0], "mask_is_bool": 1, "mask_strides": [0, 0, 0]}, "true or f"),
    ],
)
def test_a_wrong_step_is_one_clear_error(kind: str, change: dict[str, Any], message: str) -> None:
    program = extension.native().Program(0, 1)
    with pytest.raises(ValueError, match=message):
        NativeStep(kind, {**_STEPS.get(kind, {}), **change}).add_to(program)


@pytest.mark.parametrize("value", [object(), "1", (1, 2, 3), [1, 2.0, 3], [1 << 70, 1, 1], [None]])
def test_a_field_of_no_type_is_refused(value: object) -> None:
    program = extension.native().Program(0, 1)
    with pytest.raises((TypeError, OverflowError)):
        NativeStep("max_pool", {**_STEPS["max_pool"], "kernel": value}).add_to(program)


def test_every_field_of_a_step_must_be_there() -> None:
    program = extension.native().Program(0, 1)
    for kind, fields in _STEPS.items():
        for name in fields.keys() - {"out_codes"}:  # without it, no codes are wanted
            rest = {n: value for n, value in fields.items() if n != name}
            with pytest.raises(ValueError, match=f'"{kind}" .* "{name}" is missing'):
                NativeStep(kind, rest).add_to(program)


def test_every_kind_of_step_is_made_by_some_form() -> None:
    """The kinds the extension has: an op's of its name, and those that forms name otherwise."""
    extension.load()
    by_name = {op for op in FORMS if "rows" not in op and "bags" not in op}
    by_name -= {
        "adaptive_max_pool",
        "float_conv_codes",
        "linear",
        "linear_real",
        "cat",
        "join",
        "upsample",
        "recurrent_last",
        "int8_cached_attention",
    }
    others = {"copy", "shuffle", "strided_copy", "nearest", "bilinear", "rows", "lookup"}
    others.add("conv_columns")
    assert set(extension.native().step_kinds()) == by_name | others


@pytest.mark.parametrize("kernel", list(graph_kernels()))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_multipliers_that_are_not_finite_are_refused(kernel: str, value: float) -> None:
    extension.load()
    good, bad = torch.ones(4), torch.full((4,), value)
    geometry = [1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0]
    for mult, bias in ((bad, good), (good, bad)):
        with pytest.raises(ValueError, match="not finite"):
            extension.native().pack_graph_conv(
                kernel, torch.ones(4, 4, 1, 1, 1, dtype=torch.int8), mult, bias, None,
                geometry, [0, 0, 0, 255, 0, 0], 0.0,
            )  # fmt: skip

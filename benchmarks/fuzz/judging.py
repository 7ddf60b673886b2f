"""Whether what x86quant made of a program answers as the program does."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import x86quant
from benchmarks.fuzz.programs import Inputs, Program
from benchmarks.fuzz.rounding import raises_too, rounded_results, undefined
from x86quant.compiled import CompiledModule
from x86quant.compiled.guarded import GuardedModule
from x86quant.errors import TRACEBACK_VARIABLE, X86QuantError

# What nobody foresaw is a failure, whatever x86quant would make of it.
os.environ[TRACEBACK_VARIABLE] = "1"
#: The signal to noise, in dB, that is good in any case.
_GOOD = 25.0
#: So much more than in simulated rounding, as a share, integers and truth values may differ.
_MORE_FLIPPED = 0.1
#: Where rounding alone may cost so much, in dB and with what is allowed beyond it, noise is larger
#: than the signal: a division by next to nothing, where other roundings divide by zero.
_ALL_NOISE = -20.0
#: What may stand for zeros only, of which no share can be taken: float rounding, over the root of
#: a norm's eps.
_NEXT_TO_NOTHING = 1e-4


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        kind: "passed", "failed" or "refused".
        reason: why it failed or was refused.
        form: of what passed, what came back: "whole", "parts" or "float".
        sharp: of what passed, whether every answer was close to eager float, so that anything
            but rounding would have been seen.
        int8_calls: how many of the calls that were compared ran an int8 graph.
    """

    kind: str
    reason: str = ""
    form: str = ""
    sharp: bool = False
    int8_calls: int = 0


class _Refused(Exception):  # noqa: N818
    """The program is none for this test: stock torch cannot convert it, or x86quant says no."""


class _Failed(Exception):  # noqa: N818
    """It raised what x86quant does not raise on purpose."""


def sqnr(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Signal to noise in dB, of what is finite in ``expected``."""
    expected, actual = expected.double(), actual.double()
    finite = torch.isfinite(expected)
    if not torch.isfinite(actual[finite]).all():
        return -math.inf
    signal, noise = expected[finite].norm(), (expected - actual)[finite].norm()
    if noise == 0:
        return math.inf
    return float(20 * torch.log10(signal / noise)) if signal > 0 else -math.inf


def _flipped(expected: torch.Tensor, actual: torch.Tensor) -> float:
    return float((expected != actual).double().mean())


def _more_nan(a: Any, b: Any) -> bool:
    """Whether ``b`` is NaN where ``a``, of its shape, is not."""
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if not both or a.shape != b.shape or not (a.is_floating_point() and b.is_floating_point()):
        return False
    return bool((b.isnan() & ~a.isnan()).any())


def _found(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both might list what was found in values, as argwhere does: another number of it."""
    return a.dim() == b.dim() and sum(n != m for n, m in zip(a.shape, b.shape, strict=True)) == 1


def _differs_where(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether the shape of ``x`` differs from that of ``a`` in the dimensions in which ``b``'s
    does, and in no others.
    """
    if x.dim() != a.dim():
        return False
    sizes = zip(a.shape, b.shape, x.shape, strict=True)
    return all((n == k) == (n == m) for n, m, k in sizes)


#: A result of which something was rounded, and how much worse, in dB, an answer may be.
_Rounded = tuple[torch.Tensor, float]


class Judge:
    """Compares answers with those of one program."""

    def __init__(self, model: nn.Module, program: Program) -> None:
        self._model = model
        self._program = program
        self.sharp = True

    def wrong(self, actual: Any, expected: Any, inputs: Inputs) -> str | None:
        """What is wrong with ``actual`` in place of ``expected``: the model's result, and what it
        made of its inputs.
        """
        one, spec = pytree.tree_flatten(expected)
        other, other_spec = pytree.tree_flatten(actual)
        if spec != other_spec:
            return f"structure {other_spec} instead of {spec}"
        rounded = functools.cache(lambda: self._rounded(inputs))
        if any(map(_more_nan, one, other)):
            one = self._undefined_apart(one, other, inputs)
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            if (found := self._wrong_leaf(a, b, index, rounded)) is not None:
                return f"output {index}: {found}"
        return None

    def explains(self, error: Exception, inputs: Inputs) -> bool:
        """Whether the model itself may raise ``error`` once its results are rounded."""
        self.sharp = False
        program = self._program
        bits = program.settings.get("activation_bits", 8)
        return raises_too(self._model, inputs, program.calibration(), bits, error)

    def _wrong_leaf(
        self, a: Any, b: Any, index: int, rounded: Callable[[], list[list[_Rounded]]]
    ) -> str | None:
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            return None if type(a) is type(b) and a == b else f"{b}, not {a}"
        if a.dtype == b.dtype and a.shape != b.shape and _found(a, b):
            self.sharp = False
            if not rounded() or any(_differs_where(a, b, x) for x, _ in rounded()[index]):
                return None
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{b.dtype} {tuple(b.shape)} for {a.dtype} {tuple(a.shape)}"
        if not a.numel():
            return None
        if not a.is_floating_point():
            if not (share := _flipped(a, b)):
                return None
            self.sharp = False
            if not rounded():
                return None
            roundings = rounded()[index]
            most = max(_flipped(a, x) if x.shape == a.shape else 1.0 for x, _ in roundings)
            if share <= most * 2 + _MORE_FLIPPED:
                return None
            return f"{share:.0%} of the integers differ, where rounding explains {most:.0%}"
        found = sqnr(a, b)
        if found >= _GOOD:
            return None
        self.sharp = False
        if not rounded() or (not a.any() and (b.abs() <= _NEXT_TO_NOTHING).all()):
            return None
        least = min(
            sqnr(a, x) - allowed if x.shape == a.shape else -math.inf
            for x, allowed in rounded()[index]
        )
        if found >= min(least, _GOOD) or least < _ALL_NOISE:
            return None
        return f"{found:.1f} dB, where rounding explains {least:.1f}"

    def _undefined_apart(self, expected: list[Any], actual: list[Any], inputs: Inputs) -> list[Any]:
        """``expected``, NaN where ``actual`` is and may be."""
        self.sharp = False
        program = self._program
        bits = program.settings.get("activation_bits", 8)
        found = undefined(self._model, inputs, program.calibration(), bits)
        leaves = pytree.tree_leaves(found)
        if len(leaves) < len(expected):
            return expected
        return [
            a.masked_fill(b.isnan() & x.isnan(), math.nan)
            if _more_nan(a, b) and a.shape == x.shape
            else a
            for a, b, x in zip(expected, actual, leaves, strict=False)
        ]

    def _rounded(self, inputs: Inputs) -> list[list[_Rounded]]:
        """For each leaf of the result, what rounding makes of it."""
        program = self._program
        bits = program.settings.get("activation_bits", 8)
        found = rounded_results(self._model, inputs, program.calibration(), bits)
        leaves = [(pytree.tree_leaves(one), allowed) for one, allowed in found]
        most = max((len(x) for x, _ in leaves), default=0)
        nothing = torch.empty(0)
        return [[(x[i] if i < len(x) else nothing, n) for x, n in leaves] for i in range(most)]


def quantized(model: nn.Module, program: Program) -> tuple[nn.Module, nn.Module]:
    """The int8 form of ``model``, and what it should answer as."""
    data = program.calibration()
    fast = x86quant.quantize(model, data, speed_check=False, progress=False, **program.settings)
    return fast, model


def compiled(model: nn.Module, program: Program) -> tuple[nn.Module, nn.Module]:
    """The compiled form of a stock-converted ``model``, and what that should answer as."""
    from torch.ao.quantization.quantize_fx import (
        convert_fx,
        convert_to_reference_fx,
        prepare_fx,
    )

    if "empty" in program.source:
        # Stock conversion drops a statement that fills such a tensor in place, so that what it
        # returns is whatever was in memory.
        raise _Refused("stock conversion drops writes to new memory")
    first, *more = program.calibration()
    # Without VNNI stock kernels saturate, which would refuse most programs: ours are behind them.
    with torch.no_grad(), x86quant.enable():
        prepared = prepare_fx(
            copy.deepcopy(model), x86quant.get_default_qconfig_mapping(), first,
            backend_config=x86quant.get_backend_config(),
        )  # fmt: skip
        for batch in (first, *more):
            prepared(*batch)
        configuration = x86quant.get_backend_config()
        forms = (
            convert_to_reference_fx(copy.deepcopy(prepared), backend_config=configuration),
            convert_fx(prepared, backend_config=configuration),
        )
        inputs = program.data(0, 2)
        answers = [pytree.tree_leaves(form(*copy.deepcopy(inputs))) for form in forms]
    # Stock kernels of transposed convolutions answer wrongly, and stock reference layers pad with
    # zeros whatever the mode: what stock says is the reference where it agrees with itself.
    for a, b in zip(*answers, strict=True):
        if isinstance(a, torch.Tensor) and a.is_floating_point() and sqnr(a, b) < _GOOD:
            raise _Refused("stock conversion has two answers")
    converted = forms[program.seed % 2]
    return x86quant.compile(converted, inputs), converted


_THROUGH = {"quantize": quantized, "compile": compiled}
#: The ways of ``judged``.
THROUGH = tuple(_THROUGH)


def judged(program: Program, through: str) -> Verdict:
    """The verdict on what x86quant makes of ``program``, with nothing on stderr."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return _judged(program, through)
        except _Refused as error:
            return Verdict("refused", str(error))
        except _Failed as error:
            return Verdict("failed", str(error))


def _judged(program: Program, through: str) -> Verdict:
    model = program.build()
    fast, reference = _made(model, program, through)
    judge = Judge(reference, program)
    calls = _Int8Calls(fast)
    for inputs in _compared(program):
        ours, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
        try:
            with torch.no_grad():
                expected = reference(*theirs)
        except Exception:  # it may not take such sizes
            continue
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        try:
            with torch.no_grad():
                actual = fast(*ours)
        except X86QuantError as error:
            if through == "quantize":  # such calls are answered in float
                raise _Failed(f"{shapes}: {error}") from error
            raise _Refused(str(error)) from error
        except Exception as error:
            if judge.explains(error, inputs):
                continue
            raise _Failed(f"{shapes}: {traceback.format_exc(limit=-4)}") from None
        if through == "quantize":
            found = judge.wrong((actual, ours), (expected, theirs), inputs)
            if found is None and not _alike(inputs, ours, theirs):
                found = "its inputs were not left as eager torch leaves them"
        else:  # whose models leave their inputs as they are
            found = judge.wrong((actual, ()), (expected, ()), inputs)
        if found is not None:
            raise _Failed(f"{shapes}: {found}")
    return Verdict("passed", "", _form(fast), judge.sharp, calls.count)


def _alike(given: Inputs, ours: Inputs, theirs: Inputs) -> bool:
    """Whether the same inputs were overwritten; with what, ``Judge.wrong`` has seen."""
    return all(
        b.shape == c.shape and torch.equal(a, b) == torch.equal(a, c)
        for a, b, c in zip(given, ours, theirs, strict=True)
    )


def _made(model: nn.Module, program: Program, through: str) -> tuple[nn.Module, nn.Module]:
    try:
        return _THROUGH[through](model, program)
    except _Refused:
        raise
    except X86QuantError as error:
        raise _Refused(str(error)) from error
    except Exception:
        trace = sys.exc_info()[2]
        own = x86quant.__path__[0]
        if not any(f.f_code.co_filename.startswith(own) for f, _ in traceback.walk_tb(trace)):
            raise _Refused("stock") from None
        raise _Failed(traceback.format_exc(limit=-4)) from None


def _compared(program: Program) -> list[Inputs]:
    """Inputs of another batch size than calibration's, and of one row or another last size."""
    first = program.data(10, 3)
    if program.seed % 3 == 0:
        return [first, program.data(11, 1)]
    if program.seed % 3 == 1:
        return [first, tuple(_longer(x) for x in program.data(11, 4))]
    return [program.data(10, 2), program.data(11, 16)]


def _longer(x: torch.Tensor) -> torch.Tensor:
    """``x`` with two more in its last dimension, if that is not the features."""
    return torch.cat([x, x[..., :2]], -1) if x.dim() > 2 else x


class _Int8Calls:
    """Counts the calls of int8 graphs."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        for module in model.modules():
            if isinstance(module, CompiledModule):
                module.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.count += 1


def _form(model: nn.Module) -> str:
    if isinstance(model, CompiledModule | GuardedModule):
        return "whole"
    int8 = any(isinstance(module, CompiledModule) for module in model.modules())
    return "parts" if int8 else "float"

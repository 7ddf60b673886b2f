"""What 8 bits explain: eager float with each op's result rounded, as noise or to known ranges."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.fuzz.programs import Inputs

#: int8 goes on behind a cast to double, as it does behind clones.
_FLOATS = (torch.float32, torch.float64)


class _ResultsMode(TorchDispatchMode):
    """Shows ``changed`` each float tensor that an op computed, which it may overwrite."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        aliases = any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        name = schema.name.partition("::")[2]
        if aliases or name in ("clone", "detach", "lift_fresh", "_to_copy"):
            return result
        for x in pytree.tree_leaves(result):
            self.seen(x)
        return result

    def seen(self, x: Any) -> Any:
        """``x``, changed."""
        if isinstance(x, torch.Tensor) and x.dtype in _FLOATS and x.numel():
            with _disable_current_modes():
                self.changed(x)
        return x

    def changed(self, x: torch.Tensor) -> None:
        raise NotImplementedError


class _Noise(_ResultsMode):
    """Adds noise of so many steps of rounding to ``levels``.

    The steps are those of the range noted for a result, if that is wider than its own: a single
    value has none of its own.
    """

    def __init__(
        self, seed: int, steps: float, levels: int, ranges: list[tuple[float, float]]
    ) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.share = steps / levels
        self.ranges = iter(ranges)

    def changed(self, x: torch.Tensor) -> None:
        low, high = next(self.ranges, (0.0, 0.0))
        size = max(float(x.max() - x.min()), high - low) * self.share
        if math.isfinite(size):
            x.add_(torch.rand(x.shape, generator=self.generator) - 0.5, alpha=size)


aten = torch.ops.aten
#: Their int8 forms keep the steps of what they clamp.
_CLAMPS = frozenset(
    [aten.clamp.default, aten.clamp_.default, aten.clamp_min.default, aten.clamp_min_.default,
     aten.clamp_max.default, aten.clamp_max_.default, aten.hardtanh.default,
     aten.hardtanh_.default, aten.relu.default, aten.relu_.default]
)  # fmt: skip


class _Ranges(_ResultsMode):
    """Notes the range of each result, in the order in which they are computed: of all values, or
    without a share of them at either end; ``before_clamps``, of what is clamped that before.
    """

    def __init__(
        self,
        found: list[tuple[float, float]],
        without: float = 0.0,
        before_clamps: bool = False,
    ) -> None:
        super().__init__()
        self.found = found
        self.without = without
        self.before_clamps = before_clamps
        self.number = 0
        self.clamped: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.clamped = [args[0].clone()] if self.before_clamps and func in _CLAMPS else []
        return super().__torch_dispatch__(func, types, args, kwargs)

    def changed(self, x: torch.Tensor) -> None:
        ordered = torch.cat([y.nan_to_num().flatten() for y in (x, *self.clamped)]).sort().values
        end = math.ceil(self.without * ordered.numel())
        kept = ordered[end : ordered.numel() - end]
        low, high = (float(kept[0]), float(kept[-1])) if kept.numel() else (0.0, 0.0)
        if self.number == len(self.found):
            self.found.append((0.0, 0.0))
        before = self.found[self.number]
        self.found[self.number] = (min(before[0], low), max(before[1], high))
        self.number += 1


class _Clipped(_ResultsMode):
    """Rounds each result to ``levels`` of the range noted for it."""

    def __init__(self, ranges: list[tuple[float, float]], levels: int) -> None:
        super().__init__()
        self.ranges = iter(ranges)
        self.levels = levels

    def changed(self, x: torch.Tensor) -> None:
        low, high = next(self.ranges, (-math.inf, math.inf))
        step = (high - low) / self.levels
        if 0 < step < math.inf:
            x.copy_(((x / step).round() * step).clamp(low, high))


_PRODUCTS = frozenset(
    [aten.convolution.default, aten.addmm.default, aten.mm.default, aten.bmm.default,
     aten.baddbmm.default]
)  # fmt: skip


class _Zeroed(_ResultsMode):
    """Makes zero of what is closer to it than a step, as rounding may: 1 / x is infinite then."""

    def __init__(self, levels: int, ranges: list[tuple[float, float]]) -> None:
        super().__init__()
        self.levels = levels
        self.ranges = iter(ranges)

    def changed(self, x: torch.Tensor) -> None:
        low, high = next(self.ranges, (0.0, 0.0))
        step = max(float(x.max() - x.min()), high - low) / self.levels
        if math.isfinite(step):
            x.masked_fill_(x.abs() < step, 0.0)


class _Undefined(_Zeroed):
    """Makes zero of what is close to it in results of products, and NaN of infinity, which 1 / x is
    then: a row that holds one has no range for codes, and linears that choose one for each row give
    NaN in that row, as docs/dynamic.md says.
    """

    product = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.product = func in _PRODUCTS
        return super().__torch_dispatch__(func, types, args, kwargs)

    def changed(self, x: torch.Tensor) -> None:
        inexact = x.clone()
        super().changed(inexact)
        if self.product:
            x.copy_(inexact)
        x.masked_fill_(x.isinf(), math.nan)


def _run(model: nn.Module, inputs: Inputs, mode: _ResultsMode) -> tuple[Any, Inputs]:
    """What ``model`` returns, and what its inputs are then."""
    with torch.no_grad(), mode:
        given = tuple(mode.seen(x.clone()) for x in inputs)
        return model(*given), given


#: How much worse, in dB, an answer may be than with noise of the usual size, and with more of it.
#: More noise shows what jumps: roundings, comparisons, the order of values.
_ALLOWANCE, _LITTLE = 15.0, 5.0


def rounded_results(
    model: nn.Module, inputs: Inputs, calibration: list[Inputs], bits: int
) -> list[tuple[Any, float]]:
    """What ``model`` gives for ``inputs`` and makes of them, with its results rounded in several
    ways, each with how much worse in dB than that an answer may be.

    Empty if it takes no noise: indices that are computed may be out of bounds then.
    """
    found = []
    noisy = False
    for mode, allowed in _modes(model, calibration, bits):
        with contextlib.suppress(Exception):
            found.append((_run(copy.deepcopy(model), inputs, mode), allowed))
            noisy = noisy or isinstance(mode, _Noise)
    with contextlib.suppress(Exception):
        shared = _sharing(model, calibration, 2**bits - 1)
        mode = _Clipped(_ranges(model, calibration), 2**bits - 1)
        found.append((_run(shared, inputs, mode), _LITTLE))
    return found if noisy else []


def _sharing(model: nn.Module, calibration: list[Inputs], levels: int) -> nn.Module:
    """``model``, where a layer of products that is called more than once in a call of it rounds
    what it is given to one range for all, and what it gives: a part that several places share has
    one.
    """
    watched = copy.deepcopy(model)
    given: dict[str, list[torch.Tensor]] = {}
    gave: dict[str, list[torch.Tensor]] = {}
    for name, layer in watched.named_modules():
        if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)):
            layer.register_forward_pre_hook(_noting(given.setdefault(name, [])))
            layer.register_forward_hook(_noting(gave.setdefault(name, [])))
    with contextlib.suppress(Exception), torch.no_grad():
        for batch in calibration:
            watched(*copy.deepcopy(batch))
    rounding = copy.deepcopy(model)
    for name, layer in rounding.named_modules():
        if len(given.get(name, [])) > len(calibration):
            layer.register_forward_pre_hook(_rounding(given[name], levels))
            layer.register_forward_hook(_rounding(gave[name], levels))
    return rounding


def _noting(found: list[torch.Tensor]) -> Callable[..., None]:
    """A hook that notes the tensor that a layer is given or, of one that is called behind it, what
    it gives.
    """

    def note(layer: nn.Module, given: tuple[torch.Tensor], *gave: torch.Tensor) -> None:
        found.append((*gave, given[0])[0].clone())

    return note


def _rounding(found: list[torch.Tensor], levels: int) -> Callable[..., torch.Tensor]:
    """A hook that rounds what ``_noting`` notes to the range of all that was found."""
    low = min(0.0, *(float(x.min()) for x in found))
    high = max(0.0, *(float(x.max()) for x in found))
    clipped = _Clipped([], levels)

    def rounded(layer: nn.Module, given: tuple[torch.Tensor], *gave: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            x = (*gave, given[0])[0].clone()
            clipped.ranges = iter([(low, high)])
            clipped.changed(x)
        return x

    return rounded


def undefined(
    model: nn.Module, inputs: Inputs, calibration: list[Inputs], bits: int
) -> tuple[Any, Inputs] | None:
    """What ``model`` gives for ``inputs`` and makes of them, NaN where int8 may say NaN."""
    with contextlib.suppress(Exception):
        mode = _Undefined(2**bits - 1, _ranges(model, calibration))
        return _run(copy.deepcopy(model), inputs, mode)
    return None


def raises_too(
    model: nn.Module, inputs: Inputs, calibration: list[Inputs], bits: int, error: Exception
) -> bool:
    """Whether rounding explains that ``error`` is raised: a mask with more ones, say."""
    for mode, _ in _modes(model, calibration, bits):
        try:
            _run(copy.deepcopy(model), inputs, mode)
        except Exception as other:
            if type(other) is type(error) and str(other) == str(error):
                return True
    return False


def _ranges(
    model: nn.Module,
    calibration: list[Inputs],
    without: float = 0.0,
    before_clamps: bool = False,
) -> list[tuple[float, float]]:
    """Those of each result on calibration data, as :class:`_Ranges` notes them."""
    ranges: list[tuple[float, float]] = []
    with contextlib.suppress(Exception):
        for batch in calibration:
            _run(copy.deepcopy(model), batch, _Ranges(ranges, without, before_clamps))
    return ranges


#: The share of values at either end of a range that observers may leave out.
_TAIL = 1e-4


def _modes(
    model: nn.Module, calibration: list[Inputs], bits: int
) -> list[tuple[_ResultsMode, float]]:
    levels = 2**bits - 1
    ranges = _ranges(model, calibration)
    modes: list[tuple[_ResultsMode, float]] = [(_Clipped(ranges, levels), _ALLOWANCE)]
    modes += [(_Clipped(_ranges(model, calibration, _TAIL), levels), _LITTLE)]
    modes += [(_Clipped(_ranges(model, calibration, before_clamps=True), levels), _LITTLE)]
    modes += [(_Zeroed(levels, ranges), _LITTLE)]
    modes += [(_Noise(seed, 1.5, levels, ranges), _ALLOWANCE) for seed in range(3)]
    modes += [(_Noise(seed, 5.0, levels, ranges), _LITTLE) for seed in range(5)]
    return modes

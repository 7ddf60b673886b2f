"""Operands of one op, and what a few parts of its result have to be.

Activations take every value from 0 to 255. Weights are as those of trained layers: a bell for each
output channel that just reaches -128 or 127, since kernels without VNNI are as quick as weights
let them. A kernel that is legal only for weights that cannot saturate 16-bit sums gets -64..64.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch import Tensor

from x86quant.kernels import reference
from x86quant.kernels.saturation import weight_facts
from x86quant.ops.groups import pack_nibbles, real_weight
from x86quant.spec import OpSpec
from x86quant.tuning.layer_shapes import input_shape, result_shape, weight_shape

#: The widest weights that no pair of can saturate 16-bit sums: 255 * (64 + 64) fits.
NARROW = (-64, 64)
FULL = (-128, 127)
NIBBLES = (-8, 7)

X_ZERO_POINT = 131
Y_ZERO_POINT = 120
X_SCALE = 0.02
RESIDUAL_ZERO_POINT = 125
# Looked up where a table is fused. Falling, so that its effect shows; one step of a code is one
# step of what is looked up, so that the tolerance stays one step.
TABLE = torch.arange(255, -1, -1, dtype=torch.uint8)

# The reference multiplies in float64, a hundred times slower than what it checks. Beyond this
# many multiply-adds it looks at the first, a middle and the last part of the output instead,
# where a kernel's blocks begin and end.
_WHOLE = 50 * 10**6
_PART = {1: 32, 2: 7, 3: 4}  # output positions a side, by dimensions
_PART_ROWS = 16
_PART_CHANNELS = 256

Window = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Operands:
    """Codes, scales and expected results of one op.

    Attributes:
        spec: the op, with the facts of these weights.
        x: uint8 codes, channels last in memory for two and three dimensions.
        weight: int8 codes.
        weight_scale: one an output channel, or one for a transposed convolution, or one for each
            group of input features of each output.
        bias: in real numbers.
        y_scale: scale of the output, and of the residual.
        residual: codes to add to the result, where that is fused.
        expected: parts of the output, and the codes (real numbers when dynamic) they hold.
    """

    spec: OpSpec
    x: Tensor
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor
    y_scale: float
    residual: Tensor | None
    expected: tuple[tuple[Window, Tensor], ...]

    def quantized_weight(self) -> Tensor:
        """The weight as the stock prepacks take it."""
        if not self.spec.per_channel:
            make: Any = torch._make_per_tensor_quantized_tensor
            return make(self.weight, float(self.weight_scale), 0)  # type: ignore[no-any-return]
        zeros = torch.zeros_like(self.weight_scale, dtype=torch.long)
        made: Tensor = torch._make_per_channel_quantized_tensor(
            self.weight, self.weight_scale.double(), zeros, 0
        )
        return made

    def stored_weight(self) -> Tensor:
        """The weight as a linear on float tensors holds it: two codes of 4 bits in a byte."""
        return pack_nibbles(self.weight) if self.spec.bits == 4 else self.weight.clone()

    def quantized_input(self) -> Tensor:
        """A fresh copy of the input as the stock operators take it: float when dynamic."""
        if self.spec.dynamic:
            return (self.x.float() - X_ZERO_POINT) * X_SCALE
        made: Tensor = torch._make_per_tensor_quantized_tensor(self.x, X_SCALE, X_ZERO_POINT)
        return made.clone(memory_format=torch.preserve_format)

    def difference(self, y: Tensor) -> str | None:
        """How ``y`` differs from the reference; None when it is right."""
        size = result_shape(self.spec)
        if tuple(y.shape) != size:
            return f"the result has shape {tuple(y.shape)}, expected {size}"
        codes = y.int_repr() if y.is_quantized else y
        for window, want in self.expected:
            got = codes[window]
            if self.spec.dynamic:
                # Codes are hit exactly, so only the order of float additions is left.
                worst = float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))
                if not worst <= 1e-3:
                    return f"off by {worst:.2%} of the largest result"
            else:
                steps = int((got.int() - want.int()).abs().max())
                if steps > 1:
                    return f"off by {steps} steps of the output scale"
        return None


def make_operands(spec: OpSpec, weights: tuple[int, int] = FULL) -> Operands:
    """Random operands, the same each time, with weights in the range given."""
    generator = torch.Generator().manual_seed(0)
    weight = _weight(spec, weights, generator)
    shape = input_shape(spec)
    x = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    # Dynamic quantization finds the same scale and zero point again if both ends occur, in all of
    # the input or, where each row has a range, in each row. A row of one value is exact anyway.
    rows = x.view(shape[0], -1) if spec.dynamic and shape[1] > 1 else x.view(1, -1)
    rows[:, 0], rows[:, -1] = 0, 255
    x = channels_last(x)
    scales = torch.rand(_scales_shape(spec), generator=generator, dtype=torch.float32) + 0.5
    facts = None
    if not spec.weight_group:
        facts = weight_facts(weight, groups=spec.groups, transposed=spec.transposed)
    fan_in = spec.in_channels // spec.groups * math.prod(spec.kernel)
    # Three standard deviations of the sums reach the ends of 0..255.
    typical = float(weight.float().square().mean().sqrt())
    spread = math.sqrt(fan_in) * typical * 255 / math.sqrt(12)
    bias = (
        torch.randn(spec.out_channels, generator=generator, dtype=torch.float32) * spread * X_SCALE
    )
    residual = None
    if spec.post_op == "add":
        residual = channels_last(
            torch.randint(0, 256, result_shape(spec), generator=generator, dtype=torch.uint8)
        )
    y_scale = 3 * spread * X_SCALE / 128
    operands = Operands(spec.replace(weights=facts), x, weight, scales, bias, y_scale, residual, ())
    return with_expected(operands)


def _scales_shape(spec: OpSpec) -> tuple[int, ...]:
    if spec.weight_group:
        return (spec.out_channels, spec.in_channels // spec.weight_group)
    return (spec.out_channels if spec.per_channel else 1,)


def with_expected(operands: Operands) -> Operands:
    """``operands`` with the parts of the result that they have to give."""
    windows = _windows(operands.spec)
    expected = tuple((window, _expected(operands, window)) for window in windows)
    return dataclasses.replace(operands, expected=expected)


def exact_sums(operands: Operands) -> Tensor:
    """The integer sums of a layer, before they are scaled: all of them."""
    return _accumulate(operands, tuple(slice(0, n) for n in result_shape(operands.spec)))


def _weight(spec: OpSpec, weights: tuple[int, int], generator: torch.Generator) -> Tensor:
    shape = weight_shape(spec)
    low, high = NIBBLES if spec.bits == 4 else weights
    if weights != FULL:
        return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8)
    bell = torch.randn(shape, generator=generator, dtype=torch.float32)
    outputs = 1 if spec.transposed else 0
    others = [axis for axis in range(bell.dim()) if axis != outputs]
    bell *= -low / bell.abs().amax(others, keepdim=True)
    return bell.round().clamp(low, high).to(torch.int8)


def channels_last(x: Tensor) -> Tensor:
    """``x`` with channels innermost in memory, for two and three spatial dimensions."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


def _windows(spec: OpSpec) -> Iterator[Window]:
    """Parts of the output ``[rows or batch, channels, *spatial]`` to look at."""
    size = result_shape(spec)
    work = math.prod(size) * (spec.in_channels // spec.groups) * math.prod(spec.kernel)
    if spec.transposed or work <= _WHOLE:
        yield tuple(slice(0, n) for n in size)
        return
    if spec.op == "linear":
        sides = [_parts(size[0], _PART_ROWS), _parts(size[1], _PART_CHANNELS)]
    else:
        # One sample a window: the first, one in the middle, the last.
        sides = [_parts(size[0], 1), [slice(0, size[1])] * 3]
        sides += [_parts(n, _PART[spec.dims]) for n in size[2:]]
    windows = zip(*sides, strict=True)
    # Small sizes give the same part three times.
    yield from {str(window): window for window in windows}.values()


def _parts(size: int, length: int) -> list[slice]:
    """The first, a middle and the last ``length`` of ``size``."""
    length = min(length, size)
    starts = (0, (size - length) // 2, size - length)
    return [slice(start, start + length) for start in starts]


def _expected(o: Operands, window: Window) -> Tensor:
    if o.spec.weight_group:
        return _expected_of_groups(o, window)
    accumulator = _accumulate(o, window)
    channels = window[1]
    scale = o.weight_scale[channels] if o.spec.per_channel else o.weight_scale
    bias = o.bias[channels]
    along = (1, -1) + (1,) * o.spec.dims
    if o.spec.dynamic:
        y = (accumulator.double() * (scale.double() * X_SCALE) + bias).float()
        return y.relu() if o.spec.post_op == "relu" else y
    steps = accumulator.float() * (scale * X_SCALE / o.y_scale).float().view(along)
    steps = steps + (bias / o.y_scale).view(along)
    if o.residual is not None:
        steps = steps + (o.residual[window].float() - RESIDUAL_ZERO_POINT)
    lowest = Y_ZERO_POINT if o.spec.post_op == "relu" else 0
    codes = (torch.round(steps) + Y_ZERO_POINT).clamp(lowest, 255).to(torch.uint8)
    return TABLE[codes.long()] if o.spec.post_op == "lut" else codes


def _expected_of_groups(o: Operands, window: Window) -> Tensor:
    rows, channels = window
    inputs = (o.x[rows].double() - X_ZERO_POINT) * X_SCALE
    y = (inputs @ real_weight(o.weight[channels], o.weight_scale[channels]).double().t()).float()
    y = y + o.bias[channels]
    return y.relu() if o.spec.post_op == "relu" else y


def _accumulate(o: Operands, window: Window) -> Tensor:
    """Exact integer sums of the part of the output that ``window`` shows."""
    spec = o.spec
    accumulator: Tensor
    if spec.op == "linear":
        rows, channels = window
        accumulator = reference.accumulate_linear(o.x[rows], X_ZERO_POINT, o.weight[channels])
        return accumulator
    geometry: dict[str, Any] = {
        "stride": spec.stride,
        "dilation": spec.dilation,
        "groups": spec.groups,
    }
    x = o.x
    if spec.transposed:  # always looked at whole
        geometry |= {
            "padding": spec.padding,
            "transposed": True,
            "output_padding": spec.output_padding,
        }
    else:
        x = _input_of(o.x[window[0]], spec, window[2:])
        geometry["padding"] = (0,) * spec.dims
    accumulator = reference.accumulate_conv(x, X_ZERO_POINT, o.weight, **geometry)
    return accumulator


def _input_of(x: Tensor, spec: OpSpec, window: Window) -> Tensor:
    """The part of the input that a part of the output is made of, padding filled in."""
    crops, pads = [], []
    sides = zip(
        window, x.shape[2:], spec.kernel, spec.stride, spec.padding, spec.dilation, strict=True
    )
    for part, n, k, s, p, d in sides:
        start, end = part.start * s - p, (part.stop - 1) * s - p + d * (k - 1) + 1
        crops.append(slice(max(start, 0), max(min(end, n), 0)))
        pads.append((max(-start, 0), max(end - max(n, start), 0)))
    parts: Window = (slice(None), slice(None), *crops)
    cropped = x[parts]
    # F.pad begins with the last dimension.
    flat = list(itertools.chain.from_iterable(reversed(pads)))
    return F.pad(cropped, flat, value=X_ZERO_POINT)

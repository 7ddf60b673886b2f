"""One layer of an LSTM or a GRU on static codes, one direction or both.

``recurrent`` takes codes ``x`` [steps, sequences, features] ([sequences, steps, features] with
``batch_first``, [steps, features] for one sequence) and gives the codes of the states at all steps,
both directions side by side. For each direction ``weights`` has the input's weight
[gates * units, features], the state's [gates * units, width] and, where states are projected, that
of the projection [width, units]; else a state's width is its units. ``scales`` and ``biases`` have
a row of each, with torch's order of gates. An LSTM has four, a GRU three. ::

    own    = fma(float(sum((x - x_zp) * w_ih)), x_scale * scale_ih, bias_ih)       of all steps
    hidden = fma(float(sum((code - out_zp) * w_hh)), out_scale * scale_hh, bias_hh)    of one
    h, c   = the gates, from own and hidden, in float32
    h      = linear_dynamic(h, w_hr, scale_hr, bias_hr)                   where it is projected
    code   = clamp(round(h * float32(1 / out_scale)) + out_zp, 0, 255)

Sums are exact. The float state of a GRU goes on as it is: its product alone sees codes. The gates
are spelled out below, in float32, each step rounded as written: native kernels give the same bytes.

States begin as 0, or as ``h`` [directions, sequences, width] and ``c`` [directions, sequences,
units], without sequences where x has none. They come from outside, with a range of their own, so
``hidden`` of the first step is ``linear_dynamic`` of ``h``. ``recurrent_last`` also returns what a
layer that goes on needs and codes do not say, in the form of ``c``: the last cells of an LSTM, the
last states of a GRU.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from x86quant.errors import InvalidInputError
from x86quant.ops._numerics import check_codes, check_qparams, codes
from x86quant.ops._register import OUT_QPARAMS, X_QPARAMS, register
from x86quant.ops.dynamic import check_weight, linear_dynamic

#: An int8 weight, a scale for each of its rows, a bias.
_Linear = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: Gives the product of rows of codes with a weight.
_Product = Callable[[torch.Tensor], torch.Tensor]

#: Gates of a unit.
GATES = {"lstm": 4, "gru": 3}

#: Of tanh(x) = x P(x²) / Q(x²), highest powers first.
_TOP = (1.31842109e-08, 2.04718199e-05, 0.00348658119, 0.133731971, 0.999999906)
_BOTTOM = (7.7026578e-07, 0.000327138427, 0.0258419764, 0.467064939, 1.0)
#: Beyond this the tanh is 1 in float32.
_LIMIT = 9.1

_ARGUMENTS = (
    "Tensor x, Tensor[] weights, Tensor[] scales, Tensor[] biases, str kind, bool batch_first, "
    f"{X_QPARAMS}, {OUT_QPARAMS}, Tensor? h=None, Tensor? c=None"
)


class LayerSizes(NamedTuple):
    """What the weights of a layer say: products a direction, directions, units, states' width."""

    products: int
    directions: int
    units: int
    width: int

    @staticmethod
    def of(weights: Sequence[torch.Tensor]) -> LayerSizes:
        """Those of ``weights``, of which there are as many as some layer has."""
        products = 3 if len(weights) % 3 == 0 else 2
        width = weights[1].shape[1]
        units = weights[2].shape[1] if products == 3 else width
        return LayerSizes(products, len(weights) // products, units, width)


def sequences_of(sizes: Sequence[int], batch_first: bool) -> tuple[int, ...]:
    """How many sequences an input of these ``sizes`` has; nothing for one without a batch."""
    return () if len(sizes) == 2 else (sizes[0 if batch_first else 1],)


def check_recurrent(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    kind: str,
    batch_first: bool,
    h: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
) -> None:
    """Raise InvalidInputError unless the operands fit each other."""
    check_codes("recurrent", x=x)
    counts = (2, 3, 4, 6) if kind == "lstm" else (2, 4)
    if kind not in GATES or len(weights) not in counts or x.dim() not in (2, 3):
        raise InvalidInputError(
            "x86quant::recurrent takes an lstm or a gru, two weights a direction or, of an lstm "
            "with projections, three, and x of two or three dimensions; got "
            f"{kind!r}, {len(weights)} and {tuple(x.shape)}"
        )
    if not len(weights) == len(scales) == len(biases):
        raise InvalidInputError("x86quant::recurrent: one scale and one bias for each weight")
    sizes = LayerSizes.of(weights)
    rows = GATES[kind] * sizes.units
    wanted = [(rows, x.shape[-1]), (rows, sizes.width), (sizes.width, sizes.units)]
    for i, operands in enumerate(zip(weights, scales, biases, strict=True)):
        check_weight("recurrent", *operands)
        _check_shape(f"weight {i}", operands[0], wanted[i % sizes.products])
    before = (sizes.directions, *sequences_of(x.shape, batch_first))
    for name, state, width in (("h", h, sizes.width), ("c", c, sizes.units)):
        if state is not None:
            _check_shape(name, state, (*before, width))
            if state.dtype != torch.float32 or (name == "c" and kind == "gru"):
                raise InvalidInputError(
                    f"x86quant::recurrent: {name} must be float32, and c is an lstm's; got "
                    f"{state.dtype} for {kind!r}"
                )


def _check_shape(name: str, tensor: torch.Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != wanted:
        raise InvalidInputError(
            f"x86quant::recurrent: {name} must be of shape {wanted}, got {tuple(tensor.shape)}"
        )


def _check_qparams(x_scale: float, x_zp: int, out_scale: float, out_zp: int) -> None:
    check_qparams("recurrent", x_scale, x_zp)
    check_qparams("recurrent", out_scale, out_zp)


def _states(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = LayerSizes.of(weights)
    return x.new_empty((*x.shape[:-1], sizes.directions * sizes.width))


def empty_states_and_last(
    x: torch.Tensor, weights: Sequence[torch.Tensor], batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors of the sizes that both results have, of no particular values."""
    sizes = LayerSizes.of(weights)
    last = (sizes.directions, *sequences_of(x.shape, batch_first), sizes.units)
    return _states(x, weights), x.new_empty(last, dtype=torch.float32)


@register(
    _ARGUMENTS,
    checks=[check_recurrent, _check_qparams],
    shapes=empty_states_and_last,
    returns="(Tensor, Tensor)",
)
def recurrent_last(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    kind: str,
    batch_first: bool,
    x_scale: float,
    x_zp: int,
    out_scale: float,
    out_zp: int,
    h: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the states of one layer at all steps, [..., directions * width], and the last.

    The last cells or states are in float: [directions, ..., units].
    """
    steps = x.unsqueeze(1) if x.dim() == 2 else x.transpose(0, 1) if batch_first else x
    if not len(steps):
        raise InvalidInputError("x86quant::recurrent: expected a sequence of at least one step")
    sizes = LayerSizes.of(weights)
    found, last = [], []
    for i in range(sizes.directions):
        linears = [*zip(weights, scales, biases, strict=True)][i * sizes.products :]
        first = [None if s is None else s[i].reshape(-1, s.shape[-1]) for s in (h, c)]
        own = _product(x_scale, x_zp, linears[0])(steps.flatten(0, 1))
        own = own.reshape(*steps.shape[:2], own.shape[-1])
        project = linears[2] if sizes.products == 3 else None
        given = first[0], first[1] if kind == "lstm" else first[0]
        states, end = _direction(own, i == 1, linears[1], project, kind, given, out_scale, out_zp)
        found.append(states)
        last.append(end)
    out = torch.cat(found, 2)
    out = out.squeeze(1) if x.dim() == 2 else out.transpose(0, 1) if batch_first else out
    return out, torch.stack(last).reshape(
        sizes.directions, *sequences_of(x.shape, batch_first), sizes.units
    )


@register(_ARGUMENTS, checks=[check_recurrent, _check_qparams], shapes=_states)
@functools.wraps(recurrent_last, assigned=())
def recurrent(*operands: Any, **named: Any) -> torch.Tensor:
    """The codes alone."""
    return recurrent_last(*operands, **named)[0]


def _direction(
    own: torch.Tensor,
    backward: bool,
    hidden: _Linear,
    project: _Linear | None,
    kind: str,
    given: tuple[torch.Tensor | None, torch.Tensor | None],
    scale: float,
    zero_point: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of all states of one direction, and the last cell or state.

    ``given`` are what the first product reads and what the gates go on from, where not zeros.
    """
    inverse = _rounded(1 / scale)
    first = None if given[0] is None else linear_dynamic(given[0], *hidden)
    zeros = own.new_zeros((own.shape[1], own.shape[2] // GATES[kind]))
    cell = zeros if given[1] is None else given[1]
    now = zeros.new_full((own.shape[1], hidden[0].shape[1]), zero_point, dtype=torch.uint8)
    outs = [now] * len(own)
    multiply = _product(scale, zero_point, hidden)
    for t in range(len(own) - 1, -1, -1) if backward else range(len(own)):
        share = multiply(now) if first is None else first
        first = None
        if kind == "lstm":
            state, cell = lstm_gates(own[t], share, cell)
        else:
            state = cell = gru_gates(own[t], share, cell)
        if project is not None:
            state = linear_dynamic(state, *project)
        outs[t] = now = codes(state * inverse, zero_point)
    return torch.stack(outs), cell


def _product(scale: float, zero_point: int, linear: _Linear) -> _Product:
    """The product of rows of such codes with the weight of ``linear``."""
    weight, weight_scale, bias = linear
    # float64 holds every sum exactly, and the product of two float32.
    exact = weight.double().t()
    steps = _rounded(scale) * weight_scale
    return lambda rows: _fma(((rows.double() - zero_point) @ exact).float(), steps, bias)


def _fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    first = b.double() if isinstance(b, torch.Tensor) else _rounded(b)
    second = c.double() if isinstance(c, torch.Tensor) else _rounded(c)
    return (a.double() * first + second).float()


def _rounded(x: float) -> float:
    """``x`` as float32 has it, without a tensor, which tracers would write down."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def _tanh(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tanh as a fraction."""
    x = x.clamp(-_rounded(_LIMIT), _rounded(_LIMIT))
    t = (x * x).double()
    top, bottom = torch.full_like(x, _TOP[0]), torch.full_like(x, _BOTTOM[0])
    for p, q in zip(_TOP[1:], _BOTTOM[1:], strict=True):
        top, bottom = _fma(top, t, p), _fma(bottom, t, q)
    return x * top, bottom


def lstm_gates(
    own: torch.Tensor, hidden: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new h and c: ``sigmoid(f) c + sigmoid(i) tanh(g)`` and ``sigmoid(o) tanh(c)``.

    sigmoid(x) is (bottom + top) / (2 bottom) of tanh(x / 2).
    """
    i, f, g, o = (own + hidden).chunk(4, 1)
    # Of all at once: each call takes longer than what it computes.
    tops, bottoms = _tanh(torch.cat([i * 0.5, f * 0.5, g, o * 0.5], 1))
    (it, ft, gt, ot), (ib, fb, gb, ob) = tops.chunk(4, 1), bottoms.chunk(4, 1)
    both, added, kept = ib * gb, (ib + it) * gt, (fb + ft) * c
    cell = _fma(kept, both, added * fb) / (2 * (fb * both))
    top, bottom = _tanh(cell)
    return (ob + ot) * top / (2 * (ob * bottom)), cell


def gru_gates(own: torch.Tensor, hidden: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """The new state: ``(1 - z) tanh(own_n + sigmoid(r) hidden_n) + z h``."""
    (own_r, own_z, own_n), (r, z, n) = own.chunk(3, 1), hidden.chunk(3, 1)
    tops, bottoms = _tanh(torch.cat([own_r + r, own_z + z], 1) * 0.5)
    (rt, zt), (rb, zb) = tops.chunk(2, 1), bottoms.chunk(2, 1)
    top, bottom = _tanh(_fma((rb + rt) / (2 * rb), n, own_n))
    return _fma((zb + zt) * h, bottom, (zb - zt) * top) / (2 * (zb * bottom))

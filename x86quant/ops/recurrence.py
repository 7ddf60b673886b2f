"""One layer of an LSTM or a GRU on static codes, one direction or both.

``recurrent`` takes codes ``x`` [steps, sequences, features] ([sequences, steps, features] with
``batch_first``, [steps, features] for one sequence) and gives the codes of the states at all steps,
both directions side by side. For each direction ``weights`` has the input's weight
[gates * units, features] and the state's [gates * units, units], ``scales`` and ``biases`` a row
of each, with torch's order of gates. An LSTM has four, a GRU three. States begin as 0. ::

    own    = fma(float(sum((x - x_zp) * w_ih)), x_scale * scale_ih, bias_ih)       of all steps
    hidden = fma(float(sum((code - out_zp) * w_hh)), out_scale * scale_hh, bias_hh)    of one
    h, c   = the gates, from own and hidden, in float32
    code   = clamp(round(h * float32(1 / out_scale)) + out_zp, 0, 255)

Sums are exact. The float state of a GRU goes on as it is: its product alone sees codes. The gates
are spelled out below, in float32, each step rounded as written: native kernels give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from x86quant.errors import InvalidInputError
from x86quant.ops._numerics import check_codes, check_qparams, codes
from x86quant.ops._register import OUT_QPARAMS, X_QPARAMS, register
from x86quant.ops.dynamic import check_weight

#: Gates of a unit.
GATES = {"lstm": 4, "gru": 3}

#: Of tanh(x) = x P(x²) / Q(x²), highest powers first.
_TOP = (1.31842109e-08, 2.04718199e-05, 0.00348658119, 0.133731971, 0.999999906)
_BOTTOM = (7.7026578e-07, 0.000327138427, 0.0258419764, 0.467064939, 1.0)
#: Beyond this the tanh is 1 in float32.
_LIMIT = 9.1

_ARGUMENTS = (
    "Tensor x, Tensor[] weights, Tensor[] scales, Tensor[] biases, str kind, bool batch_first, "
    f"{X_QPARAMS}, {OUT_QPARAMS}"
)


def _fake(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    kind: str,
) -> torch.Tensor:
    check_recurrent(x, weights, scales, biases, kind)
    width = sum(weight.shape[1] for weight in weights[1::2])
    return x.new_empty((*x.shape[:-1], width))


@register(_ARGUMENTS, fake=_fake)
def recurrent(
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
) -> torch.Tensor:
    """Codes of the states of one layer at all steps: [..., directions * units]."""
    check_recurrent(x, weights, scales, biases, kind)
    check_qparams("recurrent", x_scale, x_zp)
    check_qparams("recurrent", out_scale, out_zp)
    steps = x.unsqueeze(1) if x.dim() == 2 else x.transpose(0, 1) if batch_first else x
    found = []
    for i in range(0, len(weights), 2):
        own = _product(
            steps.flatten(0, 1), x_scale, x_zp, weights[i].double(), scales[i], biases[i]
        )
        own = own.reshape(*steps.shape[:2], -1)
        order = range(len(own)) if i == 0 else range(len(own) - 1, -1, -1)
        units = weights[i + 1].shape[1]
        state = weights[i + 1].double()
        h = c = own.new_zeros((steps.shape[1], units))
        now = torch.full_like(h, out_zp, dtype=torch.uint8)
        outs = [now] * len(own)
        for t in order:
            share = _product(now, out_scale, out_zp, state, scales[i + 1], biases[i + 1])
            if kind == "lstm":
                h, c = lstm_gates(own[t], share, c)
            else:
                h = gru_gates(own[t], share, h)
            inverse = torch.tensor(1 / out_scale, dtype=torch.float32)
            outs[t] = now = codes(h * inverse, out_zp)
        found.append(torch.stack(outs))
    out = torch.cat(found, 2)
    return out.squeeze(1) if x.dim() == 2 else out.transpose(0, 1) if batch_first else out


def _product(
    rows: torch.Tensor,
    scale: float,
    zero_point: int,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    # float64 holds every sum exactly, and the product of two float32.
    sums = (rows.double() - zero_point) @ weight.t()
    steps = torch.tensor(scale, dtype=torch.float32) * weight_scale
    return _fma(sums.float(), steps, bias)


def _fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    first = b.double() if isinstance(b, torch.Tensor) else _rounded(b)
    second = c.double() if isinstance(c, torch.Tensor) else _rounded(c)
    return (a.double() * first + second).float()


def _rounded(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def _tanh(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tanh as a fraction."""
    x = x.clamp(-_rounded(_LIMIT), _rounded(_LIMIT))
    t = x * x
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
    (it, ib), (ft, fb), (gt, gb), (ot, ob) = (
        _tanh(i * 0.5),
        _tanh(f * 0.5),
        _tanh(g),
        _tanh(o * 0.5),
    )
    both, added, kept = ib * gb, (ib + it) * gt, (fb + ft) * c
    cell = _fma(kept, both, added * fb) / (2 * (fb * both))
    top, bottom = _tanh(cell)
    return (ob + ot) * top / (2 * (ob * bottom)), cell


def gru_gates(own: torch.Tensor, hidden: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """The new state: ``(1 - z) tanh(own_n + sigmoid(r) hidden_n) + z h``."""
    (own_r, own_z, own_n), (r, z, n) = own.chunk(3, 1), hidden.chunk(3, 1)
    (rt, rb), (zt, zb) = _tanh((own_r + r) * 0.5), _tanh((own_z + z) * 0.5)
    top, bottom = _tanh(_fma((rb + rt) / (2 * rb), n, own_n))
    return _fma((zb + zt) * h, bottom, (zb - zt) * top) / (2 * (zb * bottom))


def check_recurrent(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    kind: str,
) -> None:
    """Raise InvalidInputError unless the operands fit each other."""
    check_codes("recurrent", x=x)
    if kind not in GATES or len(weights) not in (2, 4) or x.dim() not in (2, 3):
        raise InvalidInputError(
            "x86quant::recurrent takes an lstm or a gru, two weights a direction, and x of two or "
            f"three dimensions; got {kind!r}, {len(weights)} and {tuple(x.shape)}"
        )
    if not len(weights) == len(scales) == len(biases):
        raise InvalidInputError("x86quant::recurrent: one scale and one bias for each weight")
    units = weights[1].shape[-1]
    for i, operands in enumerate(zip(weights, scales, biases, strict=True)):
        check_weight("recurrent", *operands)
        wanted = (GATES[kind] * units, units if i % 2 else x.shape[-1])
        if tuple(operands[0].shape) != wanted:
            raise InvalidInputError(
                f"x86quant::recurrent: weight {i} must be of shape {wanted}, got "
                f"{tuple(operands[0].shape)}"
            )

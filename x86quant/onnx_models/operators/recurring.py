"""LSTM, GRU and RNN step by step; those that are layers of PyTorch become these instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from x86quant.onnx_models.operator_table import operator

_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "affine": lambda x, a, b: a * x + b,
    "elu": lambda x, a, b: torch.nn.functional.elu(x, a),
    "hardsigmoid": lambda x, a, b: torch.clamp(a * x + b, 0, 1),
    "leakyrelu": lambda x, a, b: torch.nn.functional.leaky_relu(x, a),
    "relu": lambda x, a, b: torch.relu(x),
    "scaledtanh": lambda x, a, b: a * torch.tanh(b * x),
    "sigmoid": lambda x, a, b: torch.sigmoid(x),
    "softplus": lambda x, a, b: torch.nn.functional.softplus(x),
    "softsign": lambda x, a, b: torch.nn.functional.softsign(x),
    "tanh": lambda x, a, b: torch.tanh(x),
    "thresholdedrelu": lambda x, a, b: torch.where(x > a, x, torch.zeros_like(x)),
}
#: What ``a`` and ``b`` are unless the node says it.
_USUAL = {
    "affine": (1.0, 0.0),
    "elu": (1.0, 0.0),
    "hardsigmoid": (0.2, 0.5),
    "leakyrelu": (0.01, 0.0),
    "scaledtanh": (1.0, 1.0),
    "thresholdedrelu": (1.0, 0.0),
}


class _Activations:
    """The functions of one direction, in order."""

    def __init__(self, names: list[str], alphas: list[float], betas: list[float]) -> None:
        self._functions = []
        alphas, betas = list(alphas), list(betas)
        for name in names:
            a, b = _USUAL.get(name.lower(), (0.0, 0.0))
            if name.lower() in _USUAL:  # values are listed for functions that have any
                a = alphas.pop(0) if alphas else a
                b = betas.pop(0) if betas else b
            self._functions.append((_ACTIVATIONS[name.lower()], a, b))

    def __call__(self, which: int, x: Any, clip: float | None) -> Any:
        function, a, b = self._functions[which]
        return function(x if clip is None else torch.clamp(x, -clip, clip), a, b)


_DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def _lacks(a: Any, inputs: Any, outputs: Any) -> str | None:
    if a.get("input_forget"):
        return "gates that are coupled (input_forget)"
    unknown = [n for n in a.get("activations") or () if n.lower() not in _ACTIVATIONS]
    return f"the activation {unknown[0]}" if unknown else None


@operator("LSTM", "GRU", "RNN", returns_tuple=True, oldest=7, lacks=_lacks)
def recurrent(
    x: Any,
    weights: Any,
    recurrence: Any,
    biases: Any = None,
    lengths: Any = None,
    first_h: Any = None,
    first_c: Any = None,
    peepholes: Any = None,
    *,
    activation_alpha: Any = None,
    activation_beta: Any = None,
    activations: Any = None,
    clip: float | None = None,
    direction: str,
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    linear_before_reset: int = 0,
    op_type: str,
    outputs: int,
) -> Any:
    """All steps' results, S×D×N×H, and the last states, D×N×H; batch first with ``layout``."""
    if layout:
        x = x.transpose(0, 1)
        first_h = None if first_h is None else first_h.transpose(0, 1)
        first_c = None if first_c is None else first_c.transpose(0, 1)
    size, usual = recurrence.shape[-1], _DEFAULTS[op_type]
    names = list(activations or usual * weights.shape[0])
    results, last_h, last_c = [], [], []
    for d in range(weights.shape[0]):
        backwards = direction == "reverse" or d == 1
        functions = _Activations(
            names[d * len(usual) : (d + 1) * len(usual)],
            activation_alpha or [],
            activation_beta or [],
        )
        zero = torch.zeros(x.shape[1], size, dtype=x.dtype)
        cell = _Cell(
            op_type, functions, clip, linear_before_reset, recurrence[d],
            None if biases is None else biases[d, _GATES[op_type] * size :],
            None if peepholes is None else peepholes[d],
        )  # fmt: skip
        steps = torch.matmul(x, weights[d].t())
        if biases is not None:
            steps = steps + biases[d, : _GATES[op_type] * size]
        h = zero if first_h is None else first_h[d]
        c = zero if first_c is None else first_c[d]
        made: list[Any] = [None] * x.shape[0]
        order = range(x.shape[0])
        for t in reversed(order) if backwards else order:
            new_h, new_c = cell(steps[t], h, c)
            if lengths is None:
                h, c, made[t] = new_h, new_c, new_h
                continue
            runs = (t < lengths)[:, None]
            h, c = torch.where(runs, new_h, h), torch.where(runs, new_c, c)
            made[t] = torch.where(runs, new_h, torch.zeros_like(new_h))
        results.append(torch.stack(made) if made else x.new_zeros(0, x.shape[1], size))
        last_h.append(h)
        last_c.append(c)
    y, h, c = torch.stack(results, 1), torch.stack(last_h), torch.stack(last_c)
    if layout:
        y, h, c = y.permute(2, 0, 1, 3), h.transpose(0, 1), c.transpose(0, 1)
    return (y, h, c)[:outputs]


class _Cell:
    """One step of one direction; gates in ONNX's order: LSTM i, o, f, c; GRU z, r, h."""

    def __init__(
        self,
        kind: str,
        functions: _Activations,
        clip: float | None,
        linear_before_reset: int,
        recurrence: Any,
        bias: Any,
        peepholes: Any,
    ) -> None:
        self._kind, self._functions, self._clip = kind, functions, clip
        self._linear, self._bias = linear_before_reset, bias
        self._recurrence = recurrence
        self._peepholes = None if peepholes is None else peepholes.chunk(3)

    def __call__(self, step: Any, h: Any, c: Any) -> tuple[Any, Any]:
        return {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}[self._kind](step, h, c)

    def _product(self, h: Any) -> Any:
        found = torch.matmul(h, self._recurrence.t())
        return found if self._bias is None else found + self._bias

    def _rnn(self, step: Any, h: Any, c: Any) -> tuple[Any, Any]:
        h = self._functions(0, step + self._product(h), self._clip)
        return h, c

    def _lstm(self, step: Any, h: Any, c: Any) -> tuple[Any, Any]:
        i, o, f, g = (step + self._product(h)).chunk(4, -1)
        if self._peepholes is not None:
            i, f = i + self._peepholes[0] * c, f + self._peepholes[2] * c
        i, f = self._functions(0, i, self._clip), self._functions(0, f, self._clip)
        c = f * c + i * self._functions(1, g, self._clip)
        if self._peepholes is not None:
            o = o + self._peepholes[1] * c
        o = self._functions(0, o, self._clip)
        return o * self._functions(2, c, None), c

    def _gru(self, step: Any, h: Any, c: Any) -> tuple[Any, Any]:
        size = h.shape[-1]
        z, r, n = step.chunk(3, -1)
        rows, bias = self._recurrence, self._bias
        hz, hr = torch.matmul(h, rows[: 2 * size].t()).chunk(2, -1)
        bz, br, bn = (0.0, 0.0, 0.0) if bias is None else bias.chunk(3)
        z = self._functions(0, z + hz + bz, self._clip)
        r = self._functions(0, r + hr + br, self._clip)
        if self._linear:
            n = n + r * (torch.matmul(h, rows[2 * size :].t()) + bn)
        else:
            n = n + torch.matmul(r * h, rows[2 * size :].t()) + bn
        n = self._functions(1, n, self._clip)
        return (1 - z) * n + z * h, c

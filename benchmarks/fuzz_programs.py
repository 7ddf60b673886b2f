"""Random programs of torch ops, quantized and compared with eager float.

    python -m benchmarks.fuzz_programs --seeds 0:1000 --record failures.jsonl

A program is an ``nn.Module`` of 3 to 20 statements drawn from torch's functions, methods and
modules: in-place ones, views, indexing and arithmetic on shapes among them. It is kept as source,
statement by statement, and each statement is one that eager torch accepts. Every program goes
through ``x86quant.quantize``, or through stock conversion and ``x86quant.compile`` (``--through``).

The answer is wrong if its structure, a shape or a dtype differs, if it is not finite where eager's
is, or if it is much further off than eager float with each op's result rounded to 8 bits (noise of
that size, put in by a dispatch mode). It is compared on data that calibration did not see, also at
another batch size. An exception that x86quant did not raise on purpose is a failure too. What fails
is shrunk: statements go while the failure stays. ``--record`` gets a line of JSON for each failure.
The last line counts, so that ranges of seeds that ran in several processes can be added up.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import io
import json
import math
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.ao.quantization.quantize_fx import convert_fx, convert_to_reference_fx, prepare_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import x86quant
from x86quant.errors import X86QuantError

Inputs = tuple[torch.Tensor, ...]

#: How much worse than simulated rounding, in dB, an answer may be, and what is good in any case.
_ALLOWANCE = 15.0
_GOOD = 25.0

_METHODS = """abs neg sigmoid tanh relu exp square erf sin contiguous clone detach floor
    sign""".split()  # noqa: SIM905
_IN_PLACE = ["abs_", "neg_", "sigmoid_", "tanh_", "relu_", "square_", "zero_", "sin_", "erf_"]
_FUNCTIONAL = """relu relu6 hardtanh hardswish hardsigmoid silu gelu mish elu celu selu leaky_relu
    softplus logsigmoid softsign tanhshrink hardshrink softshrink sigmoid tanh glu
    normalize""".split()  # noqa: SIM905
_WITH_IN_PLACE = """relu relu6 hardtanh hardswish hardsigmoid silu mish elu celu selu
    leaky_relu""".split()  # noqa: SIM905
_ACTIVATIONS = """ReLU ReLU6 Hardtanh Hardswish Hardsigmoid SiLU GELU Mish ELU CELU SELU LeakyReLU
    Softplus LogSigmoid Softsign Sigmoid Tanh Identity Dropout PReLU Hardshrink
    Tanhshrink""".split()  # noqa: SIM905


@dataclasses.dataclass(frozen=True)
class Program:
    """A module as source: the lines of ``__init__`` and ``forward``, and the inputs' shapes."""

    made: tuple[str, ...]
    body: tuple[str, ...]
    result: str
    inputs: tuple[tuple[int, ...], ...]
    seed: int

    @property
    def source(self) -> str:
        """The class, as one would write it."""
        names = ", ".join(["self", *(f"x{i}" for i in range(len(self.inputs)))])
        made = "\n        ".join(["super().__init__()", *self.made])
        body = "\n        ".join([*self.body, f"return {self.result}"])
        return (
            f"class Net(nn.Module):\n    def __init__(self):\n        {made}\n\n"
            f"    def forward({names}):\n        {body}\n"
        )

    def build(self) -> nn.Module:
        """The module, with the weights of its seed."""
        space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}
        exec(self.source, space)
        torch.manual_seed(self.seed)
        model: nn.Module = space["Net"]().eval()
        return model

    def data(self, number: int, batch: int) -> Inputs:
        """Inputs with ``batch`` rows, another set for each ``number``."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + number)
        return tuple(torch.randn(batch, *shape[1:], generator=generator) for shape in self.inputs)


class _Writer:
    """Draws a program statement by statement; each is run, and left out if torch refuses it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        torch.manual_seed(seed)
        shapes = [(2, 4, 8, 8), (2, 8, 6), (2, 6, 8), (2, 8), (2, 3, 4, 6), (2, 2, 3, 4, 4)]
        first = self.random.choice(shapes)
        more = [first] * (self.random.random() < 0.25)
        self.inputs = (first, *more)
        self.made: list[str] = []
        self.body: list[str] = []
        self.self = nn.Module()
        self.values: dict[str, Any] = {f"x{i}": torch.randn(s) for i, s in enumerate(self.inputs)}
        self.count = 0

    def write(self) -> Program:
        """A program of 3 to 20 statements."""
        wanted = self.random.randint(3, 20)
        self._add(self._layer)
        for _ in range(8 * wanted):
            if len(self.body) >= wanted:
                break
            kinds = [self._layer, self._layer, self._unary, self._binary, self._view, self._view,
                     self._in_place, self._index, self._join, self._pool, self._norm, self._mixed,
                     self._sizes, self._activation]  # fmt: skip
            self._add(self.random.choice(kinds))
        tensors = self._tensors()
        last = tensors[-1]
        result = last
        form = self.random.random()
        if form < 0.2:
            result = f"({last}, {self._pick()})"
        elif form < 0.28:
            result = f"{{'a': {last}, 'b': {self._pick()}}}"
        return Program(tuple(self.made), tuple(self.body), result, self.inputs, self.seed)

    def _tensors(self) -> list[str]:
        return [n for n, v in self.values.items() if isinstance(v, torch.Tensor)]

    def _pick(self, rank: int | None = None) -> str:
        """A tensor, more often a late one."""
        found = [
            n for n in self._tensors()
            if self.values[n].is_floating_point() and rank in (None, self.values[n].dim())
        ]  # fmt: skip
        if not found:
            raise LookupError
        return found[-1 - min(int(self.random.expovariate(0.8)), len(found) - 1)]

    def _new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def _add(self, kind: Callable[[], tuple[list[str], list[str]]]) -> None:
        try:
            made, lines = kind()
        except (LookupError, ValueError):  # there is no tensor of that kind
            return
        space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "self": self.self}
        # Aliases among the values must survive the copy.
        memo: dict[int, Any] = {}
        trial = copy.deepcopy(self.values, memo)
        try:
            with torch.no_grad():
                for line in made:
                    exec(line, space)
                    self.self.eval()
                for line in lines:
                    exec(line, space, trial)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError,
                NotImplementedError, ZeroDivisionError):  # fmt: skip
            return
        tensors = [v for v in trial.values() if isinstance(v, torch.Tensor)]
        if any(x.numel() > 20000 or x.numel() == 0 or not torch.isfinite(x.float()).all()
               or x.float().abs().max() > 1e4 for x in tensors):  # fmt: skip
            return
        self.values = trial
        self.made += made
        self.body += lines

    # --- kinds of statement: what __init__ makes, and the lines of forward ---

    def _module(self, source: str, *arguments: str) -> tuple[list[str], list[str]]:
        name, out = f"m{len(self.made)}", self._new()
        return [f"self.{name} = {source}"], [f"{out} = self.{name}({', '.join(arguments)})"]

    def _layer(self) -> tuple[list[str], list[str]]:
        x, r = self._pick(), self.random
        if self.made and r.random() < 0.1:  # a layer of before, again
            return [], [f"{self._new()} = self.m{r.randrange(len(self.made))}({x})"]
        shape = self.values[x].shape
        dims = len(shape) - 2
        bias = r.random() < 0.7
        if dims in (1, 2, 3) and r.random() < 0.7:
            c, out = shape[1], r.choice([4, 6, 8])
            if r.random() < 0.15:
                return self._module(f"nn.ConvTranspose{dims}d({c}, {out}, 2, stride=2)", x)
            k = r.choice([1, 3])
            g = c if r.random() < 0.2 else 1
            out = c if g > 1 else out
            return self._module(
                f"nn.Conv{dims}d({c}, {out}, {k}, stride={r.choice([1, 1, 2])}, "
                f"padding={r.choice([k // 2, 0])}, "
                f"groups={g}, bias={bias})", x,
            )  # fmt: skip
        return self._module(f"nn.Linear({shape[-1]}, {r.choice([4, 6, 8])}, bias={bias})", x)

    def _activation(self) -> tuple[list[str], list[str]]:
        name, x = self.random.choice(_ACTIVATIONS), self._pick()
        if name in ("ReLU", "ReLU6", "SiLU", "ELU", "Hardswish") and self.random.random() < 0.4:
            made, lines = self._module(f"nn.{name}(inplace=True)", x)
            return made, [lines[0].partition(" = ")[2]] if self.random.random() < 0.4 else lines
        return self._module(f"nn.{name}()", x)

    def _norm(self) -> tuple[list[str], list[str]]:
        x, r = self._pick(), self.random
        shape = self.values[x].shape
        choices = [f"nn.LayerNorm({shape[-1]})"]
        if 2 <= len(shape) <= 5:
            rank = {2: 1, 3: 1, 4: 2, 5: 3}[len(shape)]
            choices.append(f"nn.BatchNorm{rank}d({shape[1]})")
            if shape[1] % 2 == 0 and len(shape) > 2:
                choices.append(f"nn.GroupNorm(2, {shape[1]})")
        return self._module(r.choice(choices), x)

    def _unary(self) -> tuple[list[str], list[str]]:
        x, out, r = self._pick(), self._new(), self.random
        call = r.choice([
            lambda: f"{out} = torch.{r.choice(['sigmoid', 'relu', 'abs', 'neg', 'erf'])}({x})",
            lambda: f"{out} = torch.{r.choice(['sigmoid', 'tanh', 'relu', 'square'])}(input={x})",
            lambda: f"{out} = {x}.{r.choice(_METHODS)}()",
            lambda: f"{out} = F.{r.choice(_FUNCTIONAL)}({x})",
            lambda: f"{out} = F.{r.choice(_WITH_IN_PLACE)}({x}, inplace=True)",
            lambda: f"F.{r.choice(_WITH_IN_PLACE)}({x}, inplace=True)",
            lambda: f"{out} = {x}.clamp({self._bound()}, {self._bound(1)})",
            lambda: f"{out} = torch.clamp({x}, min={self._bound()})",
            lambda: f"{out} = {x}.clamp(max={self._bound(1)})",
            lambda: f"{out} = F.softmax({x}, dim={self._dim(x)})",
            lambda: f"{out} = {x}.softmax({self._dim(x)})",
            lambda: f"{out} = F.leaky_relu({x}, {r.choice([0.1, 0.3])})",
            lambda: f"{out} = F.elu({x}, alpha={r.choice([0.5, 1.5])})",
            lambda: f"{out} = -{x}",
            lambda: f"{out} = torch.sqrt({x}.abs() + 0.1)",
            lambda: f"{out} = F.dropout({x}, 0.5, self.training)",
        ])  # fmt: skip
        return [], [call()]

    def _bound(self, high: int = 0) -> str:
        return self.random.choice([["-0.5", "0", "-1.0", "0.1"], ["0.5", "1", "6.0"]][high])

    def _dim(self, x: str) -> int:
        rank = self.values[x].dim()
        return self.random.randrange(-rank + 1, rank) if rank > 1 else 0

    def _binary(self) -> tuple[list[str], list[str]]:
        x, out, r = self._pick(), self._new(), self.random
        y = self._pick()
        number = r.choice(["2", "0.5", "-1.5", "3.0", "True"])
        call = r.choice([
            lambda: f"{out} = {x} {r.choice('+-*')} {y}",
            lambda: f"{out} = {x} {r.choice('+-*/')} {number}",
            lambda: f"{out} = {number} {r.choice('+-*')} {x}",
            lambda: f"{out} = torch.{r.choice(['add', 'mul', 'sub'])}({x}, {y})",
            lambda: f"{out} = torch.{r.choice(['add', 'mul', 'sub'])}({x}, other={y})",
            lambda: f"{out} = torch.add({x}, {y}, alpha=2)",
            lambda: f"{out} = {x}.{r.choice(['add', 'mul', 'sub'])}({y})",
            lambda: f"{out} = {x} / ({y}.abs() + 0.5)",
            lambda: f"{out} = torch.maximum({x}, {y})",
            lambda: f"{out} = torch.where({x} > 0, {x}, {y})",
            lambda: f"{out} = {x} * ({y} > 0)",
            lambda: f"{out} = {x} * torch.sigmoid({y})",
            lambda: f"{out} = {x} @ {y}.transpose(-1, -2)",
            lambda: f"{out} = torch.matmul({x}, {y})",
        ])  # fmt: skip
        return [], [call()]

    def _in_place(self) -> tuple[list[str], list[str]]:
        x, y, out, r = self._pick(), self._pick(), self._new(), self.random
        call = r.choice([
            lambda: [f"{x}.{r.choice(_IN_PLACE)}()"],
            lambda: [f"{out} = {x}.{r.choice(_IN_PLACE)}()"],
            lambda: [f"{x}.clamp_({self._bound()}, {self._bound(1)})"],
            lambda: [f"{x}.mul_(2.0).add_(0.3)"],
            lambda: [f"{x}.add_({y})"],
            lambda: [f"{x} += {y}"],
            lambda: [f"{x} *= 0.5"],
            lambda: [f"{out} = {x}", f"{out} += 1"],
            lambda: [f"{x}[:, :1].mul_(0.0)"],
            lambda: [f"{x}[:, 0] = {y}[:, 0]"],
            lambda: [f"{x}[..., -1:] = 0.25"],
            lambda: [f"{x}[{x} > 0.5] = 0.5"],
            lambda: [f"{x}.masked_fill_({x} < 0, 0.1)"],
            lambda: [f"torch.relu_({x})"],
            lambda: [f"{x}.copy_({y})"],
            lambda: [f"{x}.fill_(0.5)"],
            lambda: [f"{x}.view(-1)[:2].add_(1.0)"],
            lambda: [f"{out} = {x}.chunk(2, {self._dim(x)})[0]", f"{out}.sigmoid_()"],
            lambda: [f"torch.add({x}, {y}, out={x})"],
        ])  # fmt: skip
        return [], call()

    def _index(self) -> tuple[list[str], list[str]]:
        x, out, r = self._pick(), self._new(), self.random
        call = r.choice([
            lambda: f"{x}[:, {r.choice(['0', '1:', ':2', '::2', '-1', '[0, 1]', 'None'])}]",
            lambda: f"{x}[..., {r.choice(['0', '1:', ':-1', '::2', 'None'])}]",
            lambda: f"{x}[:, torch.tensor([1, 0])]",
            lambda: f"torch.flip({x}, [{self._dim(x)}])",
            lambda: f"torch.roll({x}, 1, {self._dim(x)})",
            lambda: f"{x}.narrow({max(1, abs(self._dim(x)))}, 0, 2)",
            lambda: f"{x}.select({max(1, abs(self._dim(x)))}, 0)",
            lambda: f"torch.index_select({x}, 1, torch.tensor([0, 0, 1]))",
            lambda: f"{x}.unbind(1)[1]",
            lambda: f"torch.tril({x})",
            lambda: f"{x}.expand(-1, *{x}.shape[1:])",
            lambda: f"{x}.repeat(1, 2, *[1] * ({x}.dim() - 2))",
        ])  # fmt: skip
        return [], [f"{out} = {call()}"]

    def _view(self) -> tuple[list[str], list[str]]:
        x, out, r = self._pick(), self._new(), self.random
        rank = self.values[x].dim()
        order = [0, *r.sample(range(1, rank), rank - 1)]
        call = r.choice([
            lambda: f"{x}.permute({', '.join(map(str, order))})",
            lambda: f"{x}.transpose(1, {rank - 1})",
            lambda: f"torch.transpose({x}, dim0=1, dim1=-1)",
            lambda: f"{x}.flatten({r.choice([1, 2, -2])})",
            lambda: f"torch.flatten({x}, start_dim=1)",
            lambda: f"{x}.reshape({x}.shape[0], -1)",
            lambda: f"{x}.contiguous().view({x}.size(0), -1, {self.values[x].shape[-1]})",
            lambda: f"{x}.reshape({x}.size(0), {x}.size(1), -1)",
            lambda: f"{x}.unsqueeze({r.randrange(1, rank + 1)})",
            lambda: f"{x}.squeeze({max(1, abs(self._dim(x)))})",
            lambda: f"{x}.unflatten(1, (2, -1))",
            lambda: f"{x}.movedim(1, -1)",
            lambda: f"{x}.view_as({x})",
            lambda: f"F.pixel_shuffle({x}, 2)",
            lambda: f"F.pad({x}, (1, 0))",
            lambda: f"F.pad({x}, pad=(1, 1), value=0.5)",
            lambda: f"F.pad({x}, (1, 1, 1, 1), mode='reflect')",
        ])  # fmt: skip
        return [], [f"{out} = {call()}"]

    def _join(self) -> tuple[list[str], list[str]]:
        x, y, out, r = self._pick(), self._pick(), self._new(), self.random
        d = r.choice([1, -1])
        call = r.choice([
            lambda: [f"{out} = torch.cat([{x}, {y}], {d})"],
            lambda: [f"{out} = torch.cat(({x}, {y}), dim=1)"],
            lambda: [f"{out} = torch.cat([{x}, {y}], axis={d})"],
            lambda: [f"{out} = torch.stack([{x}, {y}], {d})"],
            lambda: [f"{out}, {out}b = {x}.chunk(2, {d})"],
            lambda: [f"{out}, {out}b = torch.chunk({x}, 2, dim={d})"],
            lambda: [f"{out}, {out}b = torch.split({x}, 2, {d})"],
            lambda: [f"{out} = {x}.split([1, {self.values[x].shape[1] - 1}], 1)[1]"],
            lambda: [
                f"{out}a, {out}b = {x}.chunk(2, 1)",
                f"{out} = {out}a * torch.sigmoid({out}b)",
            ],
        ])  # fmt: skip
        return [], call()

    def _pool(self) -> tuple[list[str], list[str]]:
        r = self.random
        x = self._pick(r.choice([3, 4, 4, 5]))
        n, out = self.values[x].dim() - 2, self._new()
        call = r.choice([
            lambda: f"F.max_pool{n}d({x}, 2)",
            lambda: f"F.max_pool{n}d({x}, kernel_size=3, stride=1, padding=1)",
            lambda: f"F.avg_pool{n}d({x}, 2, ceil_mode=True)",
            lambda: f"F.avg_pool{n}d({x}, 3, 1, 1, count_include_pad=False)",
            lambda: f"F.adaptive_avg_pool{n}d({x}, {r.choice([1, 2, 3])})",
            lambda: f"F.adaptive_max_pool{n}d({x}, 2)",
            lambda: f"F.interpolate({x}, scale_factor=2)",
            lambda: f"F.interpolate({x}, scale_factor=2.0, mode='nearest')",
            lambda: f"F.interpolate({x}, size={x}.shape[2:])",
            lambda: f"F.interpolate({x}, size=(5, 7), mode='bilinear')",
            lambda: f"F.interpolate({x}, size=(5, 7), mode='bilinear', align_corners=True)",
            lambda: f"F.avg_pool{n}d({x}, kernel_size={x}.shape[2:])",
        ])  # fmt: skip
        return [], [f"{out} = {call()}"]

    def _mixed(self) -> tuple[list[str], list[str]]:
        x, out, r = self._pick(), self._new(), self.random
        d = max(1, abs(self._dim(x)))
        call = r.choice([
            lambda: f"{x}.mean({d})",
            lambda: f"{x}.mean({d}, keepdim=True)",
            lambda: f"{x}.mean((2, 3), keepdims=True)",
            lambda: f"{x}.mean(dim=[-2, -1])",
            lambda: f"torch.mean({x}, axis={d})",
            lambda: f"{x}.sum({d}, keepdim=True)",
            lambda: f"{x}.amax({d})",
            lambda: f"{x}.max({d})[0]",
            lambda: f"torch.sort({x}, {d})[0]",
            lambda: f"torch.topk({x}, 1, {d})[0]",
            lambda: f"{x}.cumsum({d})",
            lambda: f"{x}.std({d}, keepdim=True)",
            lambda: f"{x}.norm(dim={d}, keepdim=True)",
            lambda: f"{x}.double().mul(2).float()",
            lambda: f"torch.einsum('n...,n...->n...', {x}, {x})",
            lambda: f"{x}.type_as(x0)",
        ])  # fmt: skip
        return [], [f"{out} = {call()}"]

    def _sizes(self) -> tuple[list[str], list[str]]:
        x, out, r = self._pick(), self._new(), self.random
        call = r.choice([
            lambda: [f"{out}n = {x}.shape[1]", f"{out} = {x} * {out}n"],
            lambda: [f"{out} = {x} / {x}.size(-1) ** 0.5"],
            lambda: [f"{out} = {x}[:, : {x}.shape[1] // 2]"],
            lambda: [f"{out}n = {x}.size(0)", f"{out} = {x}.reshape({out}n, -1)"],
            lambda: [f"{out} = {x} + torch.arange({self.values[x].shape[-1]})"],
            lambda: [f"if {x}.shape[0] > 2:", f"    {x} = {x} * 2"],
        ])  # fmt: skip
        lines = call()
        return [], ["\n        ".join(lines)] if lines[0].startswith("if") else lines


# --- judging ---------------------------------------------------------------------------------


class _Rounding(TorchDispatchMode):
    """Adds noise of the size of 8-bit rounding to whatever an op computes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

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
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.numel():
                self.noised(x)
        return result

    def noised(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with noise of the size of its rounding."""
        with torch.utils._python_dispatch._disable_current_modes():
            step = float(x.max() - x.min()) / 255
            if math.isfinite(step):
                noise = torch.rand(x.shape, generator=self.generator) - 0.5
                x.add_(noise, alpha=1.5 * step)
        return x


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


def _tensors(value: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(value)


def wrong(model: nn.Module, actual: Any, expected: Any, inputs: Inputs) -> str | None:
    """What is wrong with ``actual`` in place of ``expected``, the result of ``model``."""
    one, spec = _tensors(expected)
    other, other_spec = _tensors(actual)
    if spec != other_spec:
        return f"structure {other_spec} instead of {spec}"
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        if not isinstance(a, torch.Tensor):
            if a != b:
                return f"output {index} is {b}, not {a}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {index}: {b.dtype} {tuple(b.shape)} for {a.dtype} {tuple(a.shape)}"
        if not a.is_floating_point():
            continue
        found = sqnr(a, b)
        if found >= _GOOD:
            continue
        bound = min(_noisy(model, inputs, index, seed) for seed in range(3)) - _ALLOWANCE
        if found < min(bound, _GOOD):
            return f"output {index}: {found:.1f} dB, where rounding explains {bound:.1f}"
    return None


def _noisy(model: nn.Module, inputs: Inputs, index: int, seed: int) -> float:
    with torch.no_grad():
        exact = _tensors(model(*copy.deepcopy(inputs)))[0][index]
        with _Rounding(seed) as rounding:  # the inputs are rounded as well
            noisy = _tensors(model(*(rounding.noised(x.clone()) for x in inputs)))[0][index]
    if noisy.shape != exact.shape:
        return -math.inf
    return sqnr(exact, noisy)


def quantized(model: nn.Module, program: Program) -> tuple[nn.Module, nn.Module]:
    """The int8 form of ``model``, and what it should answer as."""
    data = [program.data(number, 16) for number in range(4)]
    return x86quant.quantize(model, data, speed_check=False, progress=False), model


def compiled(model: nn.Module, program: Program) -> tuple[nn.Module, nn.Module]:
    """The compiled form of a stock-converted ``model``, and that one itself."""
    inputs = program.data(0, 2)
    with torch.no_grad():
        prepared = prepare_fx(
            copy.deepcopy(model), x86quant.get_default_qconfig_mapping(), inputs,
            backend_config=x86quant.get_backend_config(),
        )  # fmt: skip
        prepared(*inputs)
        convert = (convert_to_reference_fx, convert_fx)[program.seed % 2]
        converted = convert(prepared, backend_config=x86quant.get_backend_config())
        converted(*program.data(0, 2))
    return x86quant.compile(converted, program.data(0, 2)), converted


class Refused(Exception):  # noqa: N818
    """The program is none for this test: stock torch cannot convert it, or x86quant says no."""


def failure(program: Program, through: str) -> str | None:
    """What is wrong with the int8 form of ``program``, or None."""
    model = program.build()
    try:
        fast, reference = (quantized if through == "quantize" else compiled)(model, program)
    except X86QuantError as error:
        raise Refused(str(error)) from error
    except Exception:
        if _from_stock(sys.exc_info()[2]):
            raise Refused("stock") from None
        return traceback.format_exc(limit=-4)
    for number, batch in ((10, 2), (11, 3)):
        inputs = program.data(number, batch)
        try:
            with torch.no_grad():
                expected = reference(*copy.deepcopy(inputs))
        except Exception:
            continue
        try:
            with torch.no_grad():
                actual = fast(*copy.deepcopy(inputs))
        except X86QuantError as error:
            raise Refused(str(error)) from error
        except Exception:
            return f"batch {batch}: " + traceback.format_exc(limit=-4)
        if (found := wrong(model, actual, expected, inputs)) is not None:
            return f"batch {batch}: {found}"
    return None


def _from_stock(trace: Any) -> bool:
    """Whether an exception was raised before x86quant's own code was entered."""
    own = x86quant.__path__[0]
    return not any(f.f_code.co_filename.startswith(own) for f, _ in traceback.walk_tb(trace))


def shrunk(program: Program, through: str) -> Program:
    """A smaller program that fails too."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            try:
                candidate.build()(*candidate.data(0, 2))
                fails = failure(candidate, through)
            except Exception:
                continue
            if fails:
                program, smaller = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    names = {line.partition(" = ")[0].split(",")[0] for line in program.body if " = " in line}
    for name in sorted(names):
        if name.isidentifier() and program.result != name:
            yield dataclasses.replace(program, result=name)
    for index in range(len(program.body) - 1, -1, -1):
        body = (*program.body[:index], *program.body[index + 1 :])
        yield dataclasses.replace(program, body=body)


def write(seed: int) -> Program:
    """The program of that seed."""
    return _Writer(seed).write()


def run(
    seeds: range, through: str, shrink: bool = True, record: Path | None = None
) -> dict[str, list[Any]]:
    """Try these programs; failures come with their shrunk source, refusals with the reason."""
    found: dict[str, list[Any]] = {"failed": [], "refused": [], "passed": []}
    for number in seeds:
        program = write(number)
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                reason = failure(program, through)
            except Refused as error:
                found["refused"].append((number, str(error)))
                continue
            if reason is None:
                found["passed"].append(number)
                continue
            small = shrunk(program, through) if shrink else program
        found["failed"].append((number, reason, small.source))
        print(f"--- program {number}: {reason}\n{small.source}", flush=True)
        if record is not None:
            line = {"seed": number, "through": through, "reason": reason, "source": small.source}
            with record.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return found


def _range(text: str) -> range:
    """``A:B`` as the numbers from A up to B, without it."""
    first, _, last = text.partition(":")
    return range(int(first), int(last))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=_range, default=range(100), metavar="A:B")
    parser.add_argument("--through", choices=("quantize", "compile"), default="quantize")
    parser.add_argument("--record", type=Path, help="where failures are added, as lines of JSON")
    parser.add_argument("--chunk", type=int, default=500, help="programs between two summaries")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    seeds: range = arguments.seeds
    for first in range(seeds.start, seeds.stop, arguments.chunk):
        chunk = range(first, min(first + arguments.chunk, seeds.stop))
        found = run(chunk, arguments.through, record=arguments.record)
        counts.update({name: len(those) for name, those in found.items()})
        reasons.update(reason[:100] for _, reason in found["refused"])
        print(
            f"fuzz {arguments.through} {seeds.start}:{chunk.stop}: {counts['passed']} passed, "
            f"{counts['failed']} failed, {counts['refused']} refused, "
            f"{time.monotonic() - start:.0f} s",
            flush=True,
        )
    for reason, count in reasons.most_common(20):
        print(f"refused {count:5}: {reason}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

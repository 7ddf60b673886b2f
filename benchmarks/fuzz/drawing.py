"""Draws programs: statement by statement, each run at once and left out if torch refuses it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import keyword
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.fuzz import templates
from benchmarks.fuzz.programs import Program

_SHAPES = (
    (2, 4, 8, 8), (2, 8, 6), (2, 6, 8), (2, 8), (2, 3, 4, 6), (2, 2, 3, 4, 4), (2, 4, 1, 5),
    (2, 16), (2, 5, 12), (2, 3, 9, 7), (2, 1, 8, 8), (2, 2, 6, 4),
)  # fmt: skip
#: What torch, or the code of a statement, raises where it does not fit the tensors drawn.
_REFUSED = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    StopIteration,
)

#: Parts of names of functions that draw at random, leave memory as it was, or are not for models.
_LEFT_OUT = re.compile(
    "rand|bernoulli|dropout|multinomial|normal_|uniform|cauchy|exponential|geometric|poisson|"
    "binomial|empty|resize|set_|backward|fft|stft|sparse|quant|complex|real|imag|conj|polar|angle|"
    "storage|data|grad|cuda|_mkldnn|mkldnn|nested|names|named|rename|align|refine|is_|sym_|special_|"
    "_like|record_stream|retain|version|output_nr|leaf|qscheme|q_|lstm|gru|rnn|batch_norm|native|"
    "cudnn|miopen|fbgemm|view_as|_copy|fused|lu|geqrf|ormqr|cholesky|svd|qr|inverse|det|symeig|eig|"
    "lobpcg|lstsq|solve|pinv|matrix_rank|matrix_power|linalg|expm|matrix_exp|unsafe|alias|item|"
    "equal|allclose|pin_memory|to_dense|to_padded|coalesce|indices|values|crow|ccol|ctc|histogram|"
    "igamma|lgamma|digamma|polygamma|mvlgamma|unique|nonzero_static|shuffle|requires|size|stride|"
    "dequantize|choose|new_|put_|scalar_tensor|frombuffer|from_file|segment|_pdist|bessel|"
    "promote|result_type|can_cast|chalf|cfloat|cdouble|rrelu|data_ptr|hash|sspaddmm|smm|hspmm"
)


@functools.cache
def signatures() -> tuple[Any, ...]:
    """The schemas of functions and methods that torch offers for a tensor."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space != "aten" or name.startswith("_") or _LEFT_OUT.search(name):
            continue
        known = schema.arguments and str(schema.arguments[0].type) == "Tensor"
        if known and (hasattr(torch, name) or hasattr(torch.Tensor, name)):
            found[str(schema)] = schema
    return tuple(found[text] for text in sorted(found))


#: A value in a program.
_NAME = re.compile(r"\b[vx]\d+[a-z]?\b")


class _Draft:
    """A program while it is drawn, with the values its statements have on an example."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        torch.manual_seed(seed)
        first = self.random.choice(_SHAPES)
        self.inputs = (first, *[first] * (self.random.random() < 0.25))
        self.ids = self.random.random() < 0.15
        self.made: list[str] = []
        self.body: list[str] = []
        self.module = nn.Module()
        self.values: dict[str, Any] = {f"x{i}": torch.randn(s) for i, s in enumerate(self.inputs)}
        self.count = 0
        if self.ids:
            self.values[self._ids] = torch.randint(10, (2, 2))

    @property
    def _ids(self) -> str:
        return f"x{len(self.inputs)}"

    def finished(self, most: int) -> Program:
        """The program, after 3 to ``most`` statements."""
        wanted = self.random.randint(3, most)
        while not self.body:  # something to quantize
            self._layer(templates.PRODUCTS)
        for _ in range(6 * wanted):
            if len(self.body) >= wanted:
                break
            self.random.choice(_KINDS)(self)
        made, body, result = tuple(self.made), tuple(self.body), self._result()
        return Program(made, body, result, self.inputs, self.seed, self.ids)

    def _result(self) -> str:
        r = self.random
        last, other = self._tensors()[-1], self._pick()
        forms = (
            f"({last}, {other})",
            f"{{'a': {last}, 'b': {other}}}",
            f"[{last}, {other}]",
            f"({last}, {{'b': [{other}, {other}]}})",
            f"({last}, {last}.shape[1])",
            f"({last}, None)",
            f"({other},)",
        )
        found = r.choice(forms) if r.random() < 0.3 else last
        product = self.body[0].partition(" = ")[0]
        return found if product in self._read(found) else f"({found}, {product})"

    def _read(self, result: str) -> set[str]:
        """The names that ``result`` depends on."""
        found = set(_NAME.findall(result))
        for line in reversed(self.body):
            written, is_assignment, _ = line.partition(" = ")
            if not is_assignment or found.intersection(_NAME.findall(written)):
                found.update(_NAME.findall(line))
        return found

    def _tensors(self) -> list[str]:
        return [n for n, v in self.values.items() if isinstance(v, torch.Tensor)]

    def _pick(self) -> str:
        """A tensor of floats, more often a late one."""
        found = [n for n in self._tensors() if self.values[n].is_floating_point()]
        if not found:
            return "x0"
        return found[-1 - min(int(self.random.expovariate(0.8)), len(found) - 1)]

    def _new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    # --- kinds of statement ---

    def _layer(self, layers: list[str] = templates.LAYERS) -> None:
        if self.made and self.random.random() < 0.1:  # a layer of before, again
            name = self.random.randrange(len(self.made))
            self._add([], [f"{self._new()} = self.m{name}({self._pick()})"])
            return
        source, _, arguments = self._filled(self.random.choice(layers)).partition(" <- ")
        self._module(source, arguments)

    def _structured_layer(self) -> None:
        chosen = self.random.choice(templates.STRUCTURED_LAYERS)
        source, _, lines = self._filled(chosen).partition(" <- ")
        self._add([f"self.m{len(self.made)} = {source}"], _statements(lines))

    def _activation(self) -> None:
        r = self.random
        if r.random() < 0.3:
            self._module(f"nn.{r.choice(templates.ACTIVATIONS_IN_PLACE)}(inplace=True)", None)
        else:
            self._module(f"nn.{r.choice(templates.ACTIVATIONS)}()", self._pick())

    def _module(self, source: str, arguments: str | None) -> None:
        call = f"self.m{len(self.made)}({arguments or self._pick()})"
        named = arguments is not None or self.random.random() < 0.6
        self._add(
            [f"self.m{len(self.made)} = {source}"],
            [f"{self._new()} = {call}" if named else call],
        )

    def _by_signature(self) -> None:
        """A call of any of torch's functions, with arguments of the types that it declares."""
        r = self.random
        schema = r.choice(signatures())
        name = schema.name.partition("::")[2]
        parts: list[str] = []
        for argument in schema.arguments[1:]:
            if argument.has_default_value() and r.random() < 0.6:
                continue
            value = self._value_of(str(argument.type), argument.name)
            if value is None:
                if argument.has_default_value():
                    continue
                return
            by_name = argument.kwarg_only or len(parts) + 1 < schema.arguments.index(argument)
            by_name = by_name or "=" in (parts or [""])[-1] or r.random() < 0.1
            keyed = by_name and not keyword.iskeyword(argument.name)
            parts.append(f"{argument.name}={value}" if keyed else value)
        x = self._pick()
        method = hasattr(torch.Tensor, name) and (not hasattr(torch, name) or r.random() < 0.5)
        call = (
            f"{x}.{name}({', '.join(parts)})"
            if method
            else f"torch.{name}({', '.join([x, *parts])})"
        )
        kept = not name.endswith("_") or r.random() < 0.3
        out = self._new()
        if len(schema.returns) > 1:
            self._add([], [f"{out} = {call}[{r.randrange(len(schema.returns))}]"])
        else:
            self._add([], [f"{out} = {call}" if kept else call])

    def _value_of(self, kind: str, name: str) -> str | None:
        """An argument of that type, as it is written; None if there is none."""
        r = self.random
        small = str(r.choice([0, 1, 1, 2, -1]))
        values: dict[str, Callable[[], str]] = {
            "Tensor": self._pick,
            "Optional[Tensor]": self._pick,
            "List[Tensor]": lambda: f"[{self._pick()}, {self._pick()}]",
            "number": lambda: r.choice(["0.5", "2", "-1.5", "1"]),
            "Optional[number]": lambda: r.choice(["0.5", "2", "-1.5"]),
            "float": lambda: r.choice(["0.5", "1.0", "2.0"]),
            "Optional[float]": lambda: r.choice(["0.5", "1.0", "None"]),
            "int": lambda: small,
            "Optional[int]": lambda: small,
            "bool": lambda: r.choice(["True", "False"]),
            "Optional[bool]": lambda: r.choice(["True", "False"]),
            "List[int]": lambda: f"[{small}, 2]" if r.random() < 0.5 else f"[{small}]",
            "Optional[List[int]]": lambda: f"[{small}]",
            "Optional[ScalarType]": lambda: r.choice(["torch.float32", "torch.float64"]),
        }
        if "int" in kind and name == "dim":
            small = str(r.choice([1, 1, -1]))
        return values[kind]() if kind in values else None

    def _from(self, lines: list[str]) -> None:
        self._add([], _statements(self._filled(self.random.choice(lines))))

    # --- filling in and trying ---

    def _filled(self, template: str) -> str:
        r, x = self.random, self._pick()
        shape = self.values[x].shape
        rank = len(shape)
        d = r.randrange(1, rank) if rank > 1 else 0
        size = [*shape, 1, 1]
        fields = {
            "x": x, "y": self._pick(), "out": self._new(), "d": d, "r": rank,
            "e": r.randrange(-rank + 1, rank) if rank > 1 else 0, "n": size[d], "c": size[1],
            "w": shape[-1] if rank else 1, "dims": max(1, rank - 2),
            "order": ", ".join(map(str, [0, *r.sample(range(1, rank), rank - 1)])) if rank else "0",
            "low": r.choice(["-0.5", "0", "-1.0", "0.1"]), "high": r.choice(["0.5", "1", "6.0"]),
            "number": r.choice(["2", "0.5", "-1.5", "3.0", "True"]), "k": r.choice([1, 2, 3, 3]),
            "o": r.choice([2, 4, 6, 8]), "stride": r.choice([1, 1, 2]), "bias": r.random() < 0.7,
            "ids": self._ids if self.ids else f"{x}.argmax(-1)", "m": f"self.m{len(self.made)}",
        }  # fmt: skip
        return template.format(**fields)

    def _add(self, made: list[str], lines: list[str]) -> None:
        """Keep these lines if they run, and their values are neither many nor wild."""
        space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "self": self.module}
        # Aliases among the values must survive the copy.
        trial = copy.deepcopy(self.values)
        try:
            with torch.no_grad():
                for line in made:
                    exec(line, space)
                    self.module.eval()
                for line in lines:
                    exec(line, space, trial)
        except _REFUSED:
            return
        tensors = [v for v in trial.values() if isinstance(v, torch.Tensor)]
        if all(map(_is_tame, tensors)):
            self.values = trial
            self.made += made
            self.body += lines


_KINDS: tuple[Callable[[_Draft], None], ...] = (
    _Draft._layer, _Draft._layer, _Draft._layer, _Draft._structured_layer, _Draft._activation,
    _Draft._by_signature, _Draft._by_signature,
    *(functools.partial(_Draft._from, lines=lines) for lines in (
        templates.UNARY, templates.UNARY, templates.BINARY, templates.BINARY, templates.VIEW,
        templates.VIEW, templates.IN_PLACE, templates.INDEX, templates.JOIN, templates.POOL,
        templates.REDUCE, templates.SIZES,
    )),
)  # fmt: skip


def _statements(text: str) -> list[str]:
    """The statements of a template, those that belong together as one."""
    found: list[str] = []
    for line in text.split(";"):
        if found and (line.startswith((" ", "except")) or found[-1].endswith(":")):
            found[-1] += f"\n{line}"
        else:
            found.append(line)
    return found


def _is_tame(x: torch.Tensor) -> bool:
    if x.is_complex() or x.is_sparse or x.is_quantized or not 0 < x.numel() <= 5000:
        return False
    low, high = torch.aminmax(x.detach())
    return float(low) > -1e4 and float(high) < 1e4  # False for NaN


def write(seed: int, most: int = 20) -> Program:
    """The program of that seed, which eager torch runs with more rows than it was drawn with.

    It has 3 to ``most`` statements.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch advises against
        program = _Draft(seed).finished(most)
        for again in range(1, _DRAFTS):
            if _runs(program):
                break
            program = dataclasses.replace(_Draft(seed + again * _FAR).finished(most), seed=seed)
    return program


#: A program that does not run with more rows is drawn again, so often, from seeds so far away.
_DRAFTS, _FAR = 5, 10**9


def _runs(program: Program) -> bool:
    try:
        with torch.no_grad():
            program.build()(*program.calibration()[0])
    except Exception:  # of whatever the program calls
        return False
    return True

"""How a saved model is called: its arguments by name, the structure of its result, its sizes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.artifacts.capture.structures import (
    PLAIN,
    Leaf,
    fill,
    is_constant,
    leaves_of,
    match,
    split,
)
from x86quant.artifacts.file.typed import read_conditions
from x86quant.artifacts.file.values import decode, encode
from x86quant.compiled import GuardedModule
from x86quant.errors import ArtifactError, InvalidInputError
from x86quant.forms import size_conditions
from x86quant.forms.call_form import is_tensor
from x86quant.forms.size_conditions import Condition

_ENTRIES = {"parameters", "positional", "given", "defaults", "result", "conditions"}
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class Signature:
    """How a saved model is called.

    Attributes:
        parameters: names of the arguments that may be given by position, in order.
        positional: how many of them, from the first, the model itself is given by position.
        given: the arguments of the example by name, as structures of tensors.
        defaults: what the other arguments were: a call may give them, but no other value.
        result: the structure of the result.
        conditions: what must hold of the sizes of the inputs.
    """

    parameters: tuple[str, ...]
    positional: int
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    result: Any
    conditions: tuple[Condition, ...]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The tensors in the arguments of a call, in the order of the graph's inputs.

        Raises:
            InvalidInputError: the call is not like the example, or its sizes are not ones for which
                the graph holds.
        """
        if len(args) > len(self.parameters):
            raise InvalidInputError(
                f"the model takes at most {len(self.parameters)} positional arguments "
                f"({', '.join(self.parameters)}), got {len(args)}"
            )
        called = dict(zip(self.parameters, args, strict=False))
        if twice := called.keys() & kwargs.keys():
            raise InvalidInputError(f"the argument {min(twice)!r} is given twice")
        called.update(kwargs)
        if missing := [name for name in self.given if name not in called]:
            raise InvalidInputError(
                f"the model was saved for calls with {', '.join(self.given)}: "
                f"{', '.join(missing)} is missing"
            )
        leaves: list[Any] = [None] * self.inputs
        for name, value in called.items():
            if name in self.given:
                match(self.given[name], value, leaves, name)
            elif name not in self.defaults:
                known = ", ".join([*self.given, *self.defaults])
                raise InvalidInputError(f"the model takes no argument {name!r}, only {known}")
            else:
                match(self.defaults[name], value, leaves, name)
        return tuple(leaves)

    def is_like(self, other: Signature) -> bool:
        """Whether calls of both look alike, apart from sizes."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("parameters", "positional", "given", "defaults")
        )

    @property
    def fixed(self) -> tuple[str, ...]:
        """The arguments that can only be what they were in the example: left out, or a number."""
        plain = [name for name, value in self.given.items() if type(value) in PLAIN]
        return (*plain, *self.defaults)

    @functools.cached_property
    def _all_hold(self) -> Callable[[size_conditions.Shapes], bool]:
        return size_conditions.evaluator(self.conditions)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_all_hold"}

    @functools.cached_property
    def inputs(self) -> int:
        """How many tensors a call has."""
        return len(leaves_of(dict(self.given)))

    @property
    def names(self) -> tuple[str, ...]:
        """What each tensor of a call is known by."""
        found = [""] * self.inputs
        for name, structure in self.given.items():
            indices = leaves_of(structure)
            for number, index in enumerate(indices):
                found[index] = name if isinstance(structure, Leaf) else f"{name}_{number}"
        return tuple(found)

    def check_sizes(self, leaves: Sequence[Any]) -> None:
        """Raise InvalidInputError unless the graph holds for inputs of these sizes."""
        shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else () for x in leaves]
        if self._all_hold(shapes):
            return
        names = self.names
        for condition in self.conditions:
            if not size_conditions.holds(condition, shapes):
                wanted = size_conditions.text(condition, names.__getitem__)
                given = ", ".join(
                    f"{name} {shape}" for name, shape in zip(names, shapes, strict=True)
                )
                raise InvalidInputError(
                    f"this file holds the model for inputs with {wanted}, got {given}; save the "
                    "model with example_inputs of such sizes, or give its class to "
                    "load(path, model=...)"
                )

    def example(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with these tensors: by position, and by name."""
        named = {name: fill(structure, leaves) for name, structure in self.given.items()}
        first = self.parameters[: self.positional]
        defaults = {name: fill(structure, ()) for name, structure in self.defaults.items()}
        args = tuple(named.pop(name, defaults.get(name)) for name in first)
        return args, named

    def to_plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "parameters": list(self.parameters),
            "positional": self.positional,
            "given": encode(dict(self.given), {}),
            "defaults": encode(dict(self.defaults), {}),
            "result": encode(self.result, {}),
            "conditions": list(self.conditions),
        }

    @classmethod
    def from_plain(cls, plain: Any, inputs: int, outputs: int) -> Signature:
        """Read what ``to_plain`` wrote, for a graph of so many inputs and outputs.

        Raises:
            ArtifactError: it is nothing like that.
        """
        if not isinstance(plain, dict) or plain.keys() != _ENTRIES:
            raise ArtifactError(f"its signature does not consist of {', '.join(sorted(_ENTRIES))}")
        parameters = plain["parameters"]
        if not isinstance(parameters, list) or not all(isinstance(p, str) for p in parameters):
            raise ArtifactError("the parameters of its signature are no names")
        positional = plain["positional"]
        if type(positional) is not int or not 0 <= positional <= len(parameters):
            raise ArtifactError("the positional parameters of its signature are no number")
        given, defaults, result = (
            decode(plain[key], ()) for key in ("given", "defaults", "result")
        )
        if not isinstance(given, dict) or not isinstance(defaults, dict):
            raise ArtifactError("the arguments of its signature are no dicts")
        if sorted(leaves_of(given)) != list(range(inputs)) or leaves_of(defaults):
            raise ArtifactError(f"the arguments of its signature are not its {inputs} inputs")
        if sorted(set(leaves_of(result))) != list(range(outputs)):
            raise ArtifactError(f"the result of its signature is not its {outputs} outputs")
        conditions = read_conditions(plain["conditions"], inputs)
        return cls(tuple(parameters), positional, given, defaults, result, conditions)


def call_of(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Signature, list[torch.Tensor]]:
    """How ``model`` is called with these arguments, as far as it is known before, and the tensors.

    Raises:
        ArtifactError: an argument is of a class of its own.
    """
    signature = inspect.signature(model.forward)
    if isinstance(model, GuardedModule):  # whose forward takes anything
        signature = model.form.signature
    known = signature.parameters.values()
    parameters = [p.name for p in known if p.kind in _NAMED]
    # As in the example, for hooks that see positional arguments alone.
    positional = max(sum(p.kind is p.POSITIONAL_ONLY for p in known), len(args))
    variable = next((p.name for p in known if p.kind is p.VAR_POSITIONAL), None)
    if variable is not None and len(args) > len(parameters):
        parameters += [f"{variable}_{i}" for i in range(len(args) - len(parameters))]
        positional = len(parameters)
    called = {**dict(zip(parameters, args, strict=False)), **kwargs}
    constants = {p.name: split(p.default, [], is_tensor) for p in known if is_constant(p.default)}
    leaves: list[torch.Tensor] = []
    given = {
        name: structure
        for name, value in called.items()
        if (structure := split(value, leaves, is_tensor, f"the argument {name}")) is not None
        # What is as if it had not been given need not be given again.
        and not (name in constants and _is_same(structure, constants[name]))
    }
    defaults = {name: value for name, value in constants.items() if name not in given}
    defaults.update({name: None for name, value in called.items() if value is None})
    return Signature(tuple(parameters), positional, given, defaults, None, ()), leaves


def _is_same(one: Any, other: Any) -> bool:
    """Whether they are equal constants: True is not 1."""
    return type(one) is type(other) and bool(one == other)


def split_result(value: Any) -> tuple[Any, list[Any]]:
    """The structure of a result, and what is in it."""
    leaves: list[Any] = []

    def is_leaf(item: Any) -> bool:
        return isinstance(item, torch.Tensor | torch.SymInt)

    return split(value, leaves, is_leaf, "its result"), leaves

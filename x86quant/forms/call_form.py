"""Arguments and results as flat lists of tensors, and the structure that they came in."""

from __future__ import annotations

import collections
import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from x86quant.errors import UnsupportedError
from x86quant.forms import stand_ins

#: Values that a graph may take for constants: equal ones are the same to any program.
_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    slice,
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)

Leaf = Callable[[object], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """A value without its tensors.

    Attributes:
        kind: the type of a container or of a constant; None for a tensor.
        keys: names of fields or keys of a mapping; empty for a sequence.
        parts: what is in a container, in order.
        value: the constant.
    """

    kind: type | None
    keys: tuple[Any, ...] = ()
    parts: tuple[Structure, ...] = ()
    value: Any = None

    @property
    def leaves(self) -> int:
        """How many tensors it has."""
        return 1 if self.kind is None else sum(part.leaves for part in self.parts)

    @property
    def is_plain(self) -> bool:
        """Whether it is made of tensors, tuples, lists, dicts and None alone."""
        if self.kind not in (None, tuple, list, dict, type(None)):
            return False
        return all(part.is_plain for part in self.parts)

    def fill(self, leaves: Sequence[Any]) -> Any:
        """The value again, with ``leaves`` as its tensors."""
        return _fill(self, iter(leaves))

    def __reduce__(self) -> tuple[Any, ...]:
        kind, value = self.kind, self.value
        if kind is None or not stand_ins.stands_for_name(kind):
            return Structure, (kind, self.keys, self.parts, value)
        # pickle looks classes up by name, and these have no place where they could be found.
        if isinstance(value, enum.Enum):
            return _of_stand_in, ("enum", kind.__name__, (value.name,), ())
        form = stand_ins.form_of(kind)
        assert form is not None
        return _of_stand_in, (form, kind.__name__, self.keys, self.parts)


def _of_stand_in(
    form: str, name: str, keys: tuple[str, ...], parts: tuple[Structure, ...]
) -> Structure:
    if form == "enum":
        value = stand_ins.member(name, keys[0])
        return Structure(type(value), value=value)
    return Structure(stand_ins.fields_class(form, name, keys), keys, parts)


_TENSOR = Structure(None)


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a tensor."""
    return isinstance(value, torch.Tensor)


def is_transformed(x: object) -> bool:
    """Whether ``x`` is a tensor within torch.vmap, torch.func.grad or another of their kind."""
    return isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def fits(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``function`` has parameters for these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it does not tell its parameters
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def take_apart(value: Any, is_leaf: Leaf = is_tensor) -> tuple[Structure, list[Any]]:
    """The structure of ``value``, and its tensors in order.

    Raises:
        UnsupportedError: it holds something that is neither a tensor, a container nor a constant.
    """
    leaves: list[Any] = []
    return _take_apart(value, is_leaf, leaves), leaves


def _take_apart(value: Any, is_leaf: Leaf, leaves: list[Any]) -> Structure:
    def inside(values: Any) -> tuple[Structure, ...]:
        return tuple(_take_apart(x, is_leaf, leaves) for x in values)

    kind = type(value)
    if is_leaf(value):
        leaves.append(value)
        return _TENSOR
    if isinstance(value, _CONSTANTS):
        return Structure(kind, value=value)
    if dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value))
        return Structure(kind, names, inside(getattr(value, name) for name in names))
    if kind in (dict, collections.OrderedDict):
        return Structure(kind, tuple(value), inside(value.values()))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return Structure(kind, tuple(kind._fields), inside(value))
    if kind in (tuple, list, torch.Size):
        return Structure(kind, (), inside(value))
    raise UnsupportedError(f"a graph cannot take or return {kind.__module__}.{kind.__qualname__}")


def _fill(structure: Structure, leaves: Any) -> Any:
    kind = structure.kind
    if kind is None:
        return next(leaves)
    if not structure.parts and issubclass(kind, _CONSTANTS):
        return structure.value
    parts = [_fill(part, leaves) for part in structure.parts]
    if dataclasses.is_dataclass(kind):
        return kind(**dict(zip(structure.keys, parts, strict=True)))
    if issubclass(kind, Mapping):
        return kind(zip(structure.keys, parts, strict=True))  # type: ignore[call-arg]
    if hasattr(kind, "_fields"):
        # As they are: a packed sequence would look at what it is made of.
        return kind._make(parts)  # type: ignore[attr-defined]
    return kind(parts)  # type: ignore[call-arg]


#: How many arguments a call gives by position, and the names of the others.
Spelling = tuple[Any, ...]
#: Arguments by their number among those given, and what each must be.
_Places = tuple[tuple[int, Structure], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CallForm:
    """How a function is called, apart from the tensors it is given.

    Arguments are bound to parameters and defaults filled in, so that it does not matter how a
    caller spells them.

    Attributes:
        signature: the function's, without annotations.
        arguments: the structure of the bound arguments.
        names: one name for each tensor.
    """

    signature: inspect.Signature
    arguments: Structure
    names: tuple[str, ...]
    _places: dict[Spelling, _Places | None] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    @staticmethod
    def of(
        module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[CallForm, list[torch.Tensor]]:
        """How ``module`` is called with these arguments, and their tensors.

        Raises:
            UnsupportedError: an argument is of a kind that no graph can take.
            TypeError: the arguments do not fit the parameters.
        """
        signature = _with_constant_defaults(_bare_signature(module), args, kwargs)
        structure, leaves = take_apart(_bound(signature, args, kwargs))
        names: list[str] = []
        for name, part in zip(structure.keys, structure.parts, strict=True):
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                for key, inner in zip(part.keys, part.parts, strict=True):
                    names += _names(str(key), inner)
            else:
                names += _names(str(name), part)
        return CallForm(signature, structure, tuple(names)), leaves

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The tensors of a call of this form; None if it is of another."""
        spelling = (len(args), *kwargs)
        if spelling not in self._places:
            self._places[spelling] = self._places_of(spelling)
        places = self._places[spelling]
        if places is None:
            return self._tensors_inside(args, kwargs)
        given = (*args, *kwargs.values())
        tensors: list[Any] = []
        if all(_matches(given[number], part, tensors) for number, part in places):
            return tensors
        return None

    def _places_of(self, spelling: Spelling) -> _Places | None:
        """What each argument of such a call must be; None where that is none of tensors, numbers,
        tuples and lists.

        Binding arguments takes as long as a small network.
        """
        count, names = spelling[0], spelling[1:]
        given = [object() for _ in range(count + len(names))]
        try:
            bound = _bound(
                self.signature, given[:count], dict(zip(names, given[count:], strict=True))
            )
        except TypeError:
            return None
        places = []
        for value, part in zip(bound.values(), self.arguments.parts, strict=True):
            number = next((i for i, mark in enumerate(given) if mark is value), None)
            if number is None:
                try:
                    structure, leaves = take_apart(value)
                except UnsupportedError:
                    return None
                if leaves or not same_structure(structure, part):
                    return None
            elif not _is_matched(part):
                return None
            else:
                places.append((number, part))
        return tuple(places)

    def _tensors_inside(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor] | None:
        try:
            structure, leaves = take_apart(_bound(self.signature, args, kwargs))
        except (TypeError, UnsupportedError):
            return None
        return leaves if same_structure(structure, self.arguments) else None

    def refusal(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """How a call differs from this form: what ``tensors`` returned None for."""
        try:
            bound = _bound(self.signature, args, kwargs)
        except TypeError as error:
            return str(error)
        for name, part in zip(self.arguments.keys, self.arguments.parts, strict=True):
            if (found := _unlike(part, bound[name], str(name))) is not None:
                return found
        return "its arguments are of other types"

    def call(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with ``leaves`` as tensors.

        What has its default is not given, and what follows it by name: decorators of a forward may
        add arguments of their own by name.
        """
        given: dict[str, Any] = self.arguments.fill(leaves)
        bound = inspect.BoundArguments(self.signature, given)
        parameters = self.signature.parameters
        positional = [p for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if any(p.kind is p.VAR_POSITIONAL and given.get(n) for n, p in parameters.items()):
            return bound.args, bound.kwargs
        first = next((p.name for p in positional if _has_default(p, given)), None)
        if first is None:
            return bound.args, bound.kwargs
        names = [p.name for p in positional]
        named = {p.name: given[p.name] for p in positional if not _has_default(p, given)}
        before = [name for name in names[: names.index(first)] if name in named]
        kept = {name: value for name, value in given.items() if name not in names}
        kept |= {name: named[name] for name in before}
        rest = inspect.BoundArguments(self.signature, kept)
        return rest.args, {**{n: v for n, v in named.items() if n not in before}, **rest.kwargs}

    @property
    def is_plain(self) -> bool:
        """Whether every parameter is positional, must be given, and gets a tensor."""
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return all(
            p.kind in positional and p.default is p.empty
            for p in self.signature.parameters.values()
        ) and all(part.kind is None for part in self.arguments.parts)


def _names(name: str, part: Structure) -> list[str]:
    """One for each tensor of an argument."""
    if part.kind is None:
        return [name]
    return [f"{name}_{number}" for number in range(part.leaves)]


def _has_default(parameter: inspect.Parameter, given: Mapping[str, Any]) -> bool:
    """Whether the value given is the parameter's default, or none is."""
    return parameter.name not in given or given[parameter.name] is parameter.default


def _bare_signature(module: nn.Module) -> inspect.Signature:
    own = vars(module).get("__signature__")  # of a module that stands for another
    signature = own if own is not None else inspect.signature(module.forward)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return inspect.Signature(parameters)


def _with_constant_defaults(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.Signature:
    """``signature`` for calls like this one, without defaults that no graph can take.

    Such is a function. A parameter that has its default goes, so that a call that gives it is of
    another form; what stands behind it is then given by name. One that is given keeps its place,
    and has to be given, as have those before it.
    """
    given = signature.bind(*args, **kwargs).arguments
    odd = [n for n, p in signature.parameters.items() if not _is_constant_default(p)]
    if not odd:
        return signature
    parameters: list[inspect.Parameter] = []
    moved = False
    for name, parameter in signature.parameters.items():
        if name in odd and name not in given:
            moved = moved or parameter.kind is not parameter.KEYWORD_ONLY
            continue
        if name in odd:
            parameter = parameter.replace(default=parameter.empty)
            if parameter.kind is not parameter.KEYWORD_ONLY:
                parameters = [p.replace(default=p.empty) for p in parameters]
        if moved and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            parameter = parameter.replace(kind=parameter.KEYWORD_ONLY)
        parameters.append(parameter)
    return signature.replace(parameters=parameters)


def _is_constant_default(parameter: inspect.Parameter) -> bool:
    if parameter.default is parameter.empty:
        return True
    try:
        take_apart(parameter.default, lambda _: False)
    except UnsupportedError:
        return False
    return True


def _bound(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _same_kind(one: type | None, other: type | None) -> bool:
    """Whether they are one class, or stand for one by name; fields are compared elsewhere."""
    if one is other or one is None or other is None:
        return one is other
    by_name = stand_ins.stands_for_name(one) or stand_ins.stands_for_name(other)
    return by_name and one.__name__ == other.__name__


def same_structure(one: Structure, other: Structure) -> bool:
    """Whether they are equal, and constants of the same type: True is not 1."""
    if (
        not _same_kind(one.kind, other.kind)
        or one.keys != other.keys
        or len(one.parts) != len(other.parts)
    ):
        return False
    if not _is_value(one, other.value):
        return False
    return all(same_structure(a, b) for a, b in zip(one.parts, other.parts, strict=True))


def _is_matched(part: Structure) -> bool:
    """Whether ``_matches`` can tell."""
    if part.kind in (tuple, list):
        return all(map(_is_matched, part.parts))
    return part.kind is None or (not part.parts and issubclass(part.kind, _CONSTANTS))


def _matches(value: Any, part: Structure, tensors: list[Any]) -> bool:
    """Whether ``value`` has the structure ``part``; its tensors go to ``tensors``."""
    kind = part.kind
    if kind is None:
        tensors.append(value)
        return is_tensor(value)
    if not _same_kind(type(value), kind):
        return False
    if kind in (tuple, list):
        items = cast("Sequence[Any]", value)
        return len(items) == len(part.parts) and all(
            _matches(x, p, tensors) for x, p in zip(items, part.parts, strict=True)
        )
    return _is_value(part, value)


def _unlike(part: Structure, value: Any, where: str) -> str | None:
    """How ``value`` is not of the structure ``part``, or None."""
    if part.kind is None:
        return None if is_tensor(value) else f"{where} was a tensor, and is {_described(value)}"
    if not part.parts and issubclass(part.kind, _CONSTANTS):
        same = _same_kind(type(value), part.kind) and _is_value(part, value)
        return None if same else f"{where} was {part.value!s}, and is {_described(value)}"
    try:
        structure, _ = take_apart(value)
    except UnsupportedError as error:
        return f"{where}: {error}"
    if (
        not _same_kind(structure.kind, part.kind)
        or structure.keys != part.keys
        or len(structure.parts) != len(part.parts)
    ):
        return f"{where} was {_shape_of(part)}, and is {_described(value)}"
    inner = value.values() if isinstance(value, Mapping) else value
    if dataclasses.is_dataclass(value):
        inner = [getattr(value, key) for key in part.keys]
    names = part.keys or range(len(part.parts))
    for name, inside, x in zip(names, part.parts, inner, strict=True):
        if (found := _unlike(inside, x, f"{where}[{name!r}]")) is not None:
            return found
    return None


def _shape_of(part: Structure) -> str:
    assert part.kind is not None
    if part.keys:
        return f"a {part.kind.__name__} of {', '.join(map(str, part.keys))}"
    return f"a {part.kind.__name__} of {len(part.parts)} values"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} values"
    return f"{value!s:.80}"


def _is_value(constant: Structure, value: Any) -> bool:
    if isinstance(value, enum.Enum) and isinstance(constant.value, enum.Enum):
        return constant.value.name == value.name  # of one class, or of one that stands for it
    return constant.value is value or bool(constant.value == value)

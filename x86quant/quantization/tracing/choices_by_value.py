"""Where a model is judged that chooses among what it found by its values.

A detector returns the boxes that are left when overlapping ones are dropped, in the order of their
scores: hardly one stands where the float model has it, however close boxes and scores are. So it is
judged by what its parts return before anything is chosen. So is a recogniser that returns text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import OpWatch, has_floats, run, tensors_in, watched
from x86quant.calling.state import state_kept


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Calls of parts of a model, each as a path and which call of that part it is.

    Attributes:
        calls: what is judged.
        behind: parts that get what was chosen, so that nothing can be said of them.
    """

    calls: tuple[tuple[str, int], ...]
    behind: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The parts, each once."""
        return tuple(dict.fromkeys(path for path, _ in self.calls))

    def view(self, model: nn.Module) -> Callable[..., list[Any]]:
        """A function that runs ``model`` and returns what it has at these places."""
        modules = {path: model.get_submodule(path) for path in self.paths}

        def looked_at(*args: Any, **kwargs: Any) -> list[Any]:
            results: dict[str, list[Any]] = {path: [] for path in modules}
            with watched(modules, after=lambda path, _, result: results[path].append(result)):
                model(*args, **kwargs)
            return [results[path][n] for path, n in self.calls if n < len(results[path])]

        return looked_at


class _Chooses(OpWatch):
    """Notes whether the shape of something depended on values, or what one of ``deciders`` did."""

    def __init__(self, deciders: Collection[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deciders = deciders
        self.found = False

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, and note whether it chooses."""
        decides = func in self._deciders or func.overloadpacket in self._deciders
        self.found = self.found or decides or _chooses(func, args)
        return func(*args, **kwargs)


#: What makes numbers of places, such as letters of a text, out of values.
_DECIDERS = (
    torch.ops.aten.argmax,
    torch.ops.aten.argmin,
    torch.ops.aten.max.dim,
    torch.ops.aten.min.dim,
    torch.ops.aten.topk,
    torch.ops.aten.sort,
    torch.ops.aten.multinomial,
)


def _chooses(func: Any, args: Sequence[Any]) -> bool:
    if func is torch.ops.aten.index.Tensor:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def places_before_choices(model: nn.Module, paths: Sequence[str], call: Call) -> Places | None:
    """What the parts at ``paths`` return that goes into none of them, until ``model`` chooses.

    None if it does not choose, or at once.
    """
    places, has_chosen = _places(model, paths, call, ())
    return places if has_chosen else None


def places_of_floats(model: nn.Module, parts: Collection[str], call: Call) -> Places | None:
    """The same for a ``model`` whose own result is no numbers but what it has read off them.

    Of the outermost modules that return numbers, none of them within one of ``parts``.
    """
    returned: dict[str, bool] = {}

    def after(path: str, _: Call, result: Any) -> None:
        returned[path] = returned.get(path, False) or has_floats(result)

    with state_kept(model), watched(dict(model.named_modules()), after=after):
        run(model, call)

    def outermost(path: str) -> Iterator[str]:
        if path and returned.get(path):
            yield path
        elif path not in parts:
            for name, _ in model.get_submodule(path).named_children():
                yield from outermost(f"{path}.{name}" if path else name)

    return _places(model, [*outermost("")], call, _DECIDERS)[0]


def _places(
    model: nn.Module, paths: Sequence[str], call: Call, deciders: Collection[Any]
) -> tuple[Places | None, bool]:
    """What modules return that goes into none of them until something is chosen; whether it is."""
    made: list[tuple[str, int]] = []
    ends: dict[int, int] = {}  # where the memory of a result lies, and the number of its call
    kept: list[list[torch.Tensor]] = []  # so that nothing else lies there
    inner: set[int] = set()
    times = dict.fromkeys(paths, 0)
    chooses = _Chooses(deciders)

    def before(_: str, given: Call) -> None:
        inner.update(ends[at] for x in given.leaves if (at := _memory(x)) in ends)

    def after(path: str, _: Call, result: Any) -> None:
        if not chooses.found:
            tensors = tensors_in(result)
            kept.append(tensors)
            ends.update((_memory(x), len(made)) for x in tensors)
            made.append((path, times[path]))
        times[path] += 1

    modules = {path: model.get_submodule(path) for path in paths}
    try:
        with state_kept(model), watched(modules, before, after), chooses:
            run(model, call)
    except Exception:  # a mode takes ops apart, and some code takes only what eager torch makes
        return None, False
    calls = tuple(one for number, one in enumerate(made) if number not in inner)
    if not calls:
        return None, chooses.found
    before_it = {path for path, _ in made}
    behind = tuple(path for path in paths if path not in before_it)
    return Places(calls, behind), chooses.found


def _memory(x: torch.Tensor) -> int:
    """Where the memory lies that ``x`` is a view of."""
    return x.untyped_storage().data_ptr()

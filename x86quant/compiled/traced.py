"""How tracers see a compiled model.

``torch.compile`` gets one opaque op, ``x86quant::run_compiled``, that runs the model natively as
an eager call would. The model is named by a handle that no other process and no other model has, so
that a graph from a cache on disk cannot meet the wrong one.

``torch.export`` and ``torch.jit.trace`` get the graph's ops one by one, in plain torch: what they
make is to work where this model is not. It is slow until it is compiled again. So do
``make_fx`` and whatever else sees ops by a dispatch mode.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Interpreter, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.forms.call_form import Structure, take_apart
from x86quant.lowering.graph_tools import attribute
from x86quant.lowering.views import computes_a_size

_MODELS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

# torch.library is untyped.
_LIBRARY: Any = torch.library.Library("x86quant", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "run_compiled(str model, Tensor[] inputs) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)


def register(model: Any) -> str:
    """A handle by which ``run_compiled`` finds ``model``, as long as it lives."""
    handle = uuid.uuid4().hex
    _MODELS[handle] = model
    return handle


def only_watched() -> bool:
    """Whether every dispatch mode in force, if there is one, wants to see what really runs.

    Others record ops, or stand in for tensors: to them native code is empty memory.
    """
    if not torch._C._len_torch_dispatch_stack():
        return True
    return all(getattr(mode, "only_watches", False) for mode in _get_current_dispatch_mode_stack())


def run_compiled() -> torch._ops.OpOverload:
    """The op that runs a compiled model."""
    overload: torch._ops.OpOverload = torch.ops.x86quant.run_compiled.default
    return overload


def _model(handle: str) -> Any:
    model = _MODELS.get(handle)
    if model is None:
        raise InvalidInputError(
            "the compiled model that this program calls is gone or belongs to another process; "
            "keep it alive, or use torch.export, whose programs do not need it"
        )
    return model


def _run(handle: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, contiguous and in memory of their own, as the compiler is told they are."""
    found = _model(handle).run(tuple(inputs))
    results = [found] if isinstance(found, torch.Tensor) else _tensors(found)
    taken = {x.untyped_storage()._cdata for x in inputs}
    for i, result in enumerate(results):
        result = results[i] = result.contiguous()
        if result.untyped_storage()._cdata in taken:
            result = results[i] = result.clone()
        taken.add(result.untyped_storage()._cdata)
    return results


def _fake(handle: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    results = _tensors(_Fake(_model(handle).graph_module).run(*inputs))
    return [torch.empty(result.shape, dtype=result.dtype) for result in results]


def _tensors(results: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]


_LIBRARY.impl("run_compiled", _run, "CPU")
torch.library.register_fake("x86quant::run_compiled", _fake, lib=_LIBRARY)


class _Fake(Interpreter):
    """Runs a graph on tensors without data."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        tensor = attribute(self.module, str(target))
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(str(target))
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        fakes = {
            name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
            for name, t in tensors.items()
        }
        return torch.func.functional_call(module, fakes, args, kwargs)


def results_of(graph: Graph) -> Structure | None:
    """The structure of what ``graph`` returns; None if that is more than tensors."""
    try:
        structure, leaves = output_of(graph)
    except UnsupportedError:
        return None
    numbers = any(
        computes_a_size(node) or node.target is torch.ops.aten.sym_size.int for node in leaves
    )
    return structure if structure.is_plain and not numbers else None


def output_of(graph: Graph) -> tuple[Structure, list[Node]]:
    """What ``graph`` returns, as its structure and the nodes in it."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    return take_apart(thawed(output.args[0]), lambda x: isinstance(x, Node))


def thawed(value: Any) -> Any:
    """``value`` with plain containers in place of a graph's immutable ones."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(thawed, value))
    if isinstance(value, list):
        return [thawed(item) for item in value]
    if isinstance(value, dict):
        return {key: thawed(item) for key, item in value.items()}
    return value

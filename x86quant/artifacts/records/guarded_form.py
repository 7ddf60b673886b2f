"""Graphs that stand for calls, as plain data: a ``GuardedModule``, and a decoder's ``TokenStep``.

Of a guarded one the file says how it is called and which calls the graph holds for. The float
module that answers other calls is written too if sizes or numbers can make a call one of these. The
caller of ``load`` passes a module of that class; without it such calls are refused.

Of a token step it says what its cache is like and what it returns. The class of the result is a
name in ``transformers.modeling_outputs``, and must be one of its outputs; nothing else is looked up
by a name from a file.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from x86quant.artifacts.file.content import Content
from x86quant.artifacts.file.stored_tensors import TensorWriter
from x86quant.artifacts.file.values import check_keys, typed
from x86quant.artifacts.records.calls import CALL_ENTRIES, read_call, takes_others, write_call
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.compiled.guarded import GuardedGraph
from x86quant.compiled.token_step import TokenStep
from x86quant.errors import ArtifactError

Write = Callable[[nn.Module, TensorWriter], dict[str, Any]]
Read = Callable[[object], Content]

_ENTRIES = {*CALL_ENTRIES, "compiled", "strict", "original"}


def write_guarded(module: GuardedGraph, tensors: TensorWriter, write: Write) -> dict[str, Any]:
    """``module`` as JSON; ``write`` gives the records of the modules in it."""
    guard, kept = module.guard, None
    outside = guard.conditions or any(x.fixed for x in guard.inputs) or takes_others(module.form)
    if outside and isinstance(module, GuardedModule) and not module.strict:
        kept = module.original
    return {
        "compiled": write(module.compiled, tensors),
        **write_call(module.form, module.results, guard),
        "strict": kept is None,
        "original": None if kept is None else write(kept, tensors),
    }


def read_guarded(content: dict[str, Any], read: Read) -> Content:
    """What ``write_guarded`` wrote; ``read`` reads the records in it."""
    check_keys("a guarded graph", content, _ENTRIES)
    compiled = read(content["compiled"]).whole
    if not isinstance(compiled, CompiledModule):
        raise ArtifactError("a guarded graph is no graph")
    form, results, guard = read_call(content, compiled.graph_module)
    strict = typed(bool, content["strict"], "strict")
    original = None if content["original"] is None else read(content["original"])

    def build(skeleton: nn.Module | None) -> nn.Module:
        """Without a skeleton there is nothing that could answer other calls."""
        if isinstance(skeleton, GuardedModule):  # of a model that was quantized before
            skeleton = skeleton.original
        if original is not None and (skeleton is not None or original.needs is None):
            skeleton = original.build(skeleton)
        elif skeleton is not None:  # for its attributes: nobody is to compute with its weights
            skeleton = copy.deepcopy(skeleton).to("meta")
        return GuardedModule(compiled, skeleton, form, results, guard, strict=strict)

    return Content(build, parts=(compiled,), whole=compiled if original is None else None)


_NUMBERS = ("layers", "heads", "size")
_FLAGS = ("zeros_unseen", "caches_unasked")
_STEP_ENTRIES = {"compiled", "result", *_FLAGS, *_NUMBERS}
#: ids, positions, the cache, hidden tokens, wanted tokens, the cache's length
_INPUTS = 6


def write_token_step(step: TokenStep, tensors: TensorWriter, write: Write) -> dict[str, Any]:
    """``step`` as JSON; ``write`` gives the record of the graph in it."""
    if _result_class(step.result.__name__) is not step.result:
        raise ArtifactError(f"a {step.result.__name__} is no result of transformers' own")
    return {
        "compiled": write(step.compiled, tensors),
        "result": step.result.__name__,
        **{name: getattr(step, name) for name in (*_FLAGS, *_NUMBERS)},
    }


def read_token_step(content: object, read: Read) -> TokenStep:
    """What ``write_token_step`` wrote; ``read`` reads the record in it."""
    found = typed(dict, content, "a token step")
    found = {"caches_unasked": True, **found}  # files of earlier versions lack it
    check_keys("a token step", found, _STEP_ENTRIES)
    compiled = read(found["compiled"]).whole
    if not isinstance(compiled, CompiledModule):
        raise ArtifactError("a token step is no graph")
    inputs = sum(node.op == "placeholder" for node in compiled.graph_module.graph.nodes)
    if inputs != _INPUTS:
        raise ArtifactError(f"a token step has {inputs} inputs, not {_INPUTS}")
    name = typed(str, found["result"], "the result of a token step")
    result = _result_class(name)
    if result is None:
        raise ArtifactError(f"transformers has no result {name[:80]!r}")
    numbers = [typed(int, found[key], f"the {key} of a token step") for key in _NUMBERS]
    if min(numbers) < 1:
        raise ArtifactError("the sizes of a token step are no sizes")
    flags = [typed(bool, found[key], f"{key} of a token step") for key in _FLAGS]
    layers, heads, size = numbers
    return TokenStep(compiled, result, layers, heads, size, *flags)


def _result_class(name: str) -> type | None:
    outputs = importlib.import_module("transformers.modeling_outputs")
    found = vars(outputs).get(name)
    return found if isinstance(found, type) and issubclass(found, outputs.ModelOutput) else None

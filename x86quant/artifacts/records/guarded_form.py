"""A ``GuardedModule`` as plain data: its graph, how it is called, which calls the graph holds for.

The float module that answers other calls is written too if sizes or numbers can make a call one of
these. The caller of ``load`` passes a module of that class; without it such calls are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from x86quant.artifacts.file.content import Content
from x86quant.artifacts.file.stored_tensors import TensorWriter
from x86quant.artifacts.file.typed import check_keys, typed
from x86quant.artifacts.records.calls import CALL_ENTRIES, read_call, takes_others, write_call
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.errors import ArtifactError

Write = Callable[[nn.Module, TensorWriter], dict[str, Any]]
Read = Callable[[object], Content]

_ENTRIES = {*CALL_ENTRIES, "compiled", "strict", "original"}


def write_guarded(module: GuardedModule, tensors: TensorWriter, write: Write) -> dict[str, Any]:
    """``module`` as JSON; ``write`` gives the records of the modules in it."""
    guard, original = module.guard, module.original
    outside = guard.conditions or any(x.fixed for x in guard.inputs) or takes_others(module.form)
    kept = original if outside and not module.strict else None
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

"""A decoder's ``TokenStep`` as plain data: its graph, what its cache is like, what it returns.

The class of the result is a name in ``transformers.modeling_outputs``, and must be one of its
outputs; nothing else is looked up by a name from a file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from x86quant.artifacts.file.content import Content
from x86quant.artifacts.file.stored_tensors import TensorWriter
from x86quant.artifacts.file.typed import check_keys, typed
from x86quant.compiled import CompiledModule
from x86quant.compiled.token_step import TokenStep
from x86quant.errors import ArtifactError

Write = Callable[[nn.Module, TensorWriter], dict[str, Any]]
Read = Callable[[object], Content]

_NUMBERS = ("layers", "heads", "size")
_ENTRIES = {"compiled", "result", "zeros_unseen", *_NUMBERS}
#: ids, positions, the cache, hidden tokens, wanted tokens, the cache's length
_INPUTS = 6


def write_token_step(step: TokenStep, tensors: TensorWriter, write: Write) -> dict[str, Any]:
    """``step`` as JSON; ``write`` gives the record of the graph in it."""
    if _result_class(step.result.__name__) is not step.result:
        raise ArtifactError(f"a {step.result.__name__} is no result of transformers' own")
    return {
        "compiled": write(step.compiled, tensors),
        "result": step.result.__name__,
        "zeros_unseen": step.zeros_unseen,
        **{name: getattr(step, name) for name in _NUMBERS},
    }


def read_token_step(content: object, read: Read) -> TokenStep:
    """What ``write_token_step`` wrote; ``read`` reads the record in it."""
    found = typed(dict, content, "a token step")
    check_keys("a token step", found, _ENTRIES)
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
    zeros_unseen = typed(bool, found["zeros_unseen"], "zeros_unseen of a token step")
    layers, heads, size = numbers
    return TokenStep(compiled, result, layers, heads, size, zeros_unseen)


def _result_class(name: str) -> type | None:
    outputs = importlib.import_module("transformers.modeling_outputs")
    found = vars(outputs).get(name)
    return found if isinstance(found, type) and issubclass(found, outputs.ModelOutput) else None

"""``load``: the model in a file, with everything in it checked and nothing in it executed."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from x86quant.artifacts.file import container
from x86quant.artifacts.file.content import Content
from x86quant.artifacts.file.stored_tensors import TensorReader
from x86quant.artifacts.file.values import check_keys, typed
from x86quant.artifacts.records import forms
from x86quant.compiled import CompiledModule
from x86quant.compiled.compiled_parts import compiled_parts
from x86quant.errors import ArtifactError
from x86quant.graph_sources import forgotten_with_their_graphs
from x86quant.lowering import FloatNode
from x86quant.lowering.passes import Report
from x86quant.runtime.packed_cache import PackedCache

_MANIFEST = {"x86quant", "torch", "metadata", "model", "orders", "sparse"}


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """An input of a saved model; what is not known is None."""

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """What an artifact says about itself.

    Attributes:
        x86quant: the version that wrote it.
        torch: the torch it was written with.
        inputs: the model's inputs, as in the example it was made with.
        metadata: what was passed to ``save``.
        reports: what each pass of the lowering did.
        float_nodes: the nodes that run as torch float ops, and why.
        tensor_bytes: the size of all its tensors.
        needs: the class of a model that ``load`` must be given; None if it needs none.
    """

    x86quant: str
    torch: str
    inputs: tuple[Input, ...]
    metadata: dict[str, Any]
    reports: tuple[Report, ...]
    float_nodes: tuple[FloatNode, ...]
    tensor_bytes: int
    needs: str | None = None


def load(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    packed_cache: bool | str | os.PathLike[str] = False,
) -> Any:
    """The model in the file ``path``, written by ``save`` on this or any other CPU.

    Nothing in the file is executed: its graph may only call ops from closed lists. Weights are
    packed at the first run, for this CPU, by the rules in force.

    Args:
        path: the file.
        model: a float model of the class that was quantized, made with the same arguments; its
            weights do not matter, and it is not changed. Only files that say so need it.
        packed_cache: keep the packed weights of convolutions and of linears in graphs in a file,
            which the next load on such a CPU starts from: True for ``path`` with ``.packed`` behind
            it, or another path. A file that does not fit or cannot be written is done without.

    Returns:
        A ``CompiledModule``, or a model of that class with int8 layers.

    Raises:
        ArtifactError: the file is damaged, of another version, or not what ``save`` writes; or
            ``model`` is missing or does not fit it.
        OSError: the file cannot be read.
    """
    target = Path(path)
    try:
        data = container.read_bytes(target)
        with forgotten_with_their_graphs():
            found = from_bytes(data)[1].build(model)
    except ArtifactError as error:
        raise ArtifactError(f"{target} cannot be loaded: {error}") from error
    if packed_cache is not False:
        beside = f"{target}.packed" if packed_cache is True else packed_cache
        _use_packed_cache(found, Path(beside), container.checksum(data))
    return found


def _use_packed_cache(model: nn.Module, path: Path, checksum: str) -> None:
    graphs: dict[str, list[CompiledModule]] = {}
    for place, graph in compiled_parts(model):
        graphs.setdefault(place, []).append(graph)
    cache = PackedCache(path, graphs, checksum)
    for graph in itertools.chain.from_iterable(graphs.values()):
        graph.use_packed_cache(cache)


def describe(path: str | os.PathLike[str]) -> Description:
    """What the artifact ``path`` says about itself; checked like ``load`` does."""
    target = Path(path)
    try:
        return from_bytes(container.read_bytes(target))[0]
    except ArtifactError as error:
        raise ArtifactError(f"{target} cannot be loaded: {error}") from error


def from_bytes(data: bytes) -> tuple[Description, Content]:
    """The content of a file as what it says about itself, and the model to be built of it."""
    manifest, tensors = container.unpack(data)
    manifest = {"sparse": {}, **manifest}  # most files have none
    check_keys("the manifest", manifest, _MANIFEST)
    reader = TensorReader(tensors, manifest["orders"], manifest["sparse"])
    content = forms.read(manifest["model"], reader)
    reader.check_all_used()
    return _description(manifest, tensors, content), content


def _description(
    manifest: dict[str, Any], tensors: dict[str, torch.Tensor], content: Content
) -> Description:
    return Description(
        typed(str, manifest["x86quant"], "x86quant"),
        typed(str, manifest["torch"], "torch"),
        () if content.whole is None else _inputs(content.whole),
        typed(dict, manifest["metadata"], "metadata"),
        tuple(report for part in content.parts for report in part.reports),
        tuple(node for part in content.parts for node in part.float_nodes),
        sum(t.numel() * t.element_size() for t in tensors.values()),
        content.needs,
    )


def _inputs(model: CompiledModule) -> tuple[Input, ...]:
    return tuple(
        Input(
            str(node.target),
            str(node.meta["input_dtype"]) if "input_dtype" in node.meta else None,
            node.meta.get("shape"),
        )
        for node in model.graph_module.graph.nodes
        if node.op == "placeholder"
    )

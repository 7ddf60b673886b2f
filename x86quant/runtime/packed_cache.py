"""Packed weights beside a saved model, so that the next process need not order them again.

The file is that of ``kernels/runtime/packed_cache.h``: it is used if this very build of the library
wrote it, for this model, this level and these sizes of caches, its checksum is right, and nobody
but this user or root may write to it. Its first entry names the others. What is not in it is packed
as ever, and the file is replaced when all graphs of a model have run that packed something new.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from x86quant import extension
from x86quant.packing.linear_dynamic import Known, Weights, gated_rows, row_linear
from x86quant.runtime.programs import NATIVE, LayerWeights, Programs
from x86quant.version import __version__

_log = logging.getLogger("x86quant.packed_cache")


class PackedCache:
    """The packed weights of one saved model.

    Attributes:
        path: the file.
    """

    def __init__(
        self, path: Path, graphs: Mapping[str, Sequence[nn.Module]], checksum: str
    ) -> None:
        """For a model that was just read from a file of that ``checksum``.

        ``graphs`` are those at each path in it, of which a call runs one.
        """
        self.path = path
        self._model = f"{__version__} {checksum}"
        tensors: list[tuple[str, torch.Tensor]] = [
            (f"{place} {number} {name}", x)
            for place, alternatives in graphs.items()
            for number, graph in enumerate(alternatives)
            for named in (graph.named_parameters, graph.named_buffers)
            for name, x in named(remove_duplicate=False)
        ]
        #: By identity: its name, and what tells whether it still is what the file holds.
        self._names = {id(x): (name, weakref.ref(x), x._version) for name, x in tensors}
        self._known: Mapping[str, torch.Tensor] | None = None
        self._fresh: dict[str, torch.Tensor] = {}
        self._places = {id(graph): place for place, found in graphs.items() for graph in found}
        #: The places where none has run yet.
        self._waiting = set(graphs)
        self._lock = threading.Lock()

    def pack(self, programs: Programs, kernel: str, layer: LayerWeights) -> Any:
        """The packed weights of ``layer``, from the file where they are in it."""
        name = self._name(layer.source) if kernel == NATIVE else None
        if name is None:
            return programs.packed(kernel, layer)
        key = f"{name} {_rest(layer)}"
        (known,) = self._known_of([key])
        handle = programs.packed(kernel, layer, known)
        self._keep([key], [known], [handle.blob()])
        return handle

    def pack_rows(
        self, make: Callable[[Known], Any], products: Sequence[Weights], activation: str | None
    ) -> Any:
        """What ``make`` packs of ``products``, given what the file knows of each."""
        keys = []
        for weights in products:
            if (name := self._name(weights[0])) is None:
                return make([None] * len(products))
            keys.append(f"{name} rows {_rest_of_rows(weights, activation)}")
            activation = None  # it is that of the first
        known = self._known_of(keys)
        handle = make(known)
        if handle is not None:
            self._keep(keys, known, handle.blobs())
        return handle

    def _known_of(self, keys: Sequence[str]) -> list[torch.Tensor | None]:
        with self._lock:
            if self._known is None:
                self._known = self._read()
            return [self._known.get(key) for key in keys]

    def _keep(self, keys: Sequence[str], known: Known, blobs: Known) -> None:
        """Remember for the file which of ``blobs`` are not in it."""
        for key, before, blob in zip(keys, known, blobs, strict=True):
            if blob is not None and (before is None or blob.data_ptr() != before.data_ptr()):
                with self._lock:
                    self._fresh[key] = blob

    def write(self, graph: object) -> None:
        """Add what was packed since to the file; where that cannot be, say so and go on.

        It is called after each run of a ``graph``. In the first call of a model that has some at
        many places, all but the last would only write what the next replaces; a place where none
        runs is not waited for in the second.
        """
        if not self._fresh:
            return
        with self._lock:
            place = self._places.get(id(graph))
            first = place in self._waiting
            self._waiting -= {place}
            if first and self._waiting:
                return
            fresh, self._fresh = self._fresh, {}
            # Another process may have added to it.
            entries = dict(sorted({**self._read(quietly=True), **fresh}.items()))
            index = json.dumps(list(entries)).encode()
            blobs = [torch.frombuffer(bytearray(index), dtype=torch.uint8), *entries.values()]
            written = extension.native().write_packed_cache(str(self.path), self._model, blobs)
            if not written:
                _log.info("packed weights are not kept in %s: it cannot be written", self.path)

    def _name(self, weight: torch.Tensor | None) -> str | None:
        """The name of ``weight``, if it is what the file of the model holds."""
        name, found, version = self._names.get(id(weight), ("", None, 0))
        if found is None or weight is None or found() is not weight or weight._version != version:
            return None
        return name

    def _read(self, quietly: bool = False) -> Mapping[str, torch.Tensor]:
        extension.load()
        blobs, why = extension.native().read_packed_cache(str(self.path), self._model)
        try:
            names = json.loads(blobs[0].numpy().tobytes()) if blobs else ()
            return dict(zip(names, blobs[1:], strict=True))
        except ValueError:
            why = "it is damaged"
        finally:
            if why and not quietly:
                _log.info("weights are packed again, %s is not used: %s", self.path, why)
        return {}


def _rest(layer: LayerWeights) -> str:
    """What else the packed weights depend on."""
    told = hashlib.sha256(repr((layer.geometry, layer.codes, layer.residual_mult)).encode())
    told.update(repr(tuple(layer.weight.shape)).encode())
    for x in (layer.mult, layer.bias, layer.lut, layer.slopes):
        told.update(b"-" if x is None else x.contiguous().numpy().tobytes())
    return told.hexdigest()


def _rest_of_rows(weights: Weights, activation: str | None) -> str:
    """The same of a product of rows."""
    weight, *others = weights
    told = hashlib.sha256(repr((tuple(weight.shape), activation)).encode())
    for x in others:
        told.update(b"-" if x is None else x.contiguous().numpy().tobytes())
    return told.hexdigest()


class CachedPrograms(Programs):
    """Programs whose packed weights come from a cache, where they are in it."""

    def __init__(self, cache: PackedCache) -> None:
        self._cache = cache

    def pack(self, kernel: str, layer: LayerWeights) -> Any:
        """The weights as ``kernel`` wants them."""
        return self._cache.pack(self, kernel, layer)

    def row_linear(self, weights: Weights, activation: str | None) -> Any:
        """The weights of a product of row codes, packed; None where there is nothing to pack."""
        return self._cache.pack_rows(
            lambda known: row_linear(weights, activation, known), [weights], activation
        )

    def gated_rows(self, gate: Weights, up: Weights, activation: str) -> Any:
        """The same for two products of the same rows that are multiplied."""
        return self._cache.pack_rows(
            lambda known: gated_rows(gate, up, activation, known), [gate, up], activation
        )

"""An artifact over a dataset of Ray Data: ``predict``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import ray
import ray.data

from x86quant.artifacts import describe
from x86quant.errors import InvalidInputError
from x86quant.ray.columns import Columns, arguments, results
from x86quant.ray.nodes import alive, check_packages
from x86quant.ray.pinned import MakeModel, PinnedModel


def predict(
    dataset: ray.data.Dataset,
    path: str | os.PathLike[str],
    *,
    inputs: Columns,
    outputs: Columns,
    keep: Sequence[str] | None = None,
    batch_size: int = 64,
    workers: int | tuple[int, int] = 1,
    threads: int = 1,
    pin: bool = True,
    in_order: bool = False,
    model: MakeModel | None = None,
) -> ray.data.Dataset:
    """``dataset`` with what the artifact ``path`` finds for each row; as lazy as Ray Data is.

    The file is read here and sent to the workers. Each is a process that loads it once, plans for
    ``batch_size`` rows, and reads and makes Arrow batches without copying them where it can. Work
    of a worker that ends is done again by another; no row is lost or comes twice.

    Args:
        dataset: the rows.
        path: what ``x86quant.save`` wrote.
        inputs: the column that the model takes; several in the order of its arguments, or as a
            mapping from the names of its arguments.
        outputs: the column for its result; several for several results, or as a mapping from the
            names of its results.
        keep: the columns of ``dataset`` that stay; by default all.
        batch_size: rows of a call.
        workers: how many workers, or the least and the most.
        threads: threads of each, which Ray counts as so many CPUs.
        pin: hold each worker to cores that no other has, where there are enough.
        in_order: give the rows in the order of ``dataset``. Ray Data keeps this setting for the
            dataset and all that is made of it.
        model: makes the float model that ``x86quant.load`` needs for some files.

    Raises:
        ArtifactError: the file cannot be loaded.
        InvalidInputError: an argument makes no sense.
        UnsupportedError: a node of the cluster lacks x86quant, or has another version.
    """
    least, most = workers if isinstance(workers, tuple) else (workers, workers)
    for name, value in (("batch_size", batch_size), ("workers", least), ("threads", threads)):
        if value < 1:
            raise InvalidInputError(f"{name} is {value}: at least 1")
    if most < least:
        raise InvalidInputError(f"workers is {workers}: the least comes first")
    needs = describe(path).needs
    if needs is not None and model is None:
        raise InvalidInputError(f"{path} needs model=, a function that makes a {needs}")
    check_packages(alive())
    predicted = dataset.map_batches(
        BatchPredictor,
        fn_constructor_kwargs={
            # A reference: the bytes travel to each node once.
            "artifact": [ray.put(Path(path).read_bytes())],
            "inputs": inputs,
            "outputs": outputs,
            "keep": keep,
            "warm_for": batch_size,
            "threads": threads,
            "pin": pin,
            "model": model,
        },
        batch_size=batch_size,
        batch_format="pyarrow",
        zero_copy_batch=True,
        num_cpus=threads,
        compute=ray.data.ActorPoolStrategy(min_size=least, max_size=most),
    )
    if in_order:
        predicted.context.execution_options.preserve_order = True
    return predicted


class BatchPredictor:
    """What each worker runs: the model, made once, and a table for a table."""

    def __init__(
        self,
        artifact: list[ray.ObjectRef],
        inputs: Columns,
        outputs: Columns,
        keep: Sequence[str] | None,
        warm_for: int,
        threads: int,
        pin: bool,
        model: MakeModel | None,
    ) -> None:
        data = ray.get(artifact[0])
        self._model = PinnedModel(data, threads=threads, pin=pin, model=model)
        self._model.warm(warm_for)
        self._inputs, self._outputs, self._keep = inputs, outputs, keep

    def __call__(self, batch: pa.Table) -> pa.Table:
        """``batch`` with the results."""
        args, kwargs = arguments(batch, self._inputs)
        if not self._model.keeps_inputs:  # what it wrote to would be the object store's
            args = tuple(x.clone() for x in args)
            kwargs = {name: x.clone() for name, x in kwargs.items()}
        kept = batch if self._keep is None else _only(batch, self._keep)
        for name, column in results(self._model(args, kwargs), self._outputs, len(batch)):
            if name in kept.column_names:
                raise InvalidInputError(
                    f"the result is to be column {name!r}, which is there already: give it another "
                    "name in outputs, or leave that column out of keep"
                )
            kept = kept.append_column(name, column)
        return kept


def _only(batch: pa.Table, names: Sequence[str]) -> pa.Table:
    if missing := [name for name in names if name not in batch.column_names]:
        raise InvalidInputError(
            f"keep names {', '.join(missing)}; the columns are {', '.join(batch.column_names)}"
        )
    return batch.select(list(names))

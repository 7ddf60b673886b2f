"""The engine of a folder: a model of sentence-transformers, or an encoder of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from x86quant.compiled.block_graphs import blocks_of
from x86quant.errors import InvalidInputError, UnsupportedError, first_line
from x86quant.hardware.cpu import cpu
from x86quant.lowering.graph_tools import is_op
from x86quant.profiling.roofline import using_threads
from x86quant.service.engine import EngineFacts, Text, TokenRow
from x86quant.service.text_tokens import LENGTHS, TextTokens, padded, roomy_shape

#: Texts by which what is tokenized here is held against what the model's own methods would.
_PROBES = ("a", "Two short sentences. Of different lengths!")
#: The batches that are run before a service answers: rows, and at most so many tokens.
_WARM_ROWS = (1, 2, 3, 4, 6, 8)
_WARM_TOKENS = 512
#: What shows in a graph that rows of padding are not computed.
_OF_TOKENS = "present_tokens"


def load_engine(
    folder: str | Path, *, threads: int | None = None, name: str | None = None
) -> EncoderEngine:
    """The model in ``folder``, in int8; a float one is quantized while it loads.

    No code of the folder's runs, and nothing is downloaded.

    Args:
        folder: what ``save_pretrained`` of a SentenceTransformer, a CrossEncoder or an encoder of
            transformers wrote, in float or in int8.
        threads: of the model; by default as many as suit the cores that this process may use.
        name: what clients are told; by default the folder's.

    Raises:
        InvalidInputError: there is no such model in the folder.
        UnsupportedError: it is one that cannot be served.
    """
    # Here, since it takes seconds and other engines do without.
    from x86quant.torchvision_import import import_torchvision

    import_torchvision()  # transformers imports torchvision where there is one
    import sentence_transformers

    import x86quant.sentence_transformers as backend

    folder = Path(folder)
    if not folder.is_dir():
        raise InvalidInputError(
            f"{folder} is no folder: give one that save_pretrained wrote (nothing is downloaded)"
        )
    task = _task(folder)
    kinds = {
        "embed": sentence_transformers.SentenceTransformer,
        "rerank": sentence_transformers.CrossEncoder,
    }
    try:
        model = kinds[task](
            str(folder),
            device="cpu",
            backend=backend.BACKEND,
            trust_remote_code=False,
            local_files_only=True,
        )
    except (InvalidInputError, UnsupportedError):
        raise
    except Exception as error:  # whatever transformers raises at a folder that it cannot load
        raise InvalidInputError(
            f"the model in {folder} cannot be loaded: {type(error).__name__}: {first_line(error)}"
        ) from error
    engine = EncoderEngine(model, task, name or folder.resolve().name, threads)
    engine.warm()
    return engine


def _task(folder: Path) -> Literal["embed", "rerank"]:
    """What the model in ``folder`` is for, by its configuration."""
    own = _json(folder / "config_sentence_transformers.json").get("model_type")
    names = _json(folder / "config.json").get("architectures") or [""]
    if own is None:
        own = "CrossEncoder" if str(names[0]).endswith("ForSequenceClassification") else ""
    if own not in ("", "SentenceTransformer", "CrossEncoder"):
        raise UnsupportedError(
            f"{folder} holds a {own}: what can be served are SentenceTransformer, CrossEncoder and "
            "plain encoders"
        )
    return "rerank" if own == "CrossEncoder" else "embed"


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InvalidInputError(f"{path} is not JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def leaves_padding_out(model: nn.Module) -> bool:
    """Whether every native graph of ``model`` computes tokens alone, and there is one."""
    blocks = [found for found in map(blocks_of, model.modules()) if found is not None]
    graphs = [graph.compiled.graph_module.graph for found in blocks for graph in found.graphs]
    return bool(graphs) and all(
        any(is_op(node, _OF_TOKENS) for node in graph.nodes) for graph in graphs
    )


def _dtype(config: Any) -> str:
    settings = getattr(config, "quantization_config", None)
    return "float32" if settings is None else f"int{settings.bits}"


class EncoderEngine:
    """A model of sentence-transformers as an ``Engine``."""

    def __init__(
        self, model: Any, task: Literal["embed", "rerank"], name: str, threads: int | None = None
    ) -> None:
        self._model, self._task = model.eval(), task
        self._threads = threads or cpu().best_threads
        self._tokens = TextTokens(model.tokenizer, model.max_seq_length)
        features = model.preprocess([self._probe(_PROBES[0])])
        # What the model is called with beside tokens, such as their modality.
        self._beside = {k: v for k, v in features.items() if not isinstance(v, torch.Tensor)}
        self._inputs = [k for k, v in features.items() if isinstance(v, torch.Tensor)]
        self._check()
        self._pads = not leaves_padding_out(model)
        transformer = model.transformers_model
        self.facts = EngineFacts(
            name=name,
            task=task,
            max_tokens=int(model.max_seq_length),
            vocabulary=int(transformer.config.get_text_config().vocab_size),
            dimensions=self.run(self.tokenize([self._probe(_PROBES[0])])).shape[1],
            pads=self._pads,
            dtype=_dtype(transformer.config),
            prompts={k: v for k, v in (model.prompts or {}).items() if v},
            default_prompt=model.default_prompt_name,
        )

    def tokenize(self, texts: Sequence[Text]) -> list[TokenRow]:
        """As ``Engine`` says."""
        return self._tokens.of(texts)

    def shortened(self, text: Text, *, keep_end: bool = False) -> TokenRow:
        """As ``Engine`` says."""
        return self._tokens.shortened(text, keep_end)

    def run(self, rows: Sequence[TokenRow]) -> np.ndarray:
        """As ``Engine`` says."""
        arrays = padded(rows, self._tokens.pad, self.shape_for(rows))
        features = {name: torch.from_numpy(arrays[name]) for name in self._inputs}
        with using_threads(self._threads), torch.inference_mode():
            found = self._model({**features, **self._beside})
        result = found["scores" if self._task == "rerank" else "sentence_embedding"].float()
        if self._task == "embed" and self._model.truncate_dim is not None:
            result = result[:, : self._model.truncate_dim]
        return np.asarray(result[: len(rows)].reshape(len(rows), -1).numpy())

    def shape_for(self, rows: Sequence[TokenRow]) -> tuple[int, int] | None:
        """The shape in which ``rows`` are computed; None for the smallest."""
        return None if self._pads else roomy_shape(rows, self._model.max_seq_length)

    def warm(self) -> None:
        """Run batches of usual sizes, so that nobody waits for their plans."""
        (row,) = self.tokenize([self._probe(_PROBES[0])])
        for length in LENGTHS:
            for count in _WARM_ROWS:
                if length <= self.facts.max_tokens and length * count <= _WARM_TOKENS:
                    self.run([TokenRow([row.ids[0]] * length)] * count)

    def _probe(self, text: str) -> Text:
        return text if self._task == "embed" else (text, _PROBES[1])

    def _check(self) -> None:
        """Raise UnsupportedError if requests would be computed otherwise than by the model."""
        model = self._model
        pooling = next((m for m in model if hasattr(m, "include_prompt")), None)
        if pooling is not None and not pooling.include_prompt:
            raise UnsupportedError(
                "this model leaves its prompts out of the pooling, which a service cannot do yet"
            )
        if self._task == "rerank" and (model.num_labels != 1 or model.default_prompt_name):
            raise UnsupportedError(
                f"this reranker has {model.num_labels} labels and the prompt "
                f"{model.default_prompt_name!r}: what can be served has one label and no prompt"
            )
        texts = [self._probe(text) for text in _PROBES]
        wanted, rows = model.preprocess(texts), self.tokenize(texts)
        known = padded(rows, self._tokens.pad)
        if not all(
            name in known and np.array_equal(known[name], wanted[name].numpy())
            for name in self._inputs
        ):
            raise UnsupportedError(
                f"{type(model[0]).__name__} prepares texts in a way of its own, which a service "
                "cannot do yet"
            )

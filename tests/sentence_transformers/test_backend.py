"""``backend="x86quant"`` of sentence-transformers: loading, saving, files that nobody misreads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import x86quant
from tests.tiny_encoder import WORDS, write_tiny_encoder
from x86quant.compiled.block_graphs import blocks_of
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.lowering.graph_tools import is_op, op_name

transformers = pytest.importorskip("transformers")
library = pytest.importorskip("sentence_transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

_TEXTS = [" ".join(WORDS[i : i + 3 + i % 5]) for i in range(len(WORDS))]
_PAIRS = list(zip(_TEXTS, reversed(_TEXTS), strict=True))
_KINDS = ("SentenceTransformer", "CrossEncoder", "SparseEncoder")


@pytest.fixture(scope="module", autouse=True)
def registered() -> Any:
    import x86quant.sentence_transformers as backend

    return backend


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A float model of each kind, as sentence-transformers saves it."""
    found = {}
    for kind in _KINDS:
        plain = write_tiny_encoder(tmp_path_factory.mktemp("plain"), "BertForMaskedLM")
        options = {"num_labels": 1} if kind == "CrossEncoder" else {}
        torch.manual_seed(1)
        model = getattr(library, kind)(str(plain), device="cpu", **options)
        found[kind] = str(tmp_path_factory.mktemp(kind))
        model.save_pretrained(found[kind])
    return found


def _model(kind: str, folder: str, fuse_blocks: Any = None, **options: Any) -> Any:
    if fuse_blocks is not None:
        config = x86quant.X86QuantConfig(fuse_blocks=fuse_blocks)
        options["model_kwargs"] = {"quantization_config": config}
    return getattr(library, kind)(folder, device="cpu", backend="x86quant", **options)


def _results(model: Any) -> np.ndarray:
    if isinstance(model, library.CrossEncoder):
        return model.predict(_PAIRS)
    found = model.encode(_TEXTS, convert_to_tensor=True)
    return np.asarray(found.to_dense() if found.is_sparse else found)


def _graph_ops(model: nn.Module) -> set[str]:
    graphs = [b for b in map(blocks_of, model.modules()) if b is not None]
    return {op_name(n) for b in graphs for g in b.graphs
            for n in g.compiled.graph_module.graph.nodes if is_op(n)}  # fmt: skip


@pytest.mark.parametrize("kind", _KINDS)
def test_a_model_is_int8_and_stays_it_in_its_folder(
    kind: str, folders: dict[str, str], tmp_path: Path
) -> None:
    exact = _results(getattr(library, kind)(folders[kind], device="cpu"))
    model = _model(kind, folders[kind])
    assert not [m for m in model.modules() if isinstance(m, nn.Linear)]
    found = _results(model)
    assert np.corrcoef(exact.ravel(), found.ravel())[0, 1] > 0.98
    model.save_pretrained(str(tmp_path))
    for options in ({"backend": "x86quant"}, {}):
        again = getattr(library, kind)(str(tmp_path), device="cpu", **options)
        assert np.array_equal(_results(again), found)


def test_the_whole_runs_natively_without_padding(folders: dict[str, str], tmp_path: Path) -> None:
    kind = "SentenceTransformer"
    layers, model = (_model(kind, folders[kind], fuse) for fuse in (False, True))
    assert not _graph_ops(layers)
    assert "present_tokens" in _graph_ops(model)
    assert "fused graphs" in str(model.quantization)
    assert np.allclose(_results(model), _results(layers), atol=0.05)
    alone = np.concatenate([model.encode([text]) for text in _TEXTS])
    assert np.array_equal(model.encode(_TEXTS, batch_size=5), alone)
    model.save_pretrained(str(tmp_path))
    again = _model(kind, str(tmp_path))  # the configuration says that graphs are wanted
    assert _graph_ops(again) == _graph_ops(model)
    assert np.array_equal(_results(again), _results(model))
    assert not _graph_ops(_model(kind, str(tmp_path), False))


def test_options_are_checked(folders: dict[str, str], tmp_path: Path) -> None:
    kind = "SentenceTransformer"
    wrong = {"quantization_config": {"bits": 8}}
    with pytest.raises(InvalidInputError, match=r"X86QuantConfig.*not dict"):
        _model(kind, folders[kind], model_kwargs=wrong)
    _model(kind, folders[kind]).save_pretrained(str(tmp_path))
    other = {"quantization_config": x86quant.X86QuantConfig(weight_bits=4)}
    with pytest.raises(InvalidInputError, match="quantized already"):
        _model(kind, str(tmp_path), model_kwargs=other)
    with pytest.raises(ValueError, match="Unsupported backend"):
        library.SentenceTransformer(folders[kind], device="cpu", backend="x86")


def test_other_back_ends_are_as_they_were(folders: dict[str, str]) -> None:
    model = library.SentenceTransformer(folders["SentenceTransformer"], device="cpu")
    assert not [m for m in model.modules() if isinstance(m, x86quant.DynamicLinear)]
    assert not hasattr(model, "quantization")


def test_another_way_of_loading_is_refused(
    monkeypatch: pytest.MonkeyPatch, registered: Any
) -> None:
    from sentence_transformers.base.modules import Transformer

    monkeypatch.setattr(Transformer, "_load_model", lambda self, name, how: None)
    with pytest.raises(UnsupportedError, match=r"tested with sentence-transformers 6\.2"):
        registered.backend.register()


FORGETFUL = """
import sys
from x86quant.torchvision_import import import_torchvision; import_torchvision()
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
kind, folder = sys.argv[1:]
try:
    {"encoder": SentenceTransformer, "reranker": CrossEncoder,
     "plain": transformers.AutoModel.from_pretrained}[kind](folder)
except RuntimeError as error:
    print("refused:", error)
assert "x86quant.huggingface" not in sys.modules
"""


@pytest.mark.parametrize(
    ("kind", "how"), [("encoder", "load"), ("reranker", "load"), ("plain", "quantize")]
)
def test_a_process_that_forgot_the_import_is_refused(
    kind: str, how: str, folders: dict[str, str], tmp_path: Path
) -> None:
    """It would otherwise fill the layers with random numbers."""
    if how == "load":
        name = {"encoder": "SentenceTransformer", "reranker": "CrossEncoder"}[kind]
        _model(name, folders[name]).save_pretrained(str(tmp_path))
    else:
        float_model = transformers.AutoModel.from_pretrained(folders["SentenceTransformer"])
        x86quant.to_dynamic(float_model.eval()).save_pretrained(str(tmp_path))
    run = [sys.executable, "-W", "ignore", "-c", FORGETFUL, kind, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "refused: " in done.stdout
    assert "mismatch" in done.stderr  # of each layer, in the report


def test_files_without_marks_are_read(folders: dict[str, str], tmp_path: Path) -> None:
    """Those of earlier versions."""
    from safetensors.torch import load_file, save_file

    kind = "SentenceTransformer"
    model = _model(kind, folders[kind])
    model.save_pretrained(str(tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    marks = [name for name, x in tensors.items() if x.shape == (1,) and x.dtype == torch.int8]
    assert len(marks) == sum(isinstance(m, x86quant.DynamicLinear) for m in model.modules())
    save_file({k: x for k, x in tensors.items() if k not in marks}, file, {"format": "pt"})
    assert np.array_equal(_results(_model(kind, str(tmp_path))), _results(model))


def test_nothing_is_said_of_marks(folders: dict[str, str], tmp_path: Path) -> None:
    kind = "SentenceTransformer"
    _model(kind, folders[kind]).save_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "x86quant"
    _, said = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not said["unexpected_keys"]
    assert not said["missing_keys"]

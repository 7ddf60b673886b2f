"""Saving and loading models."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import Graph, GraphModule

import x86quant
from benchmarks.readers.artifacts import opened
from benchmarks.readers.reader import Depth, WrongAnswerError
from tests import isa
from tests.artifact_models import FORMS, mixed, stock
from tests.corruption import assembled, content, corrupted, corrupted_anywhere, parts
from x86quant.artifacts import describe
from x86quant.artifacts.file import container
from x86quant.artifacts.reader import from_bytes
from x86quant.artifacts.writer import to_bytes
from x86quant.compiled import CompiledModule
from x86quant.errors import ArtifactError
from x86quant.lowering.graph_tools import is_op

FUZZED = 300


@pytest.fixture(scope="module")
def model() -> tuple[CompiledModule, torch.Tensor]:
    return mixed()


@pytest.fixture(scope="module")
def saved(model: tuple[CompiledModule, torch.Tensor]) -> bytes:
    return to_bytes(model[0], metadata={"labels": ["cat", "dog"], "epoch": 3})


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def round_trip(module: Any, path: Path, **options: Any) -> CompiledModule:
    x86quant.save(module, path / "model.x86q", **options)
    return x86quant.load(path / "model.x86q")


# --- round trips -----------------------------------------------------------------------------


def test_round_trip_is_exact(model: tuple[CompiledModule, torch.Tensor], tmp_path: Path) -> None:
    compiled, x = model
    loaded = round_trip(compiled, tmp_path)
    assert torch.equal(loaded(x), compiled(x))
    assert torch.equal(loaded(x[:1].repeat(3, 1, 1, 1)), compiled(x[:1].repeat(3, 1, 1, 1)))
    assert loaded.reports == compiled.reports
    assert loaded.float_nodes == compiled.float_nodes
    assert len(loaded.segments) == len(compiled.segments)
    assert [n.meta.get("layer") for n in loaded.graph_module.graph.nodes] == [
        n.meta.get("layer") for n in compiled.graph_module.graph.nodes
    ]


def test_same_model_gives_same_bytes(
    model: tuple[CompiledModule, torch.Tensor], saved: bytes, tmp_path: Path
) -> None:
    again = to_bytes(model[0], metadata={"labels": ["cat", "dog"], "epoch": 3})
    assert again == saved
    loaded = x86quant.load(written(tmp_path / "a", saved))
    assert to_bytes(loaded, metadata={"labels": ["cat", "dog"], "epoch": 3}) == saved


def test_description(saved: bytes, tmp_path: Path) -> None:
    found = describe(written(tmp_path / "a", saved))
    assert found.metadata == {"labels": ["cat", "dog"], "epoch": 3}
    assert found.x86quant == x86quant.__version__
    assert found.torch == torch.__version__
    assert [(i.name, i.dtype, i.shape) for i in found.inputs] == [
        ("x", "torch.float32", (2, 3, 8, 8))
    ]
    assert {f.op for f in found.float_nodes} >= {"GRU"}
    assert found.tensor_bytes < len(saved)


def test_loaded_model_checks_its_inputs(saved: bytes, tmp_path: Path) -> None:
    loaded = x86quant.load(written(tmp_path / "a", saved))
    with pytest.raises(x86quant.InvalidInputError, match="rank 4"):
        loaded(torch.randn(3, 8, 8))


class Shared(nn.Module):
    """One matrix as embedding and as head, as language models have it; a layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embed(ids))
        return self.head(torch.tanh(self.layer(x)))


def test_shared_tensors_are_stored_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, ids = Shared().eval(), torch.randint(0, 30, (2, 5))
    loaded = round_trip(module, tmp_path)
    assert torch.equal(loaded(ids), module(ids))
    _, header, _ = parts((tmp_path / "model.x86q").read_bytes())
    assert sorted(entry["shape"] for entry in header.values()) == [[8], [8, 8], [30, 8]]


class Memory(nn.Module):
    """Constants that lie in memory in other orders, or not densely."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.register_buffer("moved", torch.randn(3, 4, 5).permute(2, 0, 1))
        self.register_buffer("spread", torch.randn(3, 1).expand(3, 7))
        self.register_buffer("empty", torch.randn(0, 4))
        self.register_buffer("brief", torch.randn(3).bfloat16())
        self.register_buffer("truth", torch.tensor([True, False]))
        self.register_buffer("scalar", torch.tensor(2.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return x + self.last, {
            "rest": [self.moved, self.spread, self.brief, self.truth, self.empty, self.scalar]
        }


def test_memory_order_and_dtypes_survive(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Memory()
    loaded = round_trip(module.eval(), tmp_path)
    first, rest = loaded(torch.zeros(2, 3, 4, 5))
    assert torch.equal(first, module.last)
    for name, found in zip(
        ["moved", "spread", "brief", "truth", "empty", "scalar"], rest["rest"], strict=True
    ):
        expected = getattr(module, name)
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
    buffers = dict(loaded.graph_module.named_buffers())
    for name in ("last", "moved"):
        assert buffers[name].stride() == getattr(module, name).stride()


class Transformer(nn.Module):
    """A block with attention spelled out, in float."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("mask", torch.full((9, 9), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        y = F.scaled_dot_product_attention(self.heads(q), self.heads(k), self.heads(v), self.mask)
        return x + self.out(y.transpose(1, 2).reshape(n, length, -1))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (2, 8)).transpose(1, 2)


def test_plain_module_is_traced(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Transformer().eval(), torch.randn(2, 9, 16)
    loaded = round_trip(module, tmp_path, example_inputs=(x,))
    assert torch.equal(loaded(x), module(x))
    assert torch.equal(loaded(x[:1]), module(x[:1]))
    with pytest.raises(x86quant.InvalidInputError, match="float32"):
        loaded(x.double())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, torch.Tensor]:
        if x.shape[0] > 100:
            return {"out": x}
        return {"out": self.linear(x) * scale, "in": x}


def test_what_fx_cannot_trace_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Branching().eval(), torch.randn(3, 4)
    with pytest.raises(ArtifactError, match="pass example_inputs"):
        x86quant.save(module, tmp_path / "a")
    loaded = round_trip(module, tmp_path, example_inputs=(x,))
    assert loaded(x).keys() == {"out", "in"}
    assert torch.equal(loaded(x)["out"], module(x)["out"])


def test_exported_program_with_dynamic_shapes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Transformer().eval(), torch.randn(2, 9, 16)
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    loaded = round_trip(exported, tmp_path)
    assert torch.equal(loaded(x[:1]), module(x[:1]))


def test_a_model_that_counts_its_calls_is_refused(tmp_path: Path) -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls

    with pytest.raises(ArtifactError, match="keeps something else after each call"):
        x86quant.save(Counting().eval(), tmp_path / "a", example_inputs=(torch.zeros(1),))


# --- another CPU -----------------------------------------------------------------------------

_RUN = """
    import sys, torch, x86quant
    model = x86quant.load(sys.argv[1])
    with torch.no_grad():
        out = model(torch.load(sys.argv[2]))
    kernels = [s.kernel for m in model.segments for p in m.plans for s in p.steps if s.choice]
    torch.save((out, x86quant.cpu().isa, kernels), sys.argv[3])
"""


class Saturating(nn.Module):
    """Layers whose weights overflow 16 bits where two products are added there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8 * 36, 8)
        for layer in (self.conv, self.depthwise, self.head):
            layer.weight.data = torch.where(layer.weight > 0, 1.0, 0.99) * 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.depthwise(self.conv(x)).flatten(1))


def test_moves_between_isa_levels(tmp_path: Path) -> None:
    """Made here, with saturating weights, it is exact on every lower level."""
    torch.manual_seed(0)
    x = torch.rand(2, 8, 6, 6) * 4
    compiled = x86quant.compile(stock(Saturating(), x), (x,))
    x86quant.save(compiled, tmp_path / "model")
    torch.save(x, tmp_path / "x")
    # The ops in plain torch state the numerics; they sum exactly.
    exact = compiled.graph_module(x)
    step = [n for n in compiled.graph_module.graph.nodes if is_op(n, "linear")][-1]
    levels = [level for level in ("avx2", "avx512", "avx_vnni") if isa.has(level)]
    assert "avx2" in levels
    for level in levels:
        arguments = [str(tmp_path / name) for name in ("model", "x", "out")]
        subprocess.run(
            [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(_RUN), *arguments],
            check=True,
            env=isa.environment(level),
        )
        out, ran_on, kernels = torch.load(tmp_path / "out")
        assert ran_on == level
        assert len(kernels) == 3
        # FBGEMM adds products in 16 bits on these levels: refused, whatever was best before.
        assert not any("fbgemm" in kernel for kernel in kernels), level
        assert float((out - exact).abs().max()) <= 1.01 * step.kwargs["out_scale"], level


# --- what cannot be saved --------------------------------------------------------------------


def graph_with(function: Any, *args: Any) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(function, (x, *args)))
    return GraphModule(nn.Module(), graph).eval()


def unknown_module() -> nn.Module:
    class Custom(nn.Linear):
        pass

    return nn.Sequential(Custom(2, 2))


def with_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_hook(lambda *_: None)
    return module


def quantized_buffer() -> nn.Module:
    gm = graph_with(torch.relu)
    gm.register_buffer("q", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    with gm.graph.inserting_before(list(gm.graph.nodes)[1]):
        gm.graph.get_attr("q")
    return gm


UNSAVABLE = {
    "function": (lambda: graph_with(torch.rand_like), r"node rand_like .* function rand_like"),
    "method": (lambda: graph_with(getattr, "data_ptr"), "attribute 'data_ptr'"),
    "argument": (lambda: graph_with(torch.add, 3j), r"node add .* 3j of type complex"),
    "in place": (lambda: graph_with(torch.ops.aten.relu_.default), "relu_"),
    "hook": (with_hook, "node .*0.* hooks .* remove them"),
    "training": (lambda: nn.Linear(2, 2).train(), r"call model.eval\(\)"),
    "quantized tensor": (quantized_buffer, "tensor q is .*qint8"),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_cannot_be_saved_is_named(name: str, tmp_path: Path) -> None:
    make, message = UNSAVABLE[name]
    module = make()
    module = module if name == "training" else module.eval()
    with pytest.raises(ArtifactError, match=message):
        x86quant.save(module, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_subclass_of_a_layer_is_traced_through(tmp_path: Path) -> None:
    module, x = unknown_module().eval(), torch.randn(3, 2)
    assert torch.equal(round_trip(module, tmp_path)(x), module(x))


@pytest.mark.parametrize("metadata", [{"a": (1, 2)}, {1: 2}, {"a": object()}, {"a": float("nan")}])
def test_metadata_is_plain(metadata: Any, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="metadata"):
        x86quant.save(nn.Linear(2, 2).eval(), tmp_path / "a", metadata=metadata)


def test_old_file_survives_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    x86quant.save(nn.Linear(2, 2).eval(), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        x86quant.save(nn.Linear(3, 3).eval(), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


# --- what must not be loaded -----------------------------------------------------------------


def test_other_version_is_refused(saved: bytes, tmp_path: Path) -> None:
    newer = saved.replace(b"x86quant-artifact 2 ", b"x86quant-artifact 3 ")
    with pytest.raises(ArtifactError, match="format version 3"):
        x86quant.load(written(tmp_path / "a", newer))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[:-1], "checksum|truncated"),
        (lambda d: d[:40], "truncated"),
        (lambda d: d[:3], "truncated or no artifact"),
        (lambda d: b"", "truncated or no artifact"),
        (lambda d: d[:-1] + bytes([d[-1] ^ 1]), "checksum is wrong"),
        (lambda d: b"PK\x03\x04" + d, "no artifact"),
    ],
)
def test_damage_is_named(change: Any, message: str, saved: bytes, tmp_path: Path) -> None:
    path = written(tmp_path / "a", change(saved))
    with pytest.raises(ArtifactError, match=message) as raised:
        x86quant.load(path)
    assert str(path) in str(raised.value)


def test_other_safetensors_files_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, tmp_path / "a")
    with pytest.raises(ArtifactError, match="not written by x86quant"):
        x86quant.load(tmp_path / "a")


def test_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="not a regular file"):
        x86quant.load(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        x86quant.load(tmp_path / "nothing")


def test_nothing_in_a_file_is_executed(saved: bytes, tmp_path: Path) -> None:
    """torch.fx writes names into code that it runs, so names must be no more than names."""
    for path in ("nodes", "attributes"):
        manifest, header, tensors = parts(saved)
        code = f"x, _=open({str(tmp_path / 'pwned')!r}, 'w')"
        if path == "nodes":
            manifest["model"]["nodes"][0]["target"] = code
        else:
            attributes = manifest["model"]["attributes"]
            name = sorted(attributes)[0]
            attributes[f"a'), {code}, ('"] = attributes.pop(name)
        with pytest.raises(ArtifactError):
            x86quant.load(written(tmp_path / "a", assembled(manifest, header, tensors)))
    assert not (tmp_path / "pwned").exists()


def test_corruptions_are_refused(model: tuple[CompiledModule, torch.Tensor], saved: bytes) -> None:
    """A part of ``python -m benchmarks.fuzz_readers``, from another seed."""
    failures = []
    for seed in range(1_000_000, 1_000_000 + FUZZED):
        damaged, expected, name = corrupted(saved, seed)
        try:
            found = opened(damaged, None, faithful=True)
        except WrongAnswerError as error:
            failures.append(f"seed {seed} ({name}): {error}")
        else:
            if expected == "refuse" and not isinstance(found, Depth):
                failures.append(f"seed {seed} ({name}) was loaded")
    assert not failures


@pytest.mark.filterwarnings("ignore::x86quant.X86QuantWarning")
@pytest.mark.parametrize("form", FORMS)
def test_corruptions_of_other_forms_are_refused_or_harmless(form: str) -> None:
    """A part of ``python -m benchmarks.fuzz_readers``, from another seed."""
    model, x, skeleton = FORMS[form]()
    data = to_bytes(model)
    expected = model(x)
    loaded = from_bytes(data)[1].build(skeleton)(x)
    assert str(loaded) == str(expected)
    for seed in range(1_000_000, 1_000_050):
        damaged, wanted, name = corrupted_anywhere(data, seed)
        found = opened(damaged, skeleton, faithful=False)
        assert isinstance(found, Depth) or wanted != "refuse", f"seed {seed} ({name})"


def test_fuzz_would_notice_an_unfaithful_load(saved: bytes) -> None:
    manifest, header, tensors = parts(saved)
    same = content(assembled(copy.deepcopy(manifest), header, tensors))
    assert same == content(saved)
    manifest["model"]["nodes"][1]["kwargs"]["out_zp"] ^= 1
    assert content(assembled(manifest, header, tensors)) != same


def test_header_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(container, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(ArtifactError, match="more than the 1000"):
        x86quant.save(nn.Linear(2, 2).eval(), tmp_path / "a", metadata={"a": "b" * 1000})


def test_file_is_a_safetensors_file(saved: bytes, tmp_path: Path) -> None:
    from safetensors import safe_open

    with safe_open(written(tmp_path / "a", saved), "pt") as file:
        names = set(file.keys())
        text = file.metadata()["x86quant"]
    assert "stem_weight" in names
    assert json.loads(text.split("\n", 1)[1])["x86quant"] == x86quant.__version__

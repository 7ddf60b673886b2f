"""Saving what is no single graph: exported with free sizes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.artifacts.own_classes import Answer, Classy, classy, loaded_from
from tests.corruption import JUNK, assembled, parts, places
from x86quant.artifacts.file import container
from x86quant.artifacts.file.stored_tensors import TensorReader, TensorWriter
from x86quant.artifacts.records import forms
from x86quant.artifacts.writer import to_bytes
from x86quant.compiled import GuardedModule
from x86quant.dynamic import DynamicGRU
from x86quant.errors import ArtifactError, InvalidInputError, X86QuantWarning
from x86quant.forms.guard import Guard
from x86quant.forms.size_conditions import parse


class Encoder(nn.Module):
    """Token ids to vectors, with a mask that may be left out, and a nested result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(
        self, ids: torch.Tensor, *, mask: torch.Tensor | None = None, scale: float = 1.0
    ) -> OrderedDict[str, Any]:
        x = self.layer(self.embed(ids) * scale, src_key_padding_mask=mask)
        return OrderedDict(tokens=self.head(x), pooled=(x.mean(1), None), kind="encoder")


def encoder() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    call = {"ids": torch.randint(0, 30, (3, 7)), "mask": torch.zeros(3, 7, dtype=torch.bool)}
    call["mask"][0, 5:] = True
    return Encoder().eval(), call


@pytest.fixture(scope="module")
def saved() -> tuple[nn.Module, dict[str, torch.Tensor], bytes]:
    model, call = encoder()
    quantized = x86quant.quantize(model, [call, call], progress=False, speed_check=False)
    return quantized, call, to_bytes(quantized)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, tuple | list):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def test_keywords_nested_results_and_other_sizes(
    saved: tuple[nn.Module, dict[str, torch.Tensor], bytes],
) -> None:
    """Saved by the example that quantize kept; any batch and length runs after loading."""
    quantized, call, data = saved
    loaded = loaded_from(data)
    assert_same(loaded(**call), quantized(**call))
    for batch, length in ((1, 7), (5, 7), (3, 12), (2, 2), (1, 1)):
        ids = torch.randint(0, 30, (batch, length))
        mask = torch.zeros(batch, length, dtype=torch.bool)
        assert_same(loaded(ids, mask=mask), quantized(ids, mask=mask))
    assert to_bytes(loaded) == to_bytes(loaded_from(to_bytes(loaded)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"ids": c["ids"]}, "mask was a tensor, and is None"),
        (lambda c: {**c, "scale": 2.0}, r"scale was 1\.0, and is 2\.0"),
        (lambda c: {**c, "surprise": 1}, "unexpected keyword argument 'surprise'"),
        (lambda c: {**c, "mask": c["mask"][:, :3]}, r"do not meet .*mask\.size\(1\).*load\(path"),
        (lambda c: {**c, "ids": c["ids"].float()}, "ids is torch.float32, not torch.int64"),
    ],
)
def test_calls_unlike_the_example_are_refused(
    change: Any, message: str, saved: tuple[nn.Module, dict[str, torch.Tensor], bytes]
) -> None:
    _, call, data = saved
    with pytest.raises(InvalidInputError, match=message):
        loaded_from(data)(**change(call))


class Branches(nn.Module):
    """Does something else for one row, and for long ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1:
            x = x * 2
        if x.shape[1] > 10:
            x = x[:, :10]
        return self.linear(x)


def test_each_branch_on_a_size_is_a_graph() -> None:
    torch.manual_seed(0)
    model = x86quant.to_dynamic(Branches().eval())
    loaded = loaded_from(to_bytes(model, (torch.randn(3, 6, 8),)))
    assert len(loaded.others) > 1
    for shape in ((5, 9, 8), (1, 6, 8), (3, 11, 8), (3, 10, 8), (2, 1, 8)):
        assert torch.equal(loaded(torch.ones(shape)), model(torch.ones(shape)))
    with pytest.raises(InvalidInputError, match="does not hold for this call: "):
        loaded(torch.ones(1, 12, 8))  # both branches at once were not seen
    assert to_bytes(loaded) == to_bytes(loaded_from(to_bytes(loaded)))


def test_each_of_several_graphs_takes_another_floating_type() -> None:
    torch.manual_seed(0)
    model = x86quant.to_dynamic(Branches().eval())
    loaded = loaded_from(to_bytes(model, (torch.randn(3, 6, 8),))).to(torch.bfloat16)
    for shape in ((5, 9, 8), (1, 6, 8), (3, 11, 8)):
        x = torch.randn(shape).bfloat16()
        assert torch.equal(loaded(x), model(x.float()).bfloat16())


class Steps(nn.Module):
    """A loop over time, which a graph unrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        h, x = inputs
        for step in x.unbind(1):
            h = torch.tanh(self.cell(h) + step)
        return h


def test_a_graph_for_some_sizes_comes_with_the_class_for_all() -> None:
    torch.manual_seed(0)
    model = x86quant.to_dynamic(Steps().eval())
    with pytest.warns(
        X86QuantWarning, match=r"loaded with .*model=Steps.* it takes all that the model does"
    ):
        data = to_bytes(model, (torch.randn(2, 4), torch.randn(2, 3, 4)))
    alone, filled = loaded_from(data), loaded_from(data, Steps())
    for batch, length in ((2, 3), (1, 3), (5, 3), (2, 4)):
        h, x = torch.randn(batch, 4), torch.randn(batch, length, 4)
        assert torch.equal(filled(h, x), model(h, x))
        if length == 3:
            assert torch.equal(alone(h, x), model(h, x))
        else:
            with pytest.raises(InvalidInputError, match="does not hold for this call: "):
                alone(h, x)


class Windows(nn.Module):
    """Cuts windows out of an image padded to a multiple of theirs, stage upon stage."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 2, 2)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.shape[3] % 2 == 0, "an even width is wanted")
        x = self.stem(x).permute(0, 2, 3, 1)
        for layer in self.layers:
            batch, height, width, size = x.shape
            x = F.pad(x, (0, 0, 0, (3 - width % 3) % 3, 0, (3 - height % 3) % 3))
            _, high, wide, _ = x.shape
            windows = x.view(batch, high // 3, 3, wide // 3, 3, size).transpose(2, 3)
            windows = layer(windows.reshape(-1, 9, size)).relu()
            x = windows.view(batch, high // 3, wide // 3, 3, 3, size).transpose(2, 3)
            x = x.reshape(batch, high, wide, size)[:, ::2, ::2]
        return x.mean((1, 2))


def test_sizes_that_become_involved_formulas_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Windows(2).eval(), torch.randn(2, 3, 20, 20)
    ways = []
    real = torch.export.export

    def export(*args: Any, dynamic_shapes: Any = None, **kwargs: Any) -> Any:
        ways.append("tried")
        program = real(*args, dynamic_shapes=dynamic_shapes, **kwargs)
        ways[-1] = "exported"
        return program

    monkeypatch.setattr(torch.export, "export", export)
    with pytest.warns(X86QuantWarning, match="its graph does not hold for inputs of"):
        captured = to_bytes(x86quant.to_dynamic(model), (x,))
    assert ways[0] == "tried"  # with all sizes free it was given up
    loaded = loaded_from(captured)
    for other in (x, torch.randn(5, 3, 20, 20)):
        assert torch.allclose(loaded(other), model(other), atol=0.05)
    with pytest.raises(InvalidInputError, match="does not hold for this call: "):
        loaded(torch.randn(2, 3, 26, 20))


def test_assertions_about_sizes_are_saved() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(4, 3, 20, 20) for _ in range(2)]
    model = x86quant.quantize(Windows(0).eval(), batches, progress=False, speed_check=False)
    assert isinstance(model, x86quant.CompiledModule)
    loaded = loaded_from(to_bytes(model))
    assert torch.equal(loaded(batches[0]), model(batches[0]))
    for module in (model, loaded):
        with pytest.raises(AssertionError, match="an even width is wanted"):
            module(torch.randn(2, 3, 20, 21))


class Patches(nn.Module):
    """Convolutions in static int8, attention in dynamic, in-place arithmetic between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16), nn.ReLU())
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x).flatten(2).transpose(1, 2)
        y += 1
        return self.head(self.layer(y).mean(1))


def test_static_parts_stay_what_they_are() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 16, 16) for _ in range(3)]
    model = x86quant.quantize(Patches().eval(), batches, progress=False, speed_check=False)
    assert not isinstance(model, x86quant.CompiledModule)
    loaded = loaded_from(to_bytes(model))
    for shape in ((2, 3, 16, 16), (1, 3, 16, 16), (3, 3, 24, 32)):
        x = torch.randn(shape)
        assert torch.equal(loaded(x), model(x))
    layers = [choice.layer for choice in x86quant.explain(loaded, (batches[0],))]
    assert "stem.0" in layers
    assert "layer.linear1" in layers


class Tagger(nn.Module):
    """A recurrent layer that runs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(32, 300)
        self.head = nn.Linear(300, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, (h, _) = self.lstm(x)
        return self.head(self.gru((x + h[-1:].mean()).transpose(0, 1))[0])


def test_recurrent_layers_take_any_length() -> None:
    torch.manual_seed(0)
    model = x86quant.to_dynamic(Tagger().eval()).requires_grad_(False)
    assert isinstance(model.gru, DynamicGRU)
    loaded = loaded_from(to_bytes(model, (torch.randn(2, 5, 8),)))
    for shape in ((2, 5, 8), (1, 5, 8), (3, 9, 8)):
        x = torch.randn(shape)
        # Float layers of torch may add up in another order from call to call.
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-6)


class Scaled(nn.Module):
    """Takes a number, which a graph has as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Answer:
        return Answer(self.b(torch.relu(self.a(x)) * scale))


def guarded() -> GuardedModule:
    torch.manual_seed(0)
    batches = [torch.randn(4, 3, 8, 8) for _ in range(2)]
    found = x86quant.quantize(Scaled().eval(), batches, progress=False, speed_check=False)
    assert isinstance(found, GuardedModule)
    return found


def test_a_guarded_graph_is_saved_as_a_graph() -> None:
    model = guarded()
    loaded = loaded_from(to_bytes(model))
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(loaded(x).out, model(x).out)
    assert torch.equal(loaded(x=x, scale=1.0).out, model(x).out)
    with pytest.raises(InvalidInputError, match=r"scale was 1\.0, and is 0\.5"):
        loaded(x, 0.5)
    assert to_bytes(loaded) == to_bytes(model)


def guarded_bytes(model: GuardedModule) -> bytes:
    """A file of the form that a guarded part of a larger module has."""
    tensors = TensorWriter()
    about = {"x86quant": "0", "torch": "2", "metadata": {}}
    manifest = {**about, "model": forms.write(model, tensors), "orders": tensors.orders}
    return container.pack(manifest, tensors.stored)


def test_a_guarded_part_has_its_float_module_if_sizes_may_need_it() -> None:
    model = guarded()
    x = torch.randn(2, 3, 8, 8)
    alone = loaded_from(guarded_bytes(model), Scaled())
    assert torch.equal(alone(x).out, model(x).out)
    assert alone.a.in_channels == 3  # what parents may read
    with pytest.raises(InvalidInputError, match="does not hold for this call"):
        alone(x, 0.5)
    model.guard = Guard(
        model.guard.inputs, (parse("s[0][0] <= 3"), parse("(s[0][2] - s[0][3]) == 0"))
    )
    model._prepare()
    loaded = loaded_from(guarded_bytes(model), Scaled())
    assert loaded.guard == model.guard
    assert torch.equal(loaded(x).out, model(x).out)
    many = torch.randn(5, 3, 8, 8)
    with pytest.warns(X86QuantWarning, match="a call runs in float"):
        assert torch.equal(loaded(many).out, model(many).out)
    again = guarded_bytes(loaded)
    assert again == guarded_bytes(loaded_from(again, Scaled()))


class Writes(nn.Module):
    """Writes to a part of what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        y[:, :4].mul_(0.5)
        y[:, 4:, 0] = 0.0
        return self.b(y)


def writes() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    batches = [torch.randn(4, 3, 8, 8) for _ in range(2)]
    return x86quant.quantize(Writes().eval(), batches, progress=False, speed_check=False), batches[
        0
    ]


def test_writes_on_copies() -> None:
    model, x = writes()
    data = to_bytes(model)
    assert b"on_copy" in data
    assert torch.equal(loaded_from(data)(x), model(x))


def test_only_copies_are_written_to() -> None:
    manifest, header, tensors = parts(to_bytes(writes()[0]))
    layer = next(m for m in manifest["model"]["modules"].values() if "on_copy" in m)
    copied = next(n for n in layer["on_copy"]["nodes"] if n["target"] == "torch.clone")
    copied["target"] = "torch.relu"
    with pytest.raises(ArtifactError, match="writes to what is no copy"):
        loaded_from(assembled(copy.deepcopy(manifest), header, tensors))
    copied["target"] = "torch.clone"
    outer = {"name": "w", "op": "call_method", "target": "mul_", "kwargs": {}, "meta": {}}
    manifest["model"]["nodes"].insert(-1, {**outer, "args": [{"node": 0}, 2.0]})
    with pytest.raises(ArtifactError, match="mul_"):
        loaded_from(assembled(manifest, header, tensors))


# --- damage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["call", "tree", "guarded", "on_copy", "sizes"])
def test_damage_of_each_entry_is_refused_or_harmless(
    form: str, saved: tuple[nn.Module, dict[str, torch.Tensor], bytes]
) -> None:
    """Each entry in turn becomes something else: ArtifactError, or a model, and nothing else."""
    skeleton: nn.Module | None = None
    if form == "call":
        data = saved[2]
    elif form == "tree":
        data, skeleton = classy()[2], Classy()
    elif form == "guarded":
        model = guarded()
        model.guard = Guard(model.guard.inputs, (parse("s[0][0] <= 3"),))
        data, skeleton = guarded_bytes(model), Scaled()
    elif form == "on_copy":
        data = to_bytes(writes()[0])
    else:
        data = to_bytes(x86quant.to_dynamic(Branches().eval()), (torch.randn(3, 6, 8),))

    def root(manifest: dict[str, Any]) -> Any:
        model = manifest["model"]
        if form == "on_copy":
            return next(m for m in model["modules"].values() if "on_copy" in m)
        if form in ("guarded", "call"):
            return {k: v for k, v in model.items() if k not in ("compiled", "original")}
        return model

    manifest, header, tensors = parts(data)
    count = len(places(root(manifest)))
    refused = 0
    for number in range(0, count, 1 + count // 150):
        changed = copy.deepcopy(manifest)
        place, key = places(root(changed))[number]
        place[key] = JUNK[number % len(JUNK)]
        if form in ("guarded", "call") and key in changed["model"]:
            changed["model"][key] = place[key]
        try:
            loaded_from(assembled(changed, header, tensors), skeleton)
        except ArtifactError:
            refused += 1
    assert refused > 20


class WritesBehindABranch(nn.Module):
    """torch.export traces it, and spells the write as an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if x.shape[2] > 40:
            y = y * 2
        y[:, :4].mul_(0.0)
        return self.b(torch.tanh(y))


def test_a_write_that_export_traced_is_saved_in_one_graph() -> None:
    batches = [torch.randn(4, 3, 12, 12) for _ in range(2)]
    model = WritesBehindABranch().eval()
    int8 = x86quant.quantize(model, batches, progress=False, speed_check=False)
    assert isinstance(int8, GuardedModule), int8.quantization
    x = torch.randn(2, 3, 12, 12)
    assert torch.equal(loaded_from(to_bytes(int8))(x), int8(x))


@pytest.mark.filterwarnings("ignore:Sparse")  # torch calls some layouts beta
@pytest.mark.parametrize("layout", ["coo", "uncoalesced", "csr", "csc", "bsr", "bsc"])
def test_sparse_tensors_keep_their_layout(layout: str) -> None:
    dense = torch.randn(6, 4) * (torch.rand(6, 4) < 0.4)
    if layout == "uncoalesced":
        where = torch.tensor([[0, 0, 5], [1, 1, 2]])
        tensor = torch.sparse_coo_tensor(where, torch.tensor([1.0, 2.0, 3.0]), (6, 4))
    elif layout == "coo":
        tensor = dense.to_sparse()
    else:
        blocks = (2, 2) if layout in ("bsr", "bsc") else None
        tensor = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=blocks)
    writer = TensorWriter()
    names = [writer.add(hint, tensor) for hint in ("a", "b")]  # one that is used twice
    assert names == ["a", "a"]
    found = TensorReader(writer.stored, writer.orders, writer.sparse).take("a")
    assert found.layout == tensor.layout
    assert torch.equal(found.to_dense(), tensor.to_dense())
    if found.layout == torch.sparse_coo:
        assert found.is_coalesced() == tensor.is_coalesced()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": [2, 4]}, "is none: "),  # its indices lie outside
        ({"size": [True, 4]}, "a form that is not known"),
        ({"layout": "csr"}, "a form that is not known"),
        ({"layout": "csr", "parts": ["i", "i", "v"]}, "is none: "),
        ({"layout": "sparse"}, "a form that is not known"),
        ({"parts": ["i", "s"]}, "is not in the file"),  # itself
        ({"parts": ["i", "nothing"]}, "is not in the file"),
        ({"coalesced": 1}, "must be a bool"),
        ({"coalesced": True}, "is none: "),  # its indices are out of order
        ({"more": 1}, "missing or unknown entries"),
    ],
)
def test_a_sparse_tensor_that_is_none_is_refused(change: dict[str, Any], message: str) -> None:
    parts = {"i": torch.tensor([[5, 0], [1, 1]]), "v": torch.ones(2)}
    form = {"layout": "coo", "size": [6, 4], "parts": ["i", "v"], "coalesced": False}
    assert TensorReader(parts, {}, {"s": form}).take("s").layout == torch.sparse_coo
    with pytest.raises(ArtifactError, match=message):
        TensorReader(parts, {}, {"s": {**form, **change}}).take("s")

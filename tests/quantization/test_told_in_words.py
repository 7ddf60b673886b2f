"""What cannot be done is refused, or told, in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.quantization.any_model import Branches, Net, images, quantized
from x86quant.calling.call import Call
from x86quant.calling.running import run
from x86quant.compiled.guarded import GuardedModule
from x86quant.dynamic.layers import DynamicLinear
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.quantization.deciding import noise


def test_guarded_modules_are_not_traced_as_the_float_model():
    result = quantized(Branches(lambda _, x: x), images())
    assert isinstance(result, GuardedModule)
    with pytest.raises(torch.fx.proxy.TraceError, match="GuardedModule"):
        torch.fx.symbolic_trace(result)


def test_nested_tensors_are_refused_in_a_sentence():
    rows = [torch.randn(3, 4), torch.randn(5, 4)]
    batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(InvalidInputError, match="to_padded_tensor"):
        x86quant.quantize(nn.Linear(4, 4), [batch], progress=False)


class Tokens(nn.Module):
    """Marks padding with huge values, which nobody reads."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x, attention_mask):
        return self.a(x) * torch.where(attention_mask.bool(), 1.0, 1e4)[..., None]


@pytest.mark.parametrize("by_name", [True, False])
def test_noise_of_padded_tokens_does_not_count(by_name, monkeypatch):
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[:, 4:] = 0
    x = torch.randn(4, 6, 8)
    batch = {"x": x, "attention_mask": mask} if by_name else (x, mask)
    result = quantized(Tokens(), [batch, batch], mode="dynamic")
    call = Call((), batch) if by_name else Call(batch)
    found = run(result, call)
    wrong = found.clone()
    wrong[:, 4:] = 0
    seen: list[float] = []

    class Prepared:
        reference = Tokens()

        class exact:  # noqa: N801
            @staticmethod
            def judged(call):
                return found

            @staticmethod
            def view(model):
                return model

    for answer in (wrong, -found):
        monkeypatch.setattr(noise, "result_of", lambda *_, answer=answer: answer)
        seen += noise.sqnrs(Prepared(), result, [call])
    assert seen[0] == 200.0
    assert seen[1] < 0


def test_a_metric_that_gives_no_number_is_refused():
    with pytest.raises(InvalidInputError, match="metric of the float model is a str"):
        quantized(Net(lambda _, x: F.relu(x)), images(), metric=lambda _: "good")


def test_why_there_is_no_graph_is_said_in_words() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return self.b(2 * y if y.mean() > 0 else y)

    data = [torch.randn(2, 3, 9, 9) for _ in range(2)]
    int8 = x86quant.quantize(Chooses().eval(), data, speed_check=False, progress=False)
    assert int8.quantization.notes[0] == (
        "the whole cannot be one graph: torch.fx cannot trace it (its code goes one way or another "
        "by values of tensors); nor can torch.export (its code goes one way or another by what is "
        "computed)"
    )


@pytest.mark.parametrize("mode", ["auto", "dynamic", "weight_only"])
def test_bits_of_a_table_that_is_all_there_is_are_refused_with_what_to_do(mode: Any) -> None:
    tokens = [torch.randint(50, (4, 8)) for _ in range(2)]
    with pytest.raises(
        UnsupportedError, match=r"Embedding has no weights but its tables'.*weight_only"
    ):
        x86quant.quantize(nn.Embedding(50, 64), tokens, mode=mode, embedding_bits=8, progress=False)


class _TwoTowers(nn.Module):
    """Text, and pictures where some are given."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.pictures, self.read = nn.Linear(12, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, pictures: torch.Tensor | None = None) -> torch.Tensor:
        if pictures is not None:
            x = torch.cat([x, self.pictures(pictures)], 1)
        found: torch.Tensor = self.text(x) @ self.read.weight
        return found


def _notes(*data: Any) -> tuple[str, ...]:
    q: Any = x86quant.quantize(_TwoTowers().eval(), list(data), progress=False, speed_check=False)
    assert isinstance(q.pictures, DynamicLinear)
    return tuple(q.quantization.notes)


_NOT_JUDGED = "in int8, but not judged, because no call that was shown reaches them: pictures"


def test_layers_that_no_call_reaches_are_told_from_those_whose_weights_are_read() -> None:
    notes = _notes(torch.randn(2, 5, 16), torch.randn(2, 5, 16))
    assert _NOT_JUDGED in notes
    assert any("instead of calling them: read" in note for note in notes)


def test_layers_that_a_later_call_alone_reaches_are_in_int8_and_judged() -> None:
    text, pictures = torch.randn(2, 5, 16), torch.randn(2, 5, 12)
    notes = _notes(text, {"x": text, "pictures": pictures})
    assert _NOT_JUDGED not in notes

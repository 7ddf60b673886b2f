"""Detectors are judged before they choose among what they found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.calling.call import Call
from x86quant.quantization.deciding.trials import _unlike
from x86quant.quantization.tracing.choices_by_value import (
    Places,
    places_before_choices,
    places_of_floats,
)
from x86quant.quantization.tracing.float_results import FloatResults


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.boxes, self.scores = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"boxes": self.boxes(x), "scores": self.scores(x)}


class _Detector(nn.Module):
    """Returns the boxes whose scores are the largest around, best first, of each picture."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()
        )
        self.head = _Head()
        self.more = nn.Conv2d(4, 4, 1)

    def forward(self, pictures: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        found = self.head(self.body(torch.stack(pictures)))
        results = []
        for boxes, scores in zip(found["boxes"], found["scores"], strict=True):
            best = scores == nn.functional.max_pool2d(scores[None], 3, 1, 1)[0]
            kept, order = scores[best].sort(descending=True)
            own = boxes.flatten(1).T[best.flatten()][order]
            if len(own) > 1:
                own = own + self.more(own.T[None, :, :, None])[0, :, :, 0].T
            results.append({"boxes": own, "scores": kept})
        return results


def _pictures(seed: int) -> list[torch.Tensor]:
    return list(torch.rand(2, 3, 33, 33, generator=torch.Generator().manual_seed(seed)))


def test_what_is_returned_before_a_choice_is_what_counts() -> None:
    model = _Detector().eval()
    call = Call((_pictures(0),))
    places = places_before_choices(model, ["body", "head", "more"], call)
    assert places is not None
    assert places.calls == (("head", 0),)  # what the body returns goes into it
    assert places.behind == ("more",)
    (seen,) = places.view(model)(_pictures(0))
    assert seen["boxes"].shape == (2, 4, 14, 14)


@pytest.mark.parametrize("paths", [["more"], []])
def test_of_what_comes_behind_the_choice_nothing_is_seen(paths: list[str]) -> None:
    assert places_before_choices(_Detector().eval(), paths, Call((_pictures(0),))) is None


def test_what_chooses_nothing_is_judged_by_its_results() -> None:
    body = _Detector().body
    assert places_before_choices(body, ["0", "2"], Call((torch.rand(1, 3, 33, 33),))) is None


class _OnlyEager(nn.Module):
    """Joins dimensions that lie side by side only where torch pools in one op."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.max_pool1d(self.body(x)[:, 0].mT, 3, 1, 1)
        y = y.view(len(y), -1)
        return y[y > 0]


def test_code_that_a_mode_cannot_run_is_judged_by_its_results() -> None:
    model, x = _OnlyEager().eval(), torch.rand(2, 1, 9, 9)
    with torch.no_grad():
        model(x)
    assert places_before_choices(model, ["body"], Call((x,))) is None


def test_a_detector_stays_int8_whatever_order_its_boxes_are_in() -> None:
    data: Any = [(_pictures(n),) for n in range(3)]
    made = x86quant.quantize(_Detector().eval(), data, progress=False, speed_check=False)
    summary = made.quantization
    assert {"body.0", "body.2", "head.boxes", "head.scores"} <= set(summary.int8_layers)
    assert min(summary.sqnr_db) > 25
    assert len(summary.sqnr_db) == 2  # boxes and scores
    (note,) = (note for note in summary.notes if note.startswith("judged by what head returns"))
    assert note.endswith("nothing is known: more")
    with torch.no_grad():
        exact, found = _Detector().eval()(_pictures(9)), made(_pictures(9))
    assert abs(float(found[0]["scores"][0] - exact[0]["scores"][0])) < 0.05


def test_what_was_judged_at_other_places_is_forgotten() -> None:
    exact, call = FloatResults(_Detector().eval()), Call((_pictures(0),))
    exact.judge_at(Places((("head", 0),)))
    (head,) = exact.judged(call)
    exact.judge_at(Places((("body", 0),)))
    (body,) = exact.judged(call)
    assert isinstance(head, dict)
    assert body.shape == (2, 16, 14, 14)


class _Reader(nn.Module):
    """Reads a line of text letter by letter: whether more is read depends on what was read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2))
        self.letters = nn.ModuleDict({"out": nn.Linear(32, 27), "again": nn.Linear(27, 32)})

    def forward(self, lines: torch.Tensor) -> dict[str, list[tuple[str, float]]]:
        state = self.features(lines).mean((2, 3))
        read = ["" for _ in lines]
        for _ in range(4):
            best = self.letters["out"](state).log_softmax(1).max(1)
            read = [text + chr(97 + int(i)) for text, i in zip(read, best.indices, strict=True)]
            if bool((best.indices == 0).all()):
                break
            taken = nn.functional.one_hot(best.indices, 27).float()
            state = state + self.letters["again"](taken)
        return {"preds": [(text, float(x)) for text, x in zip(read, best.values, strict=True)]}


def _lines(seed: int) -> torch.Tensor:
    return torch.rand(3, 1, 24, 48, generator=torch.Generator().manual_seed(seed))


def test_what_returns_text_is_judged_by_its_first_letters() -> None:
    places = places_of_floats(_Reader().eval(), ["features"], Call((_lines(0),)))
    assert places is not None
    assert places.calls == (("features", 0), ("letters.out", 0))
    assert places.behind == ("letters.again",)


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_text_may_be_another_in_int8(mode: str) -> None:
    model = _Reader().eval()
    fast = x86quant.quantize(model, [_lines(i) for i in range(4)], mode=mode, progress=False)
    said = "\n".join(fast.quantization.notes)
    assert "letters.out return" in said
    assert "holds no floating-point" not in said
    assert fast.quantization.sqnr_db
    assert not fast.quantization.float_layers
    assert min(fast.quantization.sqnr_db) > 20
    assert fast(_lines(5)).keys() == {"preds"}


def test_lists_may_be_longer_in_int8_but_tuples_not() -> None:
    one, other = [torch.ones(2)], [torch.ones(2), torch.ones(2)]
    assert _unlike((one, ["a"], True), (other, ["b", "c"], False)) is None
    assert _unlike((one, None), (one, "a")) == "it returns another structure"
    assert _unlike(tuple(one), tuple(other)) == "it returns another structure"
    assert _unlike({"a": one[0]}, {"b": one[0]}) == "it returns another structure"
    said = _unlike(one, [one[0].int()])
    assert said == "it returns torch.int32 (2,), not torch.float32 (2,)"
    assert _unlike([*one, 1], [*other, 1.0]) == "it returns another structure"

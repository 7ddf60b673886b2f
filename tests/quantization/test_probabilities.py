"""Noise of probabilities is judged where it shows evenly."""

from __future__ import annotations

import torch

from x86quant.calling.running import flat_floats


def test_probabilities_become_logarithms_and_all_else_stays() -> None:
    scores = torch.randn(3, 5, 7) * 4
    found = flat_floats((scores.softmax(-1), scores))
    exact = scores.log_softmax(-1).clamp(min=torch.tensor(1e-4).log())
    torch.testing.assert_close(found[: scores.numel()].view_as(scores), exact)
    assert torch.equal(found[scores.numel() :].view_as(scores), scores)


def test_what_only_looks_alike_stays() -> None:
    for x in (torch.rand(3, 5), torch.ones(4, 1), torch.tensor([0.5, 0.5]), torch.zeros(0, 5)):
        assert torch.equal(flat_floats(x), x.flatten())

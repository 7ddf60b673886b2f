"""What each layer does alone: the same, whether the rest of a call is computed again or known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import x86quant
from tests.models import Residual
from x86quant.calling.running import outputs
from x86quant.errors import X86QuantWarning
from x86quant.quantization import harm, simulation
from x86quant.quantization.batches import Calibration
from x86quant.quantization.prepared import PreparedModel
from x86quant.quantization.preparing import prepare
from x86quant.quantization.settings import Settings


class InPlace(nn.Module):
    """Writes into a value that another layer has read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sum in place, read twice."""
        y = self.first(x)
        z = self.second(y)
        y += z
        return y.relu_() + z


@pytest.mark.parametrize("model", [Residual, InPlace])
def test_known_values_change_no_harm(
    model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    calls = [(torch.randn(2, 8, 12, 12),) for _ in range(3)]
    seen: list[PreparedModel] = []
    real = harm.harms
    monkeypatch.setattr(
        "x86quant.quantization.outcome.harms",
        lambda prepared, names, _: seen.append(prepared) or real(prepared, names),
    )
    # No network is good enough, so that every layer is judged.
    monkeypatch.setattr("x86quant.quantization.outcome.ENOUGH_DB", 1000.0)
    with pytest.warns(X86QuantWarning):
        x86quant.quantize(model().eval(), calls, mode="static", speed_check=False, progress=False)
    prepared = seen[0]
    names = list(prepared.layers)
    found = {one.name: one.sqnr_db for one in real(prepared, names)}
    exact = list(outputs(prepared.model, prepared.sample))
    for name in names:
        with prepared.simulated([name]) as alone:
            expected = harm.sqnr_between(exact, list(outputs(alone, prepared.sample)))
        assert found[name] == expected


def test_values_that_a_layer_writes_to_are_not_kept() -> None:
    torch.manual_seed(0)
    calls = [(torch.randn(2, 8, 12, 12),) for _ in range(2)]
    data = Calibration(calls, Residual())
    settings = Settings(progress=False, speed_check=False, mode="static")
    prepared = prepare(Residual().eval(), calls, settings)
    (part,) = prepared.parts
    inputs = part.inputs(data.sample[0])
    assert inputs is not None
    known = simulation.FloatValues()
    values = known.of(part, inputs)
    assert values is not None
    known.check(part)
    assert known.of(part, inputs) is values
    next(x for x in values.values() if isinstance(x, torch.Tensor)).add_(1)
    known.check(part)
    assert known.of(part, inputs) is not values

"""A tree that is loaded into a model made with other attributes computes what was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import x86quant
from x86quant.errors import X86QuantWarning


class Net(nn.Module):
    """Reads a number, a string and lists."""

    def __init__(self, gain: float = 2.0, kind: str = "b") -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)
        self._gain, self.kind = gain, kind
        self.sizes, self.pair = [1.0, 2.0], (1.0, "x")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(torch.relu(self.a(self.norm(x)))) * self._gain * self.sizes[1] * self.pair[0]
        if float(y.mean()) > 1e9:  # branches on a value: no graph
            y = y * 2
        return y * 3 if self.kind == "b" else y


OTHERS = {
    "number": lambda: Net(gain=1.0),
    "string": lambda: Net(kind="a"),
    "list": lambda: _with("sizes", [1.0, 5.0]),
    "longer list": lambda: _with("sizes", [1.0, 5.0, 7.0]),
    "tuple": lambda: _with("pair", (9.0, "x")),
}


def _with(name: str, value: object) -> Net:
    model = Net()
    setattr(model, name, value)
    return model


@pytest.mark.parametrize("other", OTHERS)
def test_attributes_are_those_that_were_saved(other: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 9, 64)
    model = x86quant.to_dynamic(Net().eval())
    path = tmp_path / "net.x86q"
    with pytest.warns(X86QuantWarning, match="not its code"):
        x86quant.save(model, path)
    loaded = x86quant.load(path, model=OTHERS[other]())
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    with pytest.warns(X86QuantWarning, match="not its code"):
        x86quant.save(loaded, tmp_path / "again.x86q")
    assert path.read_bytes() == (tmp_path / "again.x86q").read_bytes()

"""Code that tries a layer with an argument, and without where it does not take that."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.calling.call import Call
from x86quant.calling.running import watched
from x86quant.errors import ArgumentsError, X86QuantWarning
from x86quant.forms.call_form import fits
from x86quant.quantization.tracing.memory_reads import sees_other_memory


class Tries(nn.Module):
    """Offers each layer the lengths; noise keeps it from being one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 8, 3, padding=1))
            for _ in range(2)
        )
        self.refusals = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            try:
                x = layer(x, lengths=None)
            except TypeError:
                self.refusals += 1
                x = layer(x)
            mean = x.mean(-1, keepdim=True)
            mean += 1e-4 * torch.rand(mean.shape)
            x = x - mean
        return x


def test_layers_that_are_offered_lengths_are_int8() -> None:
    model = Tries().eval()
    batches = [torch.randn(2, 8, 40) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", X86QuantWarning)
        int8 = x86quant.quantize(model, batches, speed_check=False, progress=False)
    assert sorted(int8.quantization.traced_by) == ["layers.0", "layers.1"]
    assert not int8.quantization.float_layers
    x86quant.assert_int8(int8, batches[0])
    before = int8.refusals
    with warnings.catch_warnings():
        warnings.simplefilter("error", X86QuantWarning)
        int8(batches[0])
    assert int8.refusals == before + 2


def test_a_compiled_module_refuses_arguments_as_python_does() -> None:
    layer = nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU()).eval()
    x = torch.randn(2, 8, 20)
    int8 = x86quant.quantize(layer, [x] * 4, speed_check=False, progress=False)
    for args, kwargs in (((x,), {"lengths": None}), ((x, x, x), {}), ((), {})):
        with pytest.raises(TypeError):
            int8(*args, **kwargs)
    assert getattr(int8, "outside", 0) == 0  # the float model did not answer any of them
    compiled = getattr(int8, "compiled", int8)
    with pytest.raises(ArgumentsError, match="'lengths' is none of them"):
        compiled(x, lengths=None)


def test_a_call_that_a_module_has_no_parameters_for_is_not_shown() -> None:
    model, shown = Tries().eval(), []
    layers = {str(i): layer for i, layer in enumerate(model.layers)}
    with torch.no_grad(), watched(layers, before=lambda name, call: shown.append((name, call))):
        model(torch.randn(1, 8, 20))
    assert [name for name, _ in shown] == ["0", "1"]
    assert not any(call.kwargs for _, call in shown)


class Wants(nn.Module):
    """Refuses what it is given at first, behind its parameters."""

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        if x.dim() == 3:
            raise TypeError("no")
        return x + 1


class Falls(nn.Module):
    """Goes on where its layer refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Wants()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.layer(x[None])
        except TypeError:
            y = self.layer(x).clone()
        y += 1
        return y


def test_what_follows_a_layer_that_raised_is_not_within_it() -> None:
    class InPlace(Falls):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y.as_strided((2,), (1,), 1)

    call = Call((torch.randn(2, 3),))
    assert sees_other_memory(Falls(), InPlace(), ["layer"], call) is not None
    assert sees_other_memory(Falls(), Falls(), ["layer"], call) is None


def test_what_does_not_tell_its_parameters_fits() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    assert fits(scripted.forward, (torch.ones(1, 2),), {})
    assert fits(torch.add, (torch.ones(1), 2), {})
    assert not fits(nn.Linear(2, 2).forward, (), {})

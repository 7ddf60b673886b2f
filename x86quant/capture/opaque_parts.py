"""Compiled parts and recurrent layers, opaque while torch.export sees what surrounds them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.fx import GraphModule

from x86quant.compiled import CompiledModule
from x86quant.compiled.traced import thawed
from x86quant.dynamic.recurrent import DynamicLSTM, DynamicRecurrent
from x86quant.forms.call_form import Structure, take_apart

#: The parts of the model that is being exported in this thread, and what its result looked like.
SEEN = threading.local()


class OpaquePart(nn.Module):
    """Stands for a compiled part, or a recurrent layer, while its surroundings are exported."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        # Not a child: export would take its tensors apart.
        self._hidden = [part]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One opaque op, whose fake kernel knows the shapes of the part's results."""
        part = self._hidden[0]
        called, tensors = take_apart((args, kwargs))
        # Its result's structure is known once the fake kernel has run.
        seen = PartCall(part, called)
        SEEN.calls.append(seen)
        outputs = torch.ops.x86quant_capture.part(list(tensors), len(SEEN.calls) - 1)
        assert seen.result is not None
        return seen.result.fill(outputs)


@dataclasses.dataclass
class PartCall:
    """One call of a part: the part, its arguments, and what it returns, as structures.

    Export asks three times for the same shapes, of which free sizes make work: they are kept.
    """

    part: nn.Module
    called: Structure
    result: Structure | None = None
    known: dict[Any, list[torch.Tensor]] = dataclasses.field(default_factory=dict)


def is_part(module: nn.Module) -> bool:
    """Whether ``module`` is to stay whole."""
    return isinstance(module, CompiledModule | nn.RNNBase | DynamicRecurrent)


@torch.library.custom_op("x86quant_capture::part", mutates_args=())
def _part(inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    raise AssertionError("it stands for a part while a model is exported, and never runs")


@_part.register_fake
def _(inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    seen: PartCall = SEEN.calls[number]
    fake = detect_fake_mode(inputs)
    assert fake is not None
    key = (fake, *(str((x.shape, x.dtype)) for x in inputs))
    if (known := seen.known.get(key)) is not None:
        return [torch.empty_like(x) for x in known]
    args, kwargs = seen.called.fill(inputs)
    if isinstance(seen.part, CompiledModule):
        result = _fake_graph(seen.part.graph_module, args)
    else:
        result = _fake_recurrent(seen.part, *args, **kwargs)
    seen.result, found = take_apart(result)
    found = [x.clone() if any(x is y for y in inputs) else x for x in found]
    seen.known[key] = found
    return found


def _fake_graph(gm: GraphModule, inputs: tuple[Any, ...]) -> Any:
    fake = detect_fake_mode(inputs)
    assert fake is not None
    tensors = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    state: dict[str, torch.Tensor] = {
        k: fake.from_tensor(v, static_shapes=True) for k, v in tensors.items()
    }
    return thawed(torch.func.functional_call(gm, state, inputs))


def _fake_recurrent(layer: Any, input: torch.Tensor, hx: Any = None) -> Any:
    """Results of the right shapes, without the loop over steps that would fix their number."""
    directions = 2 if layer.bidirectional else 1
    width = layer.proj_size or layer.hidden_size
    batched = input.dim() == 3
    swapped = input.transpose(0, 1) if batched and layer.batch_first else input
    out = swapped.new_empty((*swapped.shape[:-1], width * directions))
    last = (layer.num_layers * directions, *swapped.shape[1:-1])
    h = input.new_empty((*last, width))
    states = (h, input.new_empty((*last, layer.hidden_size))) if _has_cells(layer) else h
    return (out.transpose(0, 1) if batched and layer.batch_first else out), states


def _has_cells(layer: nn.Module) -> bool:
    return isinstance(layer, nn.LSTM | DynamicLSTM)


@contextlib.contextmanager
def calls_seen() -> Iterator[None]:
    """A block in which calls of parts are noted."""
    SEEN.calls = []
    yield

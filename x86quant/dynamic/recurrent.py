"""LSTMs and GRUs with int8 weights, on inputs and states quantized row by row as they come.

    fast = DynamicLSTM.from_float(lstm)      # called as nn.LSTM is

The input's share of the gates is one product for all steps, the state's share one product a step.
Gates, cells and states are float32. The products are ``torch.ops.x86quant.linear_dynamic``. Whole
sequences run in one native call; where someone watches the operators, or an override names another
kernel for a product, they run step by step in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from x86quant import extension
from x86quant.dynamic.group_weights import quantize_weight
from x86quant.dynamic.layers import (
    DynamicLinear,
    carry_attributes,
    float_bias,
    is_plain,
)
from x86quant.errors import InvalidInputError
from x86quant.ops.float_type import (
    Int8Module,
    asks_for_gradient,
    in_float32,
    in_float_type,
    without_gradient,
)
from x86quant.packing.linear_dynamic import extension_loads, native_in_sequences
from x86quant.routing.routes import Choice

_Self = TypeVar("_Self", bound="DynamicRecurrent")

#: The states of one direction of one layer: h for a GRU, h and c for an LSTM; [sequences, units].
_States = tuple[torch.Tensor, ...]

#: What a float parameter is called, and the product it belongs to.
_WEIGHTS = {"weight_ih": "ih", "weight_hh": "hh", "weight_hr": "hr"}
_BIASES = {"bias_ih": "ih", "bias_hh": "hh"}


def _product(weight: torch.Tensor, bias: torch.Tensor | None) -> DynamicLinear:
    return DynamicLinear(*quantize_weight(weight), float_bias(bias))


class _WithProducts(Int8Module):
    """Holds int8 products under names such as ``hh_l0``, and answers for their float parameters."""

    def __getattr__(self, name: str) -> Any:
        prefix, suffix = name[:9], name[9:]
        modules = self.__dict__.get("_modules", {})
        if prefix in _WEIGHTS and (found := modules.get(_WEIGHTS[prefix] + suffix)) is not None:
            return found.weight
        prefix, suffix = name[:7], name[7:]
        if prefix in _BIASES and (found := modules.get(_BIASES[prefix] + suffix)) is not None:
            return found.bias
        return super().__getattr__(name)


class DynamicRecurrent(_WithProducts):
    """What the two kinds share: layers, directions, packed sequences and states.

    Called as the float module: unbatched, batched or packed input, and initial states or none.

    Attributes:
        ih_l0, hh_l0, ih_l0_reverse, ...: the products of each layer and direction,
            named as torch names their weights; hr_l0, ... where states are projected.
    """

    gates: ClassVar[int]
    states: ClassVar[int]

    def __init__(
        self,
        products: Mapping[str, DynamicLinear],
        *,
        batch_first: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, product in products.items():
            self.add_module(name, product)
        self.batch_first, self.dropout = batch_first, dropout
        self.bidirectional = "ih_l0_reverse" in products
        self.num_layers = sum(name.startswith("ih_l") for name in products)
        self.num_layers //= 2 if self.bidirectional else 1
        self.input_size = products["ih_l0"].in_features
        self.hidden_size = products["hh_l0"].out_features // self.gates
        self.proj_size = products["hr_l0"].out_features if "hr_l0" in products else 0
        self.bias = products["hh_l0"].bias is not None
        self._packed: tuple[Any, tuple[Any, tuple[Choice, ...]] | None, Any] | None = None
        self.eval()

    @property
    def products(self) -> tuple[DynamicLinear, ...]:
        """The input's, the state's and the projection's, direction by direction."""
        kinds = ("ih", "hh", "hr") if self.proj_size else ("ih", "hh")
        suffixes = _suffixes(self.num_layers, self.bidirectional)
        return tuple(self._modules[k + s] for s in suffixes for k in kinds)  # type: ignore[misc]

    @property
    def sequence_choices(self) -> tuple[Choice, ...] | None:
        """How the native sequence runs each of ``products``; None where steps run in torch."""
        if self._packed is not None and self._packed[0] == self._stamp():
            return None if self._packed[1] is None else self._packed[1][1]  # as it was packed
        choices = [native_in_sequences(*product.operands) for product in self.products]
        found = tuple(choice for choice in choices if choice is not None)
        return found if len(found) == len(choices) else None

    def pack_again(self) -> None:
        """Let the sequence be packed again at the next call, by the rules in force then."""
        self._packed = None

    def _native(self) -> Any | None:
        """The packed layers and directions; None where steps run in torch."""
        if self._packed is None or self._packed[0] != self._stamp():
            products = self.products
            for product in products:
                product.track_writes()
            operands = [product.operands for product in products]
            native = None
            if extension_loads() and (choices := self.sequence_choices) is not None:
                weights, scales, biases = (list(x) for x in zip(*operands, strict=True))
                kind = "lstm" if self.states == 2 else "gru"
                pack = extension.native().Recurrent(
                    kind, self.bidirectional, self.proj_size > 0, weights, scales, biases
                )
                native = (pack, choices)
            # While their memory is kept no other tensor can have their addresses.
            memory = [x.untyped_storage() for group in operands for x in group if x is not None]
            self._packed = (self._stamp(), native, memory)
        return None if self._packed[1] is None else self._packed[1][0]

    def _stamp(self) -> tuple[Any, ...]:
        """Changes when a product's state does."""
        return tuple(product.stamp for product in self.products)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # packed for this CPU only

    @classmethod
    def from_float(cls: type[_Self], rnn: nn.RNNBase) -> _Self:
        """The int8 form of a float ``rnn``."""
        products = {}
        for suffix in _suffixes(rnn.num_layers, rnn.bidirectional):
            for kind in ("ih", "hh"):
                bias = getattr(rnn, f"bias_{kind}{suffix}") if rnn.bias else None
                products[kind + suffix] = _product(getattr(rnn, f"weight_{kind}{suffix}"), bias)
            if rnn.proj_size:
                products["hr" + suffix] = _product(getattr(rnn, f"weight_hr{suffix}"), None)
        found = cls(products, batch_first=rnn.batch_first, dropout=rnn.dropout)
        carry_attributes(rnn, found)
        return found.train(rnn.training)

    def flatten_parameters(self) -> None:
        """Nothing to do: products are packed when they are first used."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As ``nn.LSTM`` or ``nn.GRU``: the states of the last layer at all steps, and the last."""
        if self._converts(input.data):
            return in_float_type(self.forward(*in_float32((input, hx))), input.data.dtype)
        if isinstance(input, PackedSequence):
            data, sizes = input.data, input.batch_sizes.tolist()
            initial = self._initial(hx, sizes[0], input.sorted_indices, batched=True)
            out, last = self._layers(data, sizes, initial)
            packed = PackedSequence(
                out, input.batch_sizes, input.sorted_indices, input.unsorted_indices
            )
            order = input.unsorted_indices
            return packed, self._final([x if order is None else x[:, order] for x in last], True)
        batched = input.dim() == 3
        if input.dim() not in (2, 3):
            raise InvalidInputError(f"expected input of 2 or 3 dimensions, got {input.dim()}")
        x = input if batched else input.unsqueeze(1)
        if batched and self.batch_first:
            x = x.transpose(0, 1)
        steps, sequences = x.shape[:2]
        if steps == 0:
            raise InvalidInputError("expected a sequence of at least one step")
        initial = self._initial(hx, sequences, None, batched)
        out, last = self._layers(x.flatten(0, 1), [sequences] * steps, initial)
        out = out.reshape(steps, sequences, out.shape[-1])
        if not batched:
            return out.squeeze(1), self._final([state.squeeze(1) for state in last], False)
        return (out.transpose(0, 1) if self.batch_first else out), self._final(last, True)

    def _layers(
        self, data: torch.Tensor, sizes: list[int], initial: _States
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The results of all layers, and the last states, layer by layer and direction."""
        if data.shape[-1] != self.input_size:
            raise InvalidInputError(
                f"expected {self.input_size} features in the input, got {data.shape[-1]}"
            )
        plain = all(map(is_plain, (data, *initial))) and not (self.dropout and self.training)
        if plain and (native := self._native()) is not None:
            found = native.run(data.detach(), sizes, [x.detach() for x in initial])
            if any(map(asks_for_gradient, (data, *initial))):
                found = without_gradient(found, type(self).__name__, data, *initial)
            out, *states = found
            return out, states
        last: list[_States] = []
        directions = ("", "_reverse") if self.bidirectional else ("",)
        for layer in range(self.num_layers):
            if layer and self.dropout:
                data = F.dropout(data, self.dropout, self.training)
            outs = []
            for direction in directions:
                states = tuple(state[len(last)] for state in initial)
                out, end = self._steps(f"_l{layer}{direction}", data, sizes, states)
                outs.append(out)
                last.append(end)
            data = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
        return data, [torch.stack(kind) for kind in zip(*last, strict=True)]

    def _steps(
        self, suffix: str, data: torch.Tensor, sizes: list[int], states: _States
    ) -> tuple[torch.Tensor, _States]:
        """One direction of one layer: its states at all steps, and the last ones."""
        gates = self._modules["ih" + suffix](data)  # type: ignore[misc]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + size)
        backward = suffix.endswith("_reverse")
        order = range(len(sizes) - 1, -1, -1) if backward else range(len(sizes))
        outs: list[torch.Tensor] = [data] * len(sizes)
        for t in order:
            mine = gates[offsets[t] : offsets[t + 1]]
            rows = sizes[t]
            if rows == len(states[0]):
                states = self._step(mine, states, suffix)
                outs[t] = states[0]
                continue
            # The other sequences are over, or going backward have not begun.
            new = self._step(mine, tuple(state[:rows] for state in states), suffix)
            outs[t] = new[0]
            states = tuple(torch.cat([x, old[rows:]]) for x, old in zip(new, states, strict=True))
        return torch.cat(outs), states

    def _step(self, gates: torch.Tensor, states: _States, suffix: str) -> _States:
        raise NotImplementedError

    def _initial(
        self, hx: Any, sequences: int, order: torch.Tensor | None, batched: bool
    ) -> _States:
        """The initial states, each [layers × directions, sequences, units], in the data's order."""
        count = self.num_layers * (2 if self.bidirectional else 1)
        widths = (self.proj_size or self.hidden_size, self.hidden_size)[: self.states]
        shapes = [(count, sequences, width) for width in widths]
        if hx is None:
            return tuple(torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in shapes)
        given = (hx,) if self.states == 1 else tuple(hx)
        if not batched:
            given = tuple(x.unsqueeze(1) if x.dim() == 2 else x for x in given)
        if [tuple(x.shape) for x in given] != shapes:
            raise InvalidInputError(
                f"expected initial states of shapes {shapes}, got {[tuple(x.shape) for x in given]}"
            )
        return given if order is None else tuple(x[:, order] for x in given)

    def _final(self, states: Sequence[torch.Tensor], batched: bool) -> Any:
        return states[0] if self.states == 1 else tuple(states)

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        text = f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"
        for name in ("batch_first", "bidirectional", "proj_size"):
            if value := getattr(self, name):
                text += f", {name}={value}"
        return text


class DynamicLSTM(DynamicRecurrent):
    """``nn.LSTM`` with int8 products."""

    gates, states = 4, 2

    def _step(self, gates: torch.Tensor, states: _States, suffix: str) -> _States:
        hidden, project = self._modules["hh" + suffix], self._modules.get("hr" + suffix)
        return _lstm_step(gates, states, hidden, project)


class DynamicGRU(DynamicRecurrent):
    """``nn.GRU`` with int8 products; the reset gate comes after the product, as in torch."""

    gates, states = 3, 1

    def _step(self, gates: torch.Tensor, states: _States, suffix: str) -> _States:
        return (_gru_step(gates, states[0], self._modules["hh" + suffix]),)


def _lstm_step(
    gates: torch.Tensor,
    states: _States,
    hidden: Callable[[torch.Tensor], torch.Tensor] | None,
    project: Callable[[torch.Tensor], torch.Tensor] | None,
) -> _States:
    assert hidden is not None
    h, c = states
    units = c.shape[1]
    summed = hidden(h) + gates
    squashed = torch.sigmoid(summed)
    fresh = torch.tanh(summed[:, 2 * units : 3 * units])
    c = torch.addcmul(squashed[:, units : 2 * units] * c, squashed[:, :units], fresh)
    h = squashed[:, 3 * units :] * torch.tanh(c)
    return (h if project is None else project(h)), c


def _gru_step(
    gates: torch.Tensor,
    h: torch.Tensor,
    hidden: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    assert hidden is not None
    units = h.shape[1]
    share = hidden(h)
    reset, update = torch.sigmoid(gates[:, : 2 * units] + share[:, : 2 * units]).chunk(2, 1)
    # The reset gate comes after the product: torch's GRU is not the paper's.
    fresh = torch.tanh(torch.addcmul(gates[:, 2 * units :], reset, share[:, 2 * units :]))
    return torch.lerp(fresh, h, update)


class DynamicCell(_WithProducts):
    """What the two kinds of cell share.

    Attributes:
        ih, hh: the products of the input and of the state.
    """

    gates: ClassVar[int]

    def __init__(self, ih: DynamicLinear, hh: DynamicLinear) -> None:
        super().__init__()
        self.ih, self.hh = ih, hh
        self.input_size, self.hidden_size = ih.in_features, hh.in_features
        self.bias = hh.bias is not None
        self.eval()

    @classmethod
    def from_float(cls, cell: nn.RNNCellBase) -> DynamicCell:
        """The int8 form of a float ``cell``."""
        found = cls(_product(cell.weight_ih, cell.bias_ih), _product(cell.weight_hh, cell.bias_hh))
        carry_attributes(cell, found)
        return found.train(cell.training)

    def _gates(self, input: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The input's share of the gates, and whether the input is a batch."""
        if input.dim() not in (1, 2):
            raise InvalidInputError(f"expected input of 1 or 2 dimensions, got {input.dim()}")
        batched = input.dim() == 2
        return self.ih(input if batched else input.unsqueeze(0)), batched

    def _state(self, state: torch.Tensor | None, rows: int) -> torch.Tensor:
        if state is None:
            return torch.zeros(rows, self.hidden_size, dtype=torch.float32, device="cpu")
        found = state if state.dim() == 2 else state.unsqueeze(0)
        if tuple(found.shape) != (rows, self.hidden_size):
            raise InvalidInputError(
                f"expected a state of shape {(rows, self.hidden_size)}, got {tuple(found.shape)}"
            )
        return found

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"{self.input_size}, {self.hidden_size}"


class DynamicLSTMCell(DynamicCell):
    """``nn.LSTMCell`` with int8 products."""

    gates = 4

    def forward(
        self, input: torch.Tensor, hx: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``nn.LSTMCell``: the new h and c."""
        if self._converts(input):
            h, c = self.forward(*in_float32((input, hx)))
            return h.to(input.dtype), c.to(input.dtype)
        gates, batched = self._gates(input)
        h, c = (self._state(x, gates.shape[0]) for x in (hx or (None, None)))
        h, c = _lstm_step(gates, (h, c), self.hh, None)
        return (h, c) if batched else (h.squeeze(0), c.squeeze(0))


class DynamicGRUCell(DynamicCell):
    """``nn.GRUCell`` with int8 products."""

    gates = 3

    def forward(self, input: torch.Tensor, hx: torch.Tensor | None = None) -> torch.Tensor:
        """As ``nn.GRUCell``: the new state."""
        if self._converts(input):
            return self.forward(*in_float32((input, hx))).to(input.dtype)
        gates, batched = self._gates(input)
        h = self._state(hx, gates.shape[0])
        h = _gru_step(gates, h, self.hh)
        return h if batched else h.squeeze(0)


def takes_sequences(module: nn.Module) -> bool:
    """Whether ``module`` is a recurrent layer, in float or int8: one call runs all of its steps."""
    return isinstance(module, nn.RNNBase | DynamicRecurrent)


def _suffixes(layers: int, bidirectional: bool) -> list[str]:
    directions = ("", "_reverse") if bidirectional else ("",)
    return [f"_l{layer}{direction}" for layer in range(layers) for direction in directions]


#: The int8 form of each float module.
RECURRENT: dict[type[nn.Module], type[DynamicRecurrent | DynamicCell]] = {
    nn.LSTM: DynamicLSTM,
    nn.GRU: DynamicGRU,
    nn.LSTMCell: DynamicLSTMCell,
    nn.GRUCell: DynamicGRUCell,
}

"""Linears for float models: int8 weights, and activations quantized row by row as they come.

    fast = x86quant.to_dynamic(model)      # every nn.Linear and nn.MultiheadAttention it can take

Nothing is calibrated. ``DynamicLinear`` multiplies in int8; ``WeightOnlyLinear`` keeps the
activations in float and saves memory traffic only. The numerics are those of
``torch.ops.x86quant.linear_dynamic`` and ``linear_weight_only``.

Code around a layer may read its attributes. Those of the float layer are still there: ``weight`` is
a float32 tensor that is computed when its values are needed, see ``weight_on_demand``.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils import _pytree as pytree

from x86quant.dynamic.group_weights import quantized
from x86quant.dynamic.weight_on_demand import WeightOnDemand
from x86quant.errors import InvalidInputError
from x86quant.ops.dynamic import check_activation, check_operands, check_weight
from x86quant.ops.float_type import Int8Module, asks_for_gradient, without_gradient
from x86quant.ops.groups import real_weight
from x86quant.packing import linear_dynamic as linear_packs
from x86quant.routing.routes import Choice, Routes
from x86quant.weight_form import bits_of, features_of, has_groups

_Self = TypeVar("_Self", bound="Int8Linear")


def float_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of a layer's bias that is no parameter."""
    return None if bias is None else bias.detach().to(torch.float32).clone()


def carry_attributes(old: nn.Module, new: nn.Module) -> None:
    """Give ``new`` the plain attributes that ``old`` has and it lacks: parents may read them.

    What may hold float weights is left behind.
    """
    for name, value in vars(old).items():
        plain = all(isinstance(x, _PLAIN) for x in pytree.tree_leaves(value))
        if not name.startswith("_") and plain and not hasattr(new, name):
            setattr(new, name, value)


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is the linear that Hugging Face calls Conv1D: its weight is [in, out]."""
    return _full_name(type(module)) == "transformers.pytorch_utils.Conv1D"


def weight_of(linear: nn.Module) -> torch.Tensor:
    """The float weight [out_features, in_features] of a linear, however it keeps it."""
    weight = linear.get_parameter("weight")
    return weight.t() if is_conv1d(linear) else weight


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_plain(x: torch.Tensor) -> bool:
    """Whether ``x`` is memory and nobody watches: tracers and modes want the op, not its kernel."""
    return (
        type(x) is torch.Tensor
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and not torch._C._len_torch_dispatch_stack()
        and not x.is_neg()
    )


class Int8Linear(Int8Module):
    """What the two kinds of linear share: unpacked weights of 8 or 4 bits as state.

    Attributes:
        int8_weight: int8 [out_features, in_features]; of 4 bits uint8 [out_features,
            in_features / 2], two codes a byte.
        weight_scale: float32 [out_features]; or scales of groups of input features, as
            ``x86quant/ops/groups.py`` says.
        bias: float32 [out_features], or None.
        activation: "relu", "gelu", "gelu_tanh" or "silu", applied to the result; or None.
        transposed: whether the float layer kept its weight as [in_features, out_features], so that
            this is what ``weight`` has to look like.
    """

    int8_weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None
    op: ClassVar[str]

    def __init__(
        self,
        int8_weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        check_activation(self.op, activation)
        self.register_buffer("int8_weight", int8_weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)
        self.activation = activation
        self.transposed = transposed
        self.eval()

    @classmethod
    def from_float(
        cls: type[_Self],
        linear: nn.Module,
        activation: str | None = None,
        bits: int = 8,
        operands: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> _Self:
        """The form of a float ``linear`` in ``bits``, with ``activation`` fused behind it.

        ``linear`` is an ``nn.Linear``, or the layer that Hugging Face calls Conv1D. Weights that no
        group divides have 8 bits. ``operands`` are codes and scales to be taken as they are.
        """
        if operands is None:
            operands = quantized(weight_of(linear), bits)
        bias = float_bias(linear.bias)  # type: ignore[arg-type]
        found = cls(*operands, bias, activation, is_conv1d(linear))
        carry_attributes(linear, found)
        return found

    @property
    def weight(self) -> torch.Tensor:
        """The float weight that the codes stand for; no memory is used until it is read."""
        if torch.compiler.is_compiling():  # a traced graph drops what it does not use
            return self._float_weight()
        shape = (self.out_features, self.in_features)
        product = None if self.transposed else self._product
        return WeightOnDemand(
            shape[::-1] if self.transposed else shape,
            self.int8_weight.device,
            self._float_weight,
            product,
            self._float_type,
        )

    def _float_weight(self) -> torch.Tensor:
        real = real_weight(self.int8_weight, self.weight_scale).to(self._float_type)
        return real.t() if self.transposed else real

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` times the weight alone."""
        op = getattr(torch.ops.x86quant, self.op)
        out: torch.Tensor = op(x, self.int8_weight, self.weight_scale)
        return out

    @property
    def in_features(self) -> int:
        """Size of an input row."""
        return features_of(self.int8_weight)

    @property
    def bits(self) -> int:
        """Bits of a weight's code."""
        return bits_of(self.int8_weight)

    @property
    def out_features(self) -> int:
        """Size of an output row."""
        return self.int8_weight.shape[0]

    @property
    def nx(self) -> int:
        """As Hugging Face's Conv1D calls ``in_features``."""
        return self.in_features

    @property
    def nf(self) -> int:
        """As Hugging Face's Conv1D calls ``out_features``."""
        return self.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., in_features] to [..., out_features]."""
        return self.activated(x, self.activation)

    def activated(self, x: torch.Tensor, activation: str | None) -> torch.Tensor:
        """The result for ``x`` with this ``activation`` instead of the layer's own."""
        if self._converts(x):
            return self.activated(x.float(), activation).to(x.dtype)
        op = getattr(torch.ops.x86quant, self.op)
        out: torch.Tensor = op(x, self.int8_weight, self.weight_scale, self.bias, activation)
        return without_gradient(out, type(self).__name__, x) if asks_for_gradient(x) else out

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={self.bias is not None}"
        if has_groups(self.weight_scale):
            text += f", bits={self.bits}, group={self.in_features // self.weight_scale.shape[1]}"
        return text if self.activation is None else f"{text}, activation={self.activation}"


class DynamicLinear(Int8Linear):
    """A linear in int8 whose input is quantized row by row.

    Its weight is packed for the kernel the rules choose at the first call, and again when the
    state changes. ``repr`` and ``x86quant.explain`` name the kernel.
    """

    op = "linear_dynamic"

    def __init__(
        self,
        int8_weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__(int8_weight, weight_scale, bias, activation, transposed)
        #: By activation: what changes when the pack is out of date, the pack, and its memory.
        self._packed: dict[str | None, tuple[Any, Any, Any]] = {}

    def activated(self, x: torch.Tensor, activation: str | None) -> torch.Tensor:
        """The result for ``x`` with this ``activation`` instead of the layer's own."""
        if is_plain(x) and not self._converts(x):
            pack = self.pack(activation)
            if pack is not None:
                try:
                    out: torch.Tensor = pack.run(x)
                except (RuntimeError, ValueError):
                    operands = (self.int8_weight, self.weight_scale, self.bias)
                    check_operands(self.op, x, *operands, activation)
                    raise
                if asks_for_gradient(x):
                    out = without_gradient(out, type(self).__name__, x)
                return out
        return super().activated(x, activation)

    def pack(self, activation: str | None = None) -> Any | None:
        """The weight packed with ``activation``; None where the extension is missing."""
        tensors, now = self._state()
        known = self._packed.get(activation)
        if known is None or known[0] != now:
            self.track_writes()
            tensors, now = self._state()
            check_weight(self.op, *tensors)
            pack = linear_packs.pack_linear_dynamic(*tensors, activation)
            # While their memory is kept no other tensor can have their addresses.
            memory = [x.untyped_storage() for x in tensors if x is not None]
            known = self._packed[activation] = (now, pack, memory)
        return known[1]

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What is packed: the int8 weight, its scales and the bias."""
        return self._state()[0]

    @property
    def stamp(self) -> Any:
        """Changes when an operand is replaced or written to."""
        return self._state()[1]

    def track_writes(self) -> None:
        """Make sure that ``stamp`` changes with every write to an operand."""
        linear_packs.track_writes(self._buffers)

    def pack_again(self) -> None:
        """Let the weight be packed again at the next call, by the rules that are in force then."""
        self._packed = {}
        linear_packs.forget_packs([self.int8_weight])

    def _state(self) -> tuple[tuple[Any, Any, Any], Any]:
        """The tensors that are packed, and what changes when a pack of them is out of date."""
        state: dict[str, Any] = self._buffers  # attribute look-ups of a module are slow
        tensors = (state["int8_weight"], state["weight_scale"], state["bias"])
        return tensors, linear_packs.stamp(*tensors)

    @property
    def routes(self) -> Routes:
        """The kernels that run it: what is packed, else what would be packed now."""
        for stamp, pack, _ in self._packed.values():
            if pack is not None and stamp == self._state()[1]:
                return Routes.from_json(pack.record())
        return linear_packs.choose_linear_dynamic(*self.operands, self.activation)

    @property
    def choices(self) -> tuple[tuple[int | None, Choice], ...]:
        """The kernels that run it: each with the rows up to which it is used, and why."""
        return self.routes.ranges

    def __getstate__(self) -> dict[str, Any]:
        # Packed weights hold for this CPU and these rules only.
        return {**self.__dict__, "_packed": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_packed": {}})  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        kernels = dict.fromkeys(self.routes.kernels)
        return f"{super().extra_repr()}, kernel={' or '.join(kernels)}"

    def chunk(self, parts: int) -> tuple[DynamicLinear, ...]:
        """Linears that each compute an equal share of the output features; they share memory."""
        each = self.out_features // parts

        def part(x: torch.Tensor, number: int) -> torch.Tensor:
            return x[number * each : (number + 1) * each]  # which torch.export keeps as one op

        return tuple(
            DynamicLinear(
                part(self.int8_weight, number),
                part(self.weight_scale, number),
                None if self.bias is None else part(self.bias, number),
                self.activation,
            )
            for number in range(parts)
        )


class Int8Sequential(nn.Sequential):
    """A sequence of layers that computes each ReLU as one with the int8 linear before it.

    It does so when it is called itself: whoever reads its layers one by one finds them as they are.
    """

    def forward(self, input: Any) -> Any:
        """As ``nn.Sequential`` does, with the same results."""
        if type(input) is not torch.Tensor or not is_plain(input):
            return super().forward(input)  # type: ignore[no-untyped-call]
        layers = [*self._modules.values()]
        behind = [*layers[1:], None]
        fused = False
        for layer, after in zip(layers, behind, strict=True):
            if fused:
                fused = False
                continue
            fused = (
                type(after) is nn.ReLU
                and isinstance(layer, Int8Linear)
                and layer.activation is None
                and not (has_hooks(layer) or has_hooks(after))
            )
            input = layer.activated(input, "relu") if fused else layer(input)  # type: ignore
        return input


def has_hooks(module: nn.Module) -> bool:
    """Whether something is to be called before or after each call of ``module``."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


class WeightOnlyLinear(Int8Linear):
    """A linear with int8 weights and float arithmetic: for memory-bound layers."""

    op = "linear_weight_only"


class WeightOnlyEmbedding(Int8Module):
    """An embedding table in 8 or 4 bits; what is looked up is float.

    Attributes:
        int8_weight: int8 [num_embeddings, embedding_dim], or of 4 bits as in ``Int8Linear``.
        weight_scale: float32 [num_embeddings], or scales of groups.
        name: what the table is called in errors.
    """

    int8_weight: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(
        self, int8_weight: torch.Tensor, weight_scale: torch.Tensor, name: str = ""
    ) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("int8_weight", int8_weight)
        self.register_buffer("weight_scale", weight_scale)

    @classmethod
    def from_float(
        cls, embedding: nn.Embedding, name: str = "", bits: int = 8
    ) -> WeightOnlyEmbedding:
        """The form of a float ``embedding`` in ``bits``."""
        found = cls(*quantized(embedding.weight, bits), name)
        carry_attributes(embedding, found)
        return found

    @property
    def weight(self) -> torch.Tensor:
        """The float table that the codes stand for; no memory is used until it is read."""
        if torch.compiler.is_compiling():
            return self._float_weight()
        shape = (self.num_embeddings, self.embedding_dim)
        device = self.int8_weight.device
        return WeightOnDemand(shape, device, self._float_weight, self._product, self._float_type)

    def _float_weight(self) -> torch.Tensor:
        return real_weight(self.int8_weight, self.weight_scale).to(self._float_type)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` times the table: a linear that is tied to it."""
        out: torch.Tensor = torch.ops.x86quant.linear_dynamic(
            x, self.int8_weight, self.weight_scale
        )
        return out

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.int8_weight.shape[0]

    @property
    def embedding_dim(self) -> int:
        """Size of a row."""
        return features_of(self.int8_weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the table for ``ids`` of any shape."""
        try:
            codes = F.embedding(ids, self.int8_weight)
        except IndexError as error:
            wrong = (ids < 0) | (ids >= self.num_embeddings)
            at = tuple(wrong.nonzero()[0].tolist())
            table = self.name or f"of {self.num_embeddings} rows"
            raise InvalidInputError(
                f"the table {table}: index {int(ids[at])} at position {at} is not in "
                f"0..{self.num_embeddings - 1}"
            ) from error
        if not has_groups(self.weight_scale):
            return (codes * F.embedding(ids, self.weight_scale.unsqueeze(1))).to(self._float_type)
        scales = F.embedding(ids, self.weight_scale.flatten(1))
        scales = scales.reshape(-1, *self.weight_scale.shape[1:])
        rows = real_weight(codes.reshape(-1, codes.shape[-1]), scales)
        return rows.reshape(*ids.shape, self.embedding_dim).to(self._float_type)

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class HalfEmbedding(Int8Module):
    """An embedding table that stays in the 16 bits of a file; what is looked up is float32.

    A row at a time becomes float32, where the whole table would take twice the memory.

    Attributes:
        weight: float16 or bfloat16 [num_embeddings, embedding_dim].
    """

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.weight.shape[0]

    @property
    def embedding_dim(self) -> int:
        """Size of a row."""
        return self.weight.shape[1]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the table for ``ids`` of any shape."""
        return F.embedding(ids, self.weight).to(self._float_type)

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.weight.dtype}"

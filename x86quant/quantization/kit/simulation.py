"""Int8 as float arithmetic sees it: rounding weights and activations, layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Interpreter, Node

from x86quant.calling.call import Call
from x86quant.calling.running import hand_over_hooks
from x86quant.compiled import CompiledModule
from x86quant.compiled.shown_class import ShowsClass
from x86quant.lowering.float_forms import recurrent_graph
from x86quant.lowering.rounded import FusedLayer
from x86quant.lowering.tensor_memory import SeenTensors, tensors_of
from x86quant.observing.native_floats import rounded
from x86quant.quantization.static.conversion import rounded_recurrent
from x86quant.quantization.static.static_part import Chosen, StaticPart, is_weighted
from x86quant.quantization.tracing.recurrent_layers import is_recurrent_layer

#: How many forms of a recurrent layer are kept: ranges and weights change from trial to trial.
_KEPT = 4


def fake_activation(
    observer: Any, x: torch.Tensor, chosen: Chosen | None = None, *, in_place: bool = False
) -> torch.Tensor:
    """``x`` rounded and clipped the way ``observer`` says, or as was ``chosen`` earlier.

    The same bits as ``torch.fake_quantize_per_tensor_affine`` in a fraction of the time: that goes
    value by value, and computes what gradients would need, too.
    """
    scale, zero_point = _known(observer, chosen)
    step, zero = scale.to(torch.float32).reshape(()), int(zero_point)
    low, high = int(observer.quant_min) - zero, int(observer.quant_max) - zero
    return rounded(x, float(step.reciprocal()), low, high, float(step), in_place=in_place)


def _known(observer: Any, chosen: Chosen | None) -> Any:
    """The scale and zero point of ``observer``, or those that were chosen earlier.

    These were chosen before ranges were stretched, which has used no data that came later.
    """
    known = None if chosen is None else chosen.get(observer)
    if known is None:
        return observer.calculate_qparams()
    scale, zero_point = known
    return scale * getattr(observer, "stretch", 1.0), zero_point


def rounded_copy(part: StaticPart, node: Node) -> nn.Module:
    """The layer that ``node`` calls, without what is fused behind it, with a rounded weight."""
    module = part.module(node)
    assert module is not None
    return part.rounded_layer(node, module).layer


def along_channels(values: torch.Tensor, layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """``values``, one for each output channel of ``layer``, shaped to go with its result ``y``."""
    dims = 0 if isinstance(layer, nn.Linear) else len(layer.kernel_size)  # type: ignore[arg-type]
    return values.to(y.dtype).view(-1, *(1,) * dims)


@contextlib.contextmanager
def simulated(
    model: nn.Module,
    layers: Mapping[StaticPart, Collection[str]],
    *,
    held_back: bool = False,
    known: FloatValues | None = None,
) -> Iterator[nn.Module]:
    """``model``, in which the layers named of each part compute as if they were int8.

    With ``held_back`` the ranges are those that were known before the last calls were calibrated.
    With ``known`` all calls are one and the same, and what no named layer touches is kept there.
    """
    swapped = {
        part.path: SimulatedPart(part, names, model.get_submodule(part.path), held_back, known)
        for part, names in layers.items()
    }
    if "" in swapped:
        yield swapped[""]
        return
    before = {path: model.get_submodule(path) for path in swapped}
    try:
        for path, part in swapped.items():
            model.set_submodule(path, part)
        yield model
    finally:
        for path, original in before.items():
            model.set_submodule(path, original)


class FloatValues:
    """What each node of a graph is in float, in one call of a model that is one part throughout.

    Layers that are tried one by one then need only what comes behind them.
    """

    def __init__(self) -> None:
        self._values: dict[StaticPart, dict[str, Any] | None] = {}
        self._seen: dict[StaticPart, SeenTensors] = {}

    def of(self, part: StaticPart, call: Call) -> dict[str, Any] | None:
        """The values by name of node; None where they are not kept."""
        if part not in self._values:
            values = _Keeping(part).values_of(call) if part.path == "" else None
            self._values[part] = values
            if values is not None:
                self._seen[part] = SeenTensors(tensors_of(list(values.values())))
        return self._values[part]

    def check(self, part: StaticPart) -> None:
        """Forget values that a run wrote to."""
        if not self._seen[part].are_unwritten():
            del self._values[part]


class SimulatedPart(ShowsClass):
    """A part in float, except that some layers compute as if they were int8."""

    def __init__(
        self,
        part: StaticPart,
        layers: Collection[str],
        original: nn.Module,
        held_back: bool = False,
        known: FloatValues | None = None,
    ) -> None:
        super().__init__()
        self._part = part
        self.__dict__["_known"] = known
        on = {x.node.name for x in part.layers if x.name in layers}
        self._run = Simulation(part, on, part.chosen_before if held_back else None)
        self.__dict__["_original"] = original
        hand_over_hooks(original, self)
        self.show_class_of(original)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The part's result."""
        call = self._part.inputs(Call(args, kwargs))
        if call is None:
            return self.__dict__["_original"].forward(*args, **kwargs)
        known = self.__dict__["_known"]
        values = None if known is None else known.of(self._part, call)
        with torch.no_grad():
            if values is None:
                return self._part.traced.results.fill(self._run.run(*call.args))
            result = self._run.run(*call.args, initial_env=self._run.untouched(values))
            known.check(self._part)
            return self._part.traced.results.fill(result)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


class Simulation(Interpreter):
    """Runs a part in float, except that the nodes named ``on`` compute as if they were int8."""

    def __init__(self, part: StaticPart, on: set[str], chosen: Chosen | None) -> None:
        # torch looks through all modules to make one; a layer alone takes not much longer to run.
        self.__dict__.update(vars(part.interpreter))
        self._part, self._on, self._chosen = part, on, chosen
        in_float = [layer.name for layer in part.layers if layer.node.name not in on]
        self._corrections = part.corrections_with(in_float)

    def fetch_attr(self, target: str) -> Any:
        """As torch finds it, once for all runs: it asks every module on the way twice."""
        if target not in self._part.attributes:
            self._part.attributes[target] = super().fetch_attr(target)
        return self._part.attributes[target]

    def untouched(self, values: Mapping[str, Any]) -> dict[Node, Any]:
        """Those of ``values`` that no layer in int8 has a part in."""
        touched: set[Node] = set()
        for node in self.graph.nodes:
            if node.name in self._on or node.op == "output" or touched & set(node.all_input_nodes):
                touched.add(node)
        return {node: values[node.name] for node in self.graph.nodes if node not in touched}

    def run_node(self, n: Node) -> Any:
        """The value of ``n``."""
        if n.name not in self._on:
            return super().run_node(n)
        node = self._part.nodes[n.name]
        observer = self._part.output_observer(node)
        assert observer is not None
        if is_recurrent_layer(self._part.module(node)):
            return self._compute(n, node)  # whose states are rounded
        if self._part.gives_floats(node):
            return self._compute(n, node)
        own = is_weighted(self._part.module(node))  # nobody else has seen it
        return self.rounded(observer, self._compute(n, node), in_place=own)

    def rounded(self, observer: Any, x: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """``x`` as the codes of ``observer`` say it."""
        return fake_activation(observer, x, self._chosen, in_place=in_place)

    def product(self, node: Node, x: torch.Tensor) -> torch.Tensor:
        """What the convolution or linear that ``node`` calls makes of ``x``, its bias corrected."""
        layer = rounded_copy(self._part, node)
        y: torch.Tensor = layer(x)
        if (correction := self._corrections.get(str(node.target))) is not None:
            y = y.sub_(along_channels(correction, layer, y))
        return y

    def _compute(self, n: Node, node: Node) -> Any:
        """The value of a layer whose input and weight are rounded."""
        module = self._part.module(node)
        if is_recurrent_layer(module):
            given = dict(zip("xhc", self.fetch_args_kwargs_from_env(n)[0], strict=False))
            given = {name: value for name, value in given.items() if value is not None}
            return self._native_recurrent(node, [*given][1:])(**given)
        if not is_weighted(module):
            return super().run_node(n)
        y = self.product(node, self.rounded_input(n))
        called = self.fetch_attr(str(n.target))
        return called.behind(y) if isinstance(called, FusedLayer) else y

    def _native_recurrent(self, node: Node, states: Sequence[str]) -> CompiledModule:
        """The recurrent layer that ``node`` calls: in plain torch it takes most of the time."""
        module = self._part.module(node)
        around = (self._part.observer_of(node.args[0]), self._part.output_observer(node))
        of_x, of_h = (
            (float(scale), int(zp)) for scale, zp in (_known(x, self._chosen) for x in around)
        )
        assert module is not None
        products = self._part.rounded_products(node, module)
        made = self._part.native_recurrent.setdefault(node.name, [])
        for weights, asked, known in made:
            if weights is products and asked == (of_x, of_h, states):
                return known
        layer = rounded_recurrent(module, products, of_x, of_h)
        found = CompiledModule(recurrent_graph(layer, states))
        made.insert(0, (products, (of_x, of_h, states), found))
        del made[_KEPT:]
        return found

    def rounded_input(self, n: Node) -> torch.Tensor:
        """What the convolution or linear that ``n`` calls gets, as its codes say it."""
        source = n.all_input_nodes[0]
        x: torch.Tensor = self.env[source]
        before = self._part.observer_of(self._part.nodes[n.name].args[0])
        if before is None or self._is_rounded(source, before):
            return x
        return self.rounded(before, x)

    def _is_rounded(self, source: Node, observer: Any) -> bool:
        """Whether the value of ``source`` is one that ``observer`` rounds to itself."""
        return (
            source.name in self._on
            and self._part.output_observer(self._part.nodes[source.name]) is observer
        )


class _Keeping(Simulation):
    """A run in float that keeps every value."""

    def __init__(self, part: StaticPart) -> None:
        super().__init__(part, set(), None)
        self._found: dict[str, Any] = {}
        self._seen: list[SeenTensors] = []

    def values_of(self, call: Call) -> dict[str, Any] | None:
        """The values by name; None where a node writes to another's, or may unseen."""
        with torch.no_grad():
            self.run(*call.args)
        return self._found if all(x.are_unwritten() for x in self._seen) else None

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            self._found[n.name] = value
            self._seen.append(SeenTensors(tensors_of(value)))
        return value

"""``explain(model)``: which kernel runs each layer, which rule chose it, and why."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from x86quant import extension
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.compiled.block_graphs import blocks_of
from x86quant.compiled.compiled_parts import as_graph_call, whole_graph
from x86quant.dynamic import (
    DynamicLinear,
    DynamicMultiheadAttention,
    DynamicRecurrent,
    QuantizedTable,
    WeightOnlyEmbedding,
    WeightOnlyEmbeddingBag,
    WeightOnlyLinear,
)
from x86quant.errors import CpuTooOldError
from x86quant.hardware.cpu import cpu
from x86quant.lowering.passes import Report
from x86quant.profiling.recorder import record
from x86quant.profiling.run_step import Elided, RunStep, within
from x86quant.routing.in_force import current_rules
from x86quant.routing.routes import Routes
from x86quant.stock.pack_sites import PackSite, pack_sites
from x86quant.tables.likeness import likeness
from x86quant.terminal.text_table import text_table
from x86quant.weight_form import bits_of, features_of

_STOCK_CLASSES = {"Onednn": "onednn", "Qnnp": "qnnpack", "Packed": "fbgemm"}
_NOT_ROUTED = (
    "packed by the stock engine: before enable(), or in C++ by deepcopy, torch.load or "
    "torch.jit.load; x86quant.reroute(model) routes it"
)
_PLAIN = "the stock library has this fused op for oneDNN packs alone: it runs in plain arithmetic"


@dataclasses.dataclass(frozen=True)
class Instead:
    """What runs a layer in a situation in which its kernel cannot.

    Attributes:
        when: the situation, in words.
        kernel: the kernel that runs it then.
        rule: the rule that chose it.
        reason: why the layer's own kernel cannot.
    """

    when: str
    kernel: str
    rule: str
    reason: str


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """How one layer of a model runs.

    Attributes:
        layer: its name in the model.
        op: "linear", "conv2d", …
        shape: a short description of its shape.
        kernel: the kernel that runs it.
        rule: the rule that chose it, such as ``default#3``; empty when not routed.
        reason: why, in words.
        rows: the row counts this choice is for, such as ``≤ 16``; empty for all.
        steps: the look-up, step by step.
        passed_over: kernels that could not run it, each with its reasons.
        fused: in a compiled model, what it does besides its op, and which pass put it there.
        instead: what runs it where ``kernel`` cannot, found out at each call.
    """

    layer: str
    op: str
    shape: str
    kernel: str
    rule: str
    reason: str
    rows: str = ""
    steps: tuple[str, ...] = ()
    passed_over: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fused: tuple[str, ...] = ()
    instead: tuple[Instead, ...] = ()

    @property
    def routed(self) -> bool:
        """Whether the router chose this kernel."""
        return bool(self.rule)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The choices of a whole model: data, and a table when printed.

    Attributes:
        layers: the choices.
        rules: the table in force, and whether it was measured on a CPU like this one.
    """

    layers: tuple[LayerChoice, ...]
    rules: str = dataclasses.field(default="", kw_only=True)

    def __iter__(self) -> Iterator[LayerChoice]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> LayerChoice:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def to_dicts(self) -> list[dict[str, Any]]:
        """One plain dictionary a choice."""
        return [dataclasses.asdict(layer) for layer in self.layers]

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dicts(), indent=2)

    def __str__(self) -> str:
        if not self.layers:
            return "no packed int8 layers found"
        header = ("layer", "shape", "rows", "kernel", "rule", "reason")
        rows = [(c.layer, c.shape, c.rows, c.kernel, c.rule or "–", c.reason) for c in self.layers]
        if not any(c.rows for c in self.layers):
            header = header[:2] + header[3:]  # type: ignore[assignment]
            rows = [row[:2] + row[3:] for row in rows]  # type: ignore[misc]
        table = text_table(header, rows)
        instead = [
            (c.layer, c.kernel, other.when, other.kernel, other.rule, other.reason)
            for c in self.layers
            for other in c.instead
        ]
        if not instead:
            return _with_rules(table, self.rules)
        others = text_table(("layer", "kernel", "where", "runs", "rule", "because"), instead)
        text = f"{table}\n\nother kernels run where these cannot:\n{others}"
        return _with_rules(text, self.rules)


@dataclasses.dataclass(frozen=True)
class CompiledExplanation(Explanation):
    """What a compiled model runs: a row a step, in order.

    Attributes:
        passes: what each pass of the lowering did.
        elided: nodes for which nothing runs.
    """

    passes: tuple[Report, ...] = ()
    elided: tuple[Elided, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values: "layers", "passes" and "elided"."""
        return {
            "layers": self.to_dicts(),
            "passes": [dataclasses.asdict(report) for report in self.passes],
            "elided": [dataclasses.asdict(node) for node in self.elided],
        }

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        header = ("layer", "op", "shape", "kernel", "rule", "reason", "fused")
        rows = [
            (c.layer, c.op, c.shape, c.kernel, c.rule or "–", c.reason, "; ".join(c.fused))
            for c in self.layers
        ]
        parts = [text_table(header, rows)]
        worked = [report for report in self.passes if report.changed]
        if worked:
            parts.append("passes, and how often each applied:\n" + "\n".join(map(str, worked)))
        if self.elided:
            table = [(e.layer, e.op, e.reason) for e in self.elided]
            parts.append("nothing runs for:\n" + text_table(("layer", "op", "reason"), table))
        return _with_rules("\n\n".join(parts), self.rules)


def explain(
    model: torch.nn.Module,
    inputs: Sequence[Any] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> Explanation:
    """Which kernel runs each layer of ``model``, and why.

    Works for models built by any stock workflow (eager, FX, dynamic, QAT, scripted), for the
    linears that ``to_dynamic`` makes, and for compiled models and parts, of which every step is
    listed, with what was fused into it, and float ops too.

    Args:
        model: the quantized model.
        inputs: what a compiled model is explained for; by default, inputs of the shapes it was
            compiled for. Other models need none.
        kwargs: keyword arguments, which a model loaded from a file may take.
    """
    if inputs is None and not kwargs and (graph := whole_graph(model)) is not None:
        return _explain_compiled(graph, None)
    if (call := as_graph_call(model, inputs or (), kwargs or {})) is not None:
        return _explain_compiled(*call)
    extension.load()
    stock = [choice for site in pack_sites(model) for choice in _explain_site(site)]
    return Explanation((*stock, *_ours(model)), rules=_rules_in_force())


def _rules_in_force() -> str:
    try:
        table = current_rules()
        return f"rules in force: {table.name}, {likeness(table, cpu())}"
    except CpuTooOldError:  # nothing was chosen: models run in plain torch
        return ""


def _with_rules(text: str, rules: str) -> str:
    return f"{text}\n\n{rules}" if rules else text


def explain_pack(kind: str, pack: Any) -> Explanation:
    """The same for one packed object; ``kind`` is "linear", "conv2d" (also conv1d) or "conv3d"."""
    extension.load()
    return Explanation(tuple(_explain_pack("", kind, pack)))


def pack_record(kind: str, pack: Any) -> str:
    """The JSON record of a routed pack, or ``stock:<class>`` for a stock one."""
    extension.need_stock()
    record: str = getattr(torch.ops.x86quant, f"{kind}_record")(pack)
    return record


def cell_parts(pack: Any) -> tuple[Any, Any, torch.Tensor, torch.Tensor, bool]:
    """An RNN layer's parameters: two packed linears, two biases, whether it asks for 7 bits."""
    (_, (bias_ih, bias_hh), _, reduce_range, (packed_ih, packed_hh)), *_ = pack.__getstate__()
    return packed_ih, packed_hh, bias_ih, bias_hh, bool(reduce_range and reduce_range[0])


def _ours(module: torch.nn.Module, path: str = "") -> Iterator[LayerChoice]:
    """Of the linears that ``to_dynamic`` made, and of every step of compiled parts."""
    if isinstance(module, CompiledModule):
        for choice in _explain_compiled(module, None):
            yield dataclasses.replace(choice, layer=within(path, choice.layer))
    elif isinstance(module, GuardedModule):
        yield from _ours(module.compiled, path)
    elif isinstance(module, DynamicLinear):
        yield from _layer_choices(path, module.routes)
    elif isinstance(module, DynamicMultiheadAttention):
        yield from _layer_choices(f"{path}.in_proj".lstrip("."), module.in_proj.routes)
        for name, part in zip(("q", "k", "v"), module.separate_parts, strict=False):
            yield from _layer_choices(f"{path}.in_proj.{name}".lstrip("."), part.routes)
        yield from _layer_choices(f"{path}.out_proj".lstrip("."), module.out_proj.routes)
    elif isinstance(module, DynamicRecurrent) and (choices := module.sequence_choices):
        names = {product: name for name, product in module.named_children()}
        for product, chosen in zip(module.products, choices, strict=True):
            name = f"{path}.{names[product]}".lstrip(".")
            yield from _layer_choices(name, Routes(((None, chosen),)))
    elif isinstance(module, WeightOnlyEmbeddingBag):
        yield from _layer_choices(path, module.routes)
    elif isinstance(module, QuantizedTable):
        shape = f"{module.num_embeddings}×{module.embedding_dim}, {module.bits} bits"
        yield LayerChoice(path, "embedding", shape, "native", "", "the only kernel there is for it")
    elif isinstance(module, WeightOnlyLinear | WeightOnlyEmbedding):
        op = "embedding" if isinstance(module, WeightOnlyEmbedding) else "linear"
        shape = f"{features_of(module.int8_weight)}→{len(module.int8_weight)}"
        bits = bits_of(module.int8_weight)
        reason = f"{'int8' if bits == 8 else '4-bit'} weights, float arithmetic"
        yield LayerChoice(path, op, shape, "native", "", reason)
    elif (blocks := blocks_of(module)) is not None:
        for choice in _explain_compiled(blocks.graphs[0].compiled, None):
            yield dataclasses.replace(choice, layer=within(path, choice.layer))
    else:
        for name, child in module.named_children():
            yield from _ours(child, f"{path}.{name}" if path else name)


def _explain_compiled(
    model: CompiledModule, inputs: Sequence[Any] | None, kwargs: Mapping[str, Any] | None = None
) -> CompiledExplanation:
    steps, elided = record(model, inputs, kwargs)
    choices = tuple(map(_step_choice, steps))
    return CompiledExplanation(choices, model.reports, elided, rules=_rules_in_force())


def _step_choice(step: RunStep) -> LayerChoice:
    choice = step.choice
    return LayerChoice(
        layer=step.layer,
        op=step.op,
        shape=step.shape,
        kernel=step.kernel,
        rule=step.rule,
        reason=step.reason,
        steps=() if choice is None else choice.steps,
        passed_over=() if choice is None else choice.passed_over,
        fused=step.fused,
    )


def _explain_site(site: PackSite) -> Iterator[LayerChoice]:
    if site.kind == "cell":
        packed_ih, packed_hh, *_ = cell_parts(site.pack)
        yield from _explain_pack(f"{site.layer}.ih", "linear", packed_ih)
        yield from _explain_pack(f"{site.layer}.hh", "linear", packed_hh)
    else:
        for choice in _explain_pack(site.layer, site.kind, site.pack, site.takes_codes):
            yield (
                choice
                if not (choice.routed and site.runs_plain)
                else dataclasses.replace(
                    choice, kernel="reference", rule="its op", reason=_PLAIN, instead=()
                )
            )


def _explain_pack(
    layer: str, kind: str, pack: Any, takes_codes: bool = False
) -> Iterator[LayerChoice]:
    record = pack_record(kind, pack)
    if record.startswith("stock:"):
        kernel = next(name for part, name in _STOCK_CLASSES.items() if part in record)
        yield LayerChoice(layer, kind, kind, kernel, "", _NOT_ROUTED)
        return
    yield from _layer_choices(layer, Routes.from_json(record), takes_codes)


def _layer_choices(layer: str, routes: Routes, takes_codes: bool = False) -> Iterator[LayerChoice]:
    """Of every range of rows; ``takes_codes``: no input is quantized as it runs."""
    above = 0
    for number, (limit, choice) in enumerate(routes.ranges):
        yield LayerChoice(
            layer=layer,
            op=choice.spec.op,
            shape=str(choice.spec.replace(rows=None)),
            kernel=choice.kernel,
            rule=choice.rule,
            reason=choice.reason,
            rows=_rows(above, limit) if len(routes.ranges) > 1 else "",
            steps=choice.steps,
            passed_over=choice.passed_over,
            instead=tuple(
                Instead(
                    " and ".join(map(str, situations)),
                    detour.choice.kernel,
                    detour.choice.rule,
                    detour.reason,
                )
                for situations, detour in routes.detours_of(number)
                if not (takes_codes and any(one.kind == "dynamic" for one in situations))
            ),
        )
        above = (limit or 0) + 1


def _rows(above: int, limit: int | None) -> str:
    return f"≥ {above}" if limit is None else f"≤ {limit}" if above == 0 else f"{above}–{limit}"

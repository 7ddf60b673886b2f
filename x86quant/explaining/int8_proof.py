"""Proof that int8 ran: which convolutions and matrix products a model really executed, and how.

    x86quant.assert_int8(model, (x,))                  # raises if any of them ran in float
    x86quant.assert_int8(model, (x,), allow=["head"])  # ... apart from this layer
    print(x86quant.compute_ops(model, (x,)))           # just look

Nothing is inferred from what the model looks like. It runs once, and what runs is seen:

* a module runs under a dispatch mode, which sees every operator that reaches torch's dispatcher;
* a program that ``torch.compile`` or AOTInductor made runs under torch's profiler, for a dispatch
  mode would keep the compiled code from running. An AOTInductor package calls kernels past the
  dispatcher, and tells the profiler of them only if it was built with
  ``inductor_configs={"cpp.enable_kernel_profile": True}``: without that it is refused. Products
  that Inductor generates code for itself are no calls, so none is seen; hence at least one product
  must be seen in int8;
* segments of x86quant's runtime say which steps they run.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import linecache
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.pt2_archive._package import AOTICompiledModel
from torch.fx import GraphModule
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from x86quant.calling.running import OpWatch
from x86quant.compiled import CompiledModule
from x86quant.errors import FloatOpsError, InvalidInputError
from x86quant.lowering.from_export import exported_layer
from x86quant.lowering.graph_tools import label
from x86quant.runtime import segment
from x86quant.runtime.plan import Plan

# Names of operators that multiply matrices or convolve, and their arithmetic. First match counts.
_CLASSES: tuple[tuple[re.Pattern[str], bool], ...] = (
    (
        re.compile(
            r"x86quant::((conv|linear)(_real)?|linear_dynamic|linear_rows(_rows|_norm)?|gated_rows_rows|"
            r"recurrent(_last)?)"
        ),
        True,
    ),
    (
        re.compile(
            r"x86quant::(linear_weight_only|float_conv(_codes)?|(cached_)?attention(_rows)?)"
        ),
        False,
    ),
    (re.compile(r"quantized::(?!.*(pack|embedding)).*(conv|linear|matmul|lstm|gru|rnn).*"), True),
    (re.compile(r"_quantized::(?!.*pack).*(conv|linear).*"), True),
    (re.compile(r"onednn::q(conv|linear)(?!_prepack).*"), True),
    (re.compile(r"aten::(_int_mm|quantized_lstm|quantized_gru|_q(conv|linear)).*"), True),
    (
        re.compile(
            r"aten::(_?convolution\w*|(_?slow_|thnn_)?conv(_?transpose)?\d?d?(_\w+)?|"
            r"conv_(depthwise|transpose|tbc)\w*|mkldnn_\w*(convolution|linear|rnn)\w*|"
            r"_?(add|ba?dd)?b?mm|addmv|addbmm|baddbmm|mv|dot|vdot|inner|tensordot|einsum|"
            r"linear|matmul|bilinear|_?scaled_dot_product\w*|_flash_attention\w*|"
            r"_native_multi_head_attention|_transformer_encoder_layer_fwd|"
            r"_weight_int[48]pack_mm\w*|_scaled_mm|_mkl_linear|lstm\w*|gru\w*|rnn_\w+)(_out)?"
        ),
        False,
    ),
    (re.compile(r"(mkldnn|mkl)::_\w*(conv|linear|rnn)\w*"), False),
)

#: How generated C++ calls aten kernels, and its own, in the profile.
_SHIM = re.compile(r"aoti_torch_(?:cpu_)?(\w+)")
_GENERATED = re.compile(r"aoti_torch_\w+|(\w+_)?cpp_\w+")

#: Frames searched for the layer that called an operator.
_MAX_FRAMES = 200

#: Ops that an error names.
_SHOWN = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ComputeOp:
    """A convolution or matrix product that ran.

    Attributes:
        op: the operator, such as ``aten::convolution``, or the step of the runtime.
        layer: the layer it belongs to; empty where compiled code no longer knows.
        int8: whether it multiplied in int8.
        detail: the kernel, or the shapes of its operands.
    """

    op: str
    layer: str
    int8: bool
    detail: str

    def __str__(self) -> str:
        where = f" in {self.layer}" if self.layer else ""
        return f"{self.op}{where} [{self.detail}]"


@dataclasses.dataclass(frozen=True, slots=True)
class ComputeReport:
    """The convolutions and matrix products of one run, in order.

    Attributes:
        int8: those in int8.
        floats: those in float that were not allowed.
        allowed: those in float that were.
    """

    int8: tuple[ComputeOp, ...]
    floats: tuple[ComputeOp, ...]
    allowed: tuple[ComputeOp, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{len(self.int8)} convolutions and matrix products in int8, "
            f"{len(self.floats) + len(self.allowed)} in float"
        ]
        for kind, ops in (
            ("float", self.floats),
            ("float, allowed", self.allowed),
            ("int8", self.int8),
        ):
            lines += [f"  {kind}: {line}" for line in _counted(ops)]
        return "\n".join(lines)


def _counted(ops: Sequence[ComputeOp]) -> list[str]:
    """``ops`` as text, equal ones once with their number."""
    counts = collections.Counter(map(str, ops))
    return [text if count == 1 else f"{count} × {text}" for text, count in counts.items()]


def assert_int8(
    model: Callable[..., Any] | ExportedProgram,
    inputs: Sequence[Any] | torch.Tensor = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    allow: Sequence[str] = (),
) -> ComputeReport:
    """Run ``model`` on ``inputs`` and raise unless all its heavy arithmetic ran in int8.

    Args:
        model: a compiled, stock-converted, exported or loaded module, the result of
            ``torch.compile``, or a package that AOTInductor made and ``aoti_load_package`` loaded.
        inputs: its positional inputs.
        kwargs: its keyword arguments.
        allow: operators (``aten::bmm``) and layers (``head``) that may run in float; ``*`` and
            ``?`` match as in file names.

    Returns:
        What ran.

    Raises:
        FloatOpsError: a convolution or matrix product ran in float and is not allowed, or none ran
            in int8. An AssertionError, so that it works in tests.
    """
    report = compute_ops(model, inputs, kwargs=kwargs, allow=allow)
    if report.floats:
        lines = _counted(report.floats)
        first = "; ".join(lines[:_SHOWN])
        more = len(lines) - _SHOWN
        raise FloatOpsError(
            f"{len(report.floats)} convolutions or matrix products ran in float: {first}"
            + (f"; and {more} more" if more > 0 else "")
            + ". Quantize these layers, or pass their names in allow=[...]"
        )
    if not report.int8:
        raise FloatOpsError(
            "no convolution or matrix product was seen to run in int8: the model was not "
            "quantized, or its compiler generated code of its own for all of them"
        )
    return report


def compute_ops(
    model: Callable[..., Any] | ExportedProgram,
    inputs: Sequence[Any] | torch.Tensor = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    allow: Sequence[str] = (),
) -> ComputeReport:
    """The convolutions and matrix products that ``model`` executes on ``inputs``."""
    if isinstance(allow, str):
        raise InvalidInputError(f"allow must be a sequence of names; write [{allow!r}]")
    if isinstance(model, ExportedProgram):
        model = model.module()
    arguments = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    with torch.no_grad():
        ran = (_profiled if _is_compiled(model) else _dispatched)(
            model, arguments, dict(kwargs or {})
        )
    floats = [op for op in ran if not op.int8]
    allowed = [op for op in floats if _matches(op, allow)]
    return ComputeReport(
        tuple(op for op in ran if op.int8),
        tuple(op for op in floats if op not in allowed),
        tuple(allowed),
    )


def _matches(op: ComputeOp, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) for p in patterns for name in (op.op, op.layer) if name)


def _arithmetic(name: str) -> bool | None:
    """Whether the operator ``name`` multiplies in int8 (True), in float (False), or not at all."""
    shim = _SHIM.fullmatch(name)
    known = f"aten::{shim[1]}" if shim else name
    return next((int8 for pattern, int8 in _CLASSES if pattern.fullmatch(known)), None)


class _Steps:
    """Collects the products among the native steps that run in this thread."""

    def __init__(self, ran: list[ComputeOp]) -> None:
        self._ran = ran
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        segment.OBSERVERS.append(self._observe)

    def __exit__(self, *_: object) -> None:
        segment.OBSERVERS.remove(self._observe)

    def _observe(self, plan: Plan) -> None:
        if threading.get_ident() != self._thread:
            return
        for step in plan.steps:
            routed = step.choice is not None
            name = step.op if routed else f"x86quant::{step.op}"
            int8 = True if routed else _arithmetic(name)
            if int8 is not None:
                self._ran.append(ComputeOp(name, step.layer or step.name, int8, step.kernel))


# --- modules ---------------------------------------------------------------------------------


def _dispatched(
    model: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[ComputeOp]:
    ran: list[ComputeOp] = []
    with _Steps(ran), _CalledOps(ran, _layer_names(model)):
        model(*inputs, **kwargs)
    return ran


def _layer_names(model: Callable[..., Any]) -> dict[int, str]:
    """The path of each module, by its identity; layers of a compiled model as it was before."""
    names: dict[int, str] = {}
    if not isinstance(model, nn.Module):
        return names
    for name, module in model.named_modules():
        if isinstance(module, CompiledModule):
            for inner, layer in module.graph_module.named_modules(prefix=name):
                names[id(layer)] = inner
        names.setdefault(id(module), name)
    return {key: name for key, name in names.items() if name}


class _CalledOps(OpWatch):
    """Sees each operator, but not what it calls in turn."""

    only_watches = True  # blocks run as they do without it

    def __init__(self, ran: list[ComputeOp], names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ran, self._names = ran, names

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, and note what it was."""
        name = func._schema.name
        int8 = _arithmetic(name)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        # Planning a segment runs ops on tensors without data. And aten multiplies integer
        # matrices too: those are no float fallback.
        if any(x.is_meta for x in tensors) or (
            int8 is False and not any(x.is_floating_point() for x in tensors)
        ):
            int8 = None
        if int8 is not None:
            shapes = " ".join(f"{_short(x.dtype)}{list(x.shape)}" for x in tensors[:2])
            layer = _calling_layer(sys._getframe(1), self._names)
            self._ran.append(ComputeOp(name, layer, int8, shapes))
        return func(*args, **kwargs)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _calling_layer(frame: FrameType | None, names: dict[int, str]) -> str:
    """The innermost layer among the callers: a named module, or a node of a graph."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        owner = frame.f_locals.get("self")
        if isinstance(owner, GraphModule) and frame.f_code.co_filename.startswith("<eval_with"):
            return _node_layer(owner, frame)
        if isinstance(owner, nn.Module) and id(owner) in names:
            return names[id(owner)]
        frame = frame.f_back
    return ""


def _node_layer(gm: GraphModule, frame: FrameType) -> str:
    """The layer of the node that generated code is running: its line assigns the node's name."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    name = line.split("=")[0].split(":")[0].strip()
    node = next((node for node in gm.graph.nodes if node.name == name), None)
    if node is None:
        return name
    if "layer" not in node.meta and (path := exported_layer(node)):
        return path
    return label(node)


# --- compiled programs -----------------------------------------------------------------------


def _is_compiled(model: object) -> bool:
    """Whether torch.compile or AOTInductor made ``model`` or a part of it."""
    if not isinstance(model, nn.Module):
        return True
    return any(
        isinstance(module, torch._dynamo.OptimizedModule)
        or module._compiled_call_impl is not None  # Module.compile()
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def _profiled(
    model: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[ComputeOp]:
    model(*inputs, **kwargs)  # what still has to be compiled is compiled now
    ran: list[ComputeOp] = []
    with _Steps(ran), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        model(*inputs, **kwargs)
    events = profiler.events() or ()
    if isinstance(model, AOTICompiledModel) and not any(
        _GENERATED.fullmatch(e.name) for e in events
    ):
        raise InvalidInputError(
            "this package does not tell the profiler what it runs; build it with "
            'aoti_compile_and_package(..., inductor_configs={"cpp.enable_kernel_profile": True})'
        )
    for event in events:
        int8 = _arithmetic(event.name)
        if int8 is not None and not _within_counted(event):
            shapes = " ".join(str(shape) for shape in event.input_shapes[:2] if shape)
            ran.append(ComputeOp(event.name, "", int8, shapes))
    return ran


def _within_counted(event: Any) -> bool:
    """Whether ``event`` is part of an operator that is counted itself."""
    parent = event.cpu_parent
    while parent is not None:
        if _arithmetic(parent.name) is not None:
            return True
        parent = parent.cpu_parent
    return False

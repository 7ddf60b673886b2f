"""``export_onnx``: an int8 model as an ONNX file in QDQ form, for other runtimes and machines."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import run, tensors_in
from x86quant.calling.state import with_shared_tensors
from x86quant.compiled.compiled_parts import compiled_parts
from x86quant.errors import InvalidInputError, UnsupportedError, first_line
from x86quant.files import check_target, write_aside
from x86quant.onnx_models.qdq_forms import count_biases, spellings
from x86quant.profiling.recorder import example_call
from x86quant.terminal.silence import silent

#: The first that has all of QDQ, int32 biases among it, and runs on runtimes of 2024 on.
_OPSET = 21
#: Element types of ONNX.
_UINT8, _INT64 = 2, 7


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    inputs: Sequence[Any] | torch.Tensor | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    free_batch: bool = True,
) -> None:
    """Write ``model`` as ONNX: int8 weights and codes between QuantizeLinear and DequantizeLinear.

    ONNX Runtime, OpenVINO, TensorRT and others fuse this form to int8 kernels of their own. Scales,
    zero points, weights and rounding are the model's; results differ by a step of a code here and
    there, since they sum in other orders. Products whose rows are quantized as they come, those of
    transformers, keep int8 weights and are computed in float: ONNX has no operator for them.

    Args:
        model: what :func:`x86quant.quantize`, ``compile`` or ``load`` returned.
        path: the file.
        inputs: positional inputs to trace it with; by default those of calibration.
        kwargs: and keyword arguments.
        input_names: the names of the tensors among them, in order.
        output_names: the names of the results.
        free_batch: leave the first size of the inputs free where the model does; else all sizes
            are those of the inputs.

    Raises:
        InvalidInputError: what the model takes is not known.
        UnsupportedError: it cannot be exported; what cannot is named.
    """
    onnx_needed()
    target = Path(path)
    check_target(target, "path")
    call = _call(model, inputs, kwargs)
    leaves = call.leaves
    names = [*(input_names or _names(call))]
    if len(names) != len(leaves):
        raise InvalidInputError(f"input_names has {len(names)} names for {len(leaves)} tensors")
    _check_layers(model)
    model = with_shared_tensors(model).eval()
    for _, part in compiled_parts(model):
        count_biases(part.graph_module)
    program = _exported(_OfTensors(model, call), leaves, free_batch)
    with silent("onnxscript"):
        try:
            spelled = program.run_decompositions(spellings())
            found: Any = torch.onnx.export(
                spelled,
                dynamo=True,
                input_names=names,
                output_names=output_names,
                custom_translation_table=_translations(),
                opset_version=_OPSET,
                verbose=False,
            )
        except Exception as error:  # exporters raise what they will
            raise UnsupportedError(
                f"{type(model).__name__} has no form in ONNX: {_cause(error)}"
            ) from error
    try:
        content = _without_traces(found.model_proto).SerializeToString(deterministic=True)
    except ValueError as error:
        raise UnsupportedError(
            f"the model is too large for one file: {first_line(error)}"
        ) from error
    write_aside(target, content)


def _without_traces(proto: Any) -> Any:
    """``proto`` without what the exporter tells of the process that wrote it: paths, and counters.

    The same model then gives the same bytes, and the user's folders stay his own.
    """
    graphs = [proto.graph, *proto.functions]
    del proto.metadata_props[:]
    for graph in graphs:
        del graph.metadata_props[:]
        for node in graph.node:
            del node.metadata_props[:]
            graphs += [a.g for a in node.attribute if a.HasField("g")]
        for value in (
            *getattr(graph, "input", ()),
            *getattr(graph, "output", ()),
            *graph.value_info,
        ):
            if not isinstance(value, str):
                del value.metadata_props[:]
        for tensor in getattr(graph, "initializer", ()):
            del tensor.metadata_props[:]
    return proto


def onnx_needed() -> None:
    """Raise unless what writes ONNX is installed."""
    try:
        import onnx
        import onnxscript
    except ImportError as error:
        raise UnsupportedError(
            f"ONNX files are written by onnx and onnxscript: pip install 'x86quant[onnx]' ({error})"
        ) from error
    del onnx, onnxscript


def _check_layers(model: nn.Module) -> None:
    """Refuse what torch.onnx writes otherwise than it is meant."""
    for name, module in model.named_modules():
        if isinstance(module, nn.LSTM) and module.proj_size:
            raise UnsupportedError(
                f"{name or type(model).__name__} is an LSTM with projections, which ONNX lacks"
            )


class _OfTensors(nn.Module):
    """The model as a function of the tensors in a call, to the tensors in its result."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        call = self.call.mapped(lambda _: next(given))
        result = self.model(*call.args, **call.kwargs)
        return tuple(tensors_in(result))


def _call(
    model: nn.Module, inputs: Sequence[Any] | torch.Tensor | None, kwargs: Mapping[str, Any] | None
) -> Call:
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if inputs is not None or kwargs is not None:
        return Call(tuple(inputs or ()), dict(kwargs or {}))
    known = example_call(model)
    if known is not None:
        return Call(tuple(known[0]), dict(known[1]))
    example = getattr(getattr(model, "quantization", None), "example", None)
    if isinstance(example, Call):
        return example
    raise InvalidInputError(
        f"what {type(model).__name__} takes is not known: give inputs=(x,), or kwargs={{...}}"
    )


def _names(call: Call) -> list[str]:
    """Of keyword arguments their own, of others by number."""
    of_args = len(Call(call.args, {}).leaves)
    found = [f"input_{n}" if of_args > 1 else "input" for n in range(of_args)]
    for name, value in call.kwargs.items():
        count = len(Call((value,), {}).leaves)
        found += [name] if count == 1 else [f"{name}_{n}" for n in range(count)]
    return found


def _exported(module: _OfTensors, leaves: list[torch.Tensor], free_batch: bool) -> Any:
    """Traced with the batch free if that works, else as it is."""
    free = [{0: torch.export.Dim.AUTO} if x.dim() and free_batch else {} for x in leaves]
    # A batch of one would be taken for a constant.
    doubled = [torch.cat([x, x]) if x.dim() and x.shape[0] == 1 else x for x in leaves]
    tries: list[tuple[list[torch.Tensor], Any]] = [(leaves, None)]
    if free_batch and _runs(module, doubled):
        tries.insert(0, (doubled, (tuple(free),)))
    reason: Exception | None = None
    for tensors, shapes in tries:
        try:
            with silent(), torch.no_grad():
                return torch.export.export(module, tuple(tensors), dynamic_shapes=shapes)
        except Exception as error:  # the model's own code, traced, may raise anything
            reason = error
    raise UnsupportedError(
        f"{type(module.model).__name__} cannot be traced by torch.export: {_cause(reason)}"
    ) from reason


def _runs(module: _OfTensors, tensors: list[torch.Tensor]) -> bool:
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(module, Call(tuple(tensors), {}))
    except Exception:  # whatever it raises, it does not take this batch
        return False
    return True


def _cause(error: BaseException | None) -> str:
    """The first line of what was at the bottom of ``error``."""
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return "" if error is None else first_line(error)


def _translations() -> dict[Any, Callable[..., Any]]:
    """How what is left of our operators is written."""
    from onnxscript import opset21

    op: Any = opset21  # its types know no values that are computed

    def zero_point_of(value: int) -> Any:
        return op.Cast(op.Constant(value_int=value), to=_UINT8)

    def quantize(x: Any, out_scale: float, out_zp: int) -> Any:
        return op.QuantizeLinear(x, op.Constant(value_float=out_scale), zero_point_of(out_zp))

    def dequantize(x: Any, x_scale: float, x_zp: int, contiguous: bool = False) -> Any:
        return op.DequantizeLinear(x, op.Constant(value_float=x_scale), zero_point_of(x_zp))

    def dequantize_weight(weight: Any, weight_scales: Any, axis: int) -> Any:
        return op.DequantizeLinear(weight, weight_scales, axis=axis)

    def lut(x: Any, table: Any) -> Any:
        return op.Gather(table, op.Cast(x, to=_INT64))

    def lut_real(x: Any, table: Any, contiguous: bool = False) -> Any:
        return lut(x, table)

    def int_product(codes: Any, weight: Any) -> Any:
        return op.MatMulInteger(codes, weight)

    ours: Any = torch.ops.x86quant
    written = (quantize, dequantize, dequantize_weight, lut, lut_real)
    found = {getattr(ours, function.__name__).default: function for function in written}
    return {**found, torch.ops.x86quant_onnx.int_product.default: int_product}

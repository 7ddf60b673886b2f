"""What commands that take a model share: finding it by name, and bringing it into int8."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from x86quant.errors import InvalidInputError, first_line
from x86quant.given_model import Arguments as Arguments
from x86quant.given_model import InputShape as InputShape
from x86quant.given_model import called as called
from x86quant.given_model import form_of as form_of
from x86quant.given_model import load_model as load_model
from x86quant.given_model import load_object as load_object
from x86quant.given_model import random_arguments as random_arguments

if TYPE_CHECKING:
    import torch
    from torch import nn

_CALIBRATION_BATCHES = 4
#: Of inputs, by the names that ``--input`` takes.
_DTYPES = ("float32", "int64", "int32", "uint8", "bool")


@dataclasses.dataclass(frozen=True)
class Forms:
    """One model in the forms that are available.

    Attributes:
        float_model: as given, when that was a float model.
        converted: as stock ``convert_fx`` made it; None if a compiled model was given.
        compiled: as ``x86quant.compile`` made it, or ``quantize`` if it is no single graph.
    """

    float_model: nn.Module | None
    converted: nn.Module | None
    compiled: nn.Module


#: Beyond it no memory holds what has such a size.
_LARGEST_SIZE = 2**40


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """``model``, ``--shape``, ``--input``, ``--threads``, ``--packed-cache`` and ``--json``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a saved model; an ONNX model; a folder that transformers saved one to; or "
        "module:name or file.py:name, a callable without arguments that returns an nn.Module, or "
        "such a module: float, converted by stock PyTorch, or compiled (example: "
        "torchvision.models:resnet18)",
    )
    add_input_arguments(parser)
    parser.add_argument("--threads", type=thread_count, help="threads (default: torch's)")
    add_packed_cache(parser)


def add_packed_cache(parser: argparse.ArgumentParser) -> None:
    """The argument ``--packed-cache``."""
    parser.add_argument(
        "--packed-cache",
        action="store_true",
        help="keep the packed weights of a saved model in MODEL.packed for the next process",
    )


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments ``--shape``, ``--input`` and ``--json``."""
    parser.add_argument(
        "--shape",
        type=shape,
        action="append",
        default=[],
        metavar="N,C,H,W",
        help="shape of an input, float32; once for each input",
    )
    parser.add_argument(
        "--input",
        type=input_shape,
        action="append",
        default=[],
        metavar="[NAME=]NxL[:DTYPE]",
        help="the same with a dtype, and a name for keyword arguments (example: ids=1x128:int64)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def input_shape(text: str) -> InputShape:
    """``"ids=1x128:int64"`` as data, for argparse."""
    name, equals, rest = text.rpartition("=")
    sizes, _, dtype = rest.partition(":")
    if equals and not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{name!r} is not the name of an argument")
    dtype = dtype or "float32"
    if dtype not in _DTYPES:
        raise argparse.ArgumentTypeError(f"{dtype!r} is none of {', '.join(_DTYPES)}")
    return InputShape(shape(sizes.replace("x", ",")), dtype, name or None)


def shape(text: str) -> tuple[int, ...]:
    """``"1,3,224,224"`` as a tuple, for argparse."""
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1,3,224,224") from None
    if min(sizes) < 1 or max(sizes) > _LARGEST_SIZE:
        raise argparse.ArgumentTypeError(f"{text!r}: sizes are from 1 to {_LARGEST_SIZE}")
    return sizes


def positive(text: str, most: int = 2**31 - 1) -> int:
    """An integer of at least 1, for argparse."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    if number > most:
        raise argparse.ArgumentTypeError(f"{text} is more than {most}")
    return number


def thread_count(text: str) -> int:
    """A number of threads, for argparse: no machine has more."""
    return positive(text, most=4096)


def inputs_of(options: argparse.Namespace) -> tuple[InputShape, ...]:
    """What ``--shape`` and ``--input`` describe."""
    return (*(InputShape(sizes) for sizes in options.shape), *options.input)


def arguments_for(options: argparse.Namespace, model: nn.Module) -> Arguments:
    """The arguments that ``--shape`` and ``--input`` describe; a saved model knows its own.

    Raises:
        InvalidInputError: nothing describes them.
    """
    from x86quant.profiling.recorder import example_call

    inputs = inputs_of(options)
    if not inputs and (known := example_call(model)) is not None:
        args, kwargs = known
        return Arguments(tuple(args), dict(kwargs))
    if not inputs:
        raise InvalidInputError("give the model's inputs: --shape 1,3,224,224 or --input 1x9:int64")
    return random_arguments(inputs, 0)


def compile_model(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    kwargs: dict[str, torch.Tensor] | None = None,
) -> Forms:
    """Compile ``model``, a float one after calibration on random data, which stderr is told.

    Raises:
        InvalidInputError: it does not run on ``inputs``.
        UnsupportedError: it cannot be quantized.
    """
    import torch

    import x86quant

    call = Arguments(inputs, kwargs or {})
    try:
        with torch.no_grad():
            model(*call.args, **call.kwargs)
    except Exception as error:  # whatever the user's model raises
        raise InvalidInputError(
            f"the model fails on inputs of {call}: {first_line(error)}"
        ) from error
    form = form_of(model)
    if form == "compiled":
        return Forms(None, None, model)
    if form == "converted":
        return Forms(None, model, x86quant.compile(model, inputs))
    tell("float model: quantized after calibration on random data, for its speed only")
    try:
        converted = _convert(model, call)
        return Forms(model, converted, x86quant.compile(converted, inputs))
    except Exception as error:  # stock quantization raises anything for what it cannot trace
        return Forms(model, None, _quantized(model, call, error))


def _quantized(model: nn.Module, call: Arguments, reason: Exception) -> nn.Module:
    """``model`` by ``quantize``, in parts where it is no single graph."""
    import x86quant

    batches: list[Any] = [dict(call.kwargs) if call.kwargs else call.args] * _CALIBRATION_BATCHES
    try:
        if call.args and call.kwargs:
            raise InvalidInputError("give all inputs names, or none")
        return x86quant.quantize(
            model,
            batches,
            speed_check=False,
            fuse_blocks=_is_worth_fusing(model),
            progress=False,
        )
    except x86quant.UnsupportedError as error:
        raise x86quant.UnsupportedError(
            f"torch.fx cannot trace the model: {first_line(reason)}; and {error}"
        ) from reason


def _is_worth_fusing(model: nn.Module) -> bool:
    """Whether ``quantize`` would fuse blocks of ``model`` by itself, if it timed them."""
    from x86quant.dynamic import is_linear
    from x86quant.quantization.graphs.fused_blocks import ENOUGH_WEIGHTS

    weights = (m.get_parameter("weight") for m in model.modules() if is_linear(m))
    return sum(weight.numel() for weight in weights) >= ENOUGH_WEIGHTS


def tell(text: str) -> None:
    """Say on stderr what goes on."""
    print(text, file=sys.stderr, flush=True)


def _convert(model: nn.Module, call: Arguments) -> nn.Module:
    """By stock FX quantization, with x86quant's mapping."""
    import torch
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    import x86quant
    from x86quant.terminal.silence import silent

    if call.kwargs or not all(x.is_floating_point() for x in call.args):
        raise x86quant.UnsupportedError("it takes other inputs than floats by position")
    mapping = x86quant.get_default_qconfig_mapping()
    with silent(), torch.no_grad():
        # Stock PyTorch announces the end of torch.ao.quantization, and warns of its own defaults.
        prepared = prepare_fx(copy.deepcopy(model), mapping, call.args)
        generator = torch.Generator().manual_seed(1)
        for _ in range(_CALIBRATION_BATCHES):
            prepared(
                *(torch.randn(x.shape, generator=generator, dtype=torch.float32) for x in call.args)
            )
        converted: nn.Module = convert_fx(prepared)
    return converted

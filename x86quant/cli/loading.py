"""What commands that take a model share: finding it by name, and bringing it into int8."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from x86quant.errors import InvalidInputError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from x86quant.compiled import CompiledModule

_CALIBRATION_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Forms:
    """One model in the forms that are at hand.

    Attributes:
        float_model: as given, when that was a float model.
        converted: as stock ``convert_fx`` made it; None if a compiled model was given.
        compiled: as ``x86quant.compile`` made it.
    """

    float_model: nn.Module | None
    converted: nn.Module | None
    compiled: CompiledModule


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments ``model``, ``--shape``, ``--threads`` and ``--json``."""
    parser.add_argument(
        "model",
        metavar="MODULE:FACTORY",
        help="a callable without arguments that returns an nn.Module, or such a module: float, "
        "converted by stock PyTorch, or compiled (example: torchvision.models:resnet18)",
    )
    parser.add_argument(
        "--shape",
        type=shape,
        action="append",
        required=True,
        metavar="N,C,H,W",
        help="shape of an input, float32; once for each input",
    )
    parser.add_argument("--threads", type=positive, help="threads (default: torch's)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def shape(text: str) -> tuple[int, ...]:
    """``"1,3,224,224"`` as a tuple, for argparse."""
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1,3,224,224") from None
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: sizes must be at least 1")
    return sizes


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def load_object(name: str) -> Any:
    """What ``module:attribute`` names; modules are also looked for in the current folder.

    Raises:
        InvalidInputError: badly written, no such module or attribute, or its import fails.
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise InvalidInputError(
            f"{name!r} is not of the form module:attribute, such as torchvision.models:resnet18"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        raise InvalidInputError(f"cannot import {module_name!r}: {_told(error)}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise InvalidInputError(f"{name!r}: {found!r} has no attribute {part!r}")
        found = getattr(found, part)
    return found


def load_model(name: str) -> nn.Module:
    """The module, in evaluation mode, that ``module:factory`` is or returns.

    Raises:
        InvalidInputError: it cannot be found, raises, or is no ``nn.Module``.
    """
    from torch import nn

    found = load_object(name)
    if isinstance(found, type) or not isinstance(found, nn.Module):
        if not callable(found):
            raise InvalidInputError(
                f"{name!r} is {type(found).__name__}, no nn.Module and not callable"
            )
        try:
            found = found()
        except Exception as error:  # whatever the user's factory raises
            raise InvalidInputError(f"{name!r} failed: {_told(error)}") from error
    if not isinstance(found, nn.Module):
        raise InvalidInputError(f"{name!r} returned {type(found).__name__}, not an nn.Module")
    return found.eval()


def random_inputs(shapes: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
    """Normally distributed inputs, the same at every call."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(sizes, generator=generator) for sizes in shapes)


def compile_model(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Forms:
    """Compile ``model``, a float one after calibration on random data, which stderr is told.

    Raises:
        InvalidInputError: it does not run on ``inputs``.
        UnsupportedError: it cannot be traced.
    """
    import torch

    import x86quant
    from x86quant.compiled import CompiledModule

    try:
        with torch.no_grad():
            model(*inputs)
    except Exception as error:  # whatever the user's model raises
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise InvalidInputError(f"the model fails on inputs of {shapes}: {_told(error)}") from error
    if isinstance(model, CompiledModule):
        return Forms(None, None, model)
    if _is_converted(model):
        return Forms(None, model, x86quant.compile(model, inputs))
    tell("float model: quantized after calibration on random data, for its speed only")
    converted = _convert(model, inputs)
    return Forms(model, converted, x86quant.compile(converted, inputs))


def tell(text: str) -> None:
    """Say on stderr what goes on."""
    print(text, file=sys.stderr, flush=True)


def _convert(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
    """By stock FX quantization, with x86quant's mapping."""
    import torch
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
    from torch.fx.proxy import TraceError

    import x86quant

    mapping = x86quant.get_default_qconfig_mapping()
    with warnings.catch_warnings(), torch.no_grad():
        # Stock PyTorch announces the end of torch.ao.quantization, and warns of its own defaults.
        warnings.simplefilter("ignore")
        try:
            prepared = prepare_fx(copy.deepcopy(model), mapping, inputs)
        except TraceError as error:
            raise x86quant.UnsupportedError(
                f"torch.fx cannot trace the model: {_told(error)}; give one that it can, or one "
                "that is already quantized"
            ) from error
        generator = torch.Generator().manual_seed(1)
        for _ in range(_CALIBRATION_BATCHES):
            prepared(*(torch.randn(x.shape, generator=generator) for x in inputs))
        converted: nn.Module = convert_fx(prepared)
    return converted


def is_quantized(model: nn.Module) -> bool:
    """Whether ``model`` is compiled, or converted by stock PyTorch."""
    from x86quant.compiled import CompiledModule

    return isinstance(model, CompiledModule) or _is_converted(model)


def _is_converted(model: nn.Module) -> bool:
    """Whether stock PyTorch has quantized ``model``: it has packed weights, or quantizes."""
    import torch
    from torch.fx import GraphModule

    from x86quant.stock.pack_sites import pack_sites

    if any(True for _ in pack_sites(model)):
        return True
    return isinstance(model, GraphModule) and any(
        node.target is torch.quantize_per_tensor for node in model.graph.nodes
    )


def _told(error: Exception) -> str:
    """The kind of ``error`` and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

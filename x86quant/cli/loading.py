"""What commands that take a model share: finding it by name, and bringing it into int8."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from x86quant.errors import InvalidInputError

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


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a model is called with."""

    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(str(tuple(x.shape)) for x in (*self.args, *self.kwargs.values()))


@dataclasses.dataclass(frozen=True)
class InputShape:
    """An input to be made: ``--input ids=1x128:int64``."""

    sizes: tuple[int, ...]
    dtype: str = "float32"
    name: str | None = None


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments ``model``, ``--shape``, ``--input``, ``--threads`` and ``--json``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a saved model; a folder that transformers saved one to; or module:name or "
        "file.py:name, a callable without arguments that returns an nn.Module, or such a module: "
        "float, converted by stock PyTorch, or compiled (example: torchvision.models:resnet18)",
    )
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
    parser.add_argument("--threads", type=positive, help="threads (default: torch's)")
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
    module_name, colon, path = name.rpartition(":")
    if not (module_name and colon and path):
        raise InvalidInputError(
            f"{name!r} is not of the form module:attribute, such as torchvision.models:resnet18, "
            "nor file.py:attribute, nor a saved model"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = _imported(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise InvalidInputError(f"cannot import {module_name!r}: {told(error)}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise InvalidInputError(f"{name!r}: {found!r} has no attribute {part!r}")
        found = getattr(found, part)
    return found


def _imported(name: str) -> Any:
    """The module ``name``, or the one in the file of this name."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    file = Path(name)
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {name}")
    folder = str(file.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for a script: modules beside it are found
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)  # a file called random.py shadows nothing
    spec.loader.exec_module(module)
    return module


def load_model(name: str) -> nn.Module:
    """The module, in evaluation mode, that ``module:factory`` is or returns, or a file holds.

    Raises:
        InvalidInputError: it cannot be found, raises, or is no ``nn.Module``.
    """
    from torch import nn

    if ":" not in name and Path(name).is_file() and not name.endswith(".py"):
        import x86quant

        saved: nn.Module = x86quant.load(name)
        return saved
    if ":" not in name and Path(name).is_dir():
        return _pretrained(Path(name))
    found = load_object(name)
    if isinstance(found, type) or not isinstance(found, nn.Module):
        if not callable(found):
            raise InvalidInputError(
                f"{name!r} is {type(found).__name__}, no nn.Module and not callable"
            )
        try:
            found = found()
        except (Exception, SystemExit) as error:  # whatever the user's factory raises
            raise InvalidInputError(f"{name!r} failed: {told(error)}") from error
    if not isinstance(found, nn.Module):
        raise InvalidInputError(f"{name!r} returned {type(found).__name__}, not an nn.Module")
    return found.eval()


def _pretrained(folder: Path) -> nn.Module:
    """The model that transformers' ``save_pretrained`` wrote to ``folder``; nothing is downloaded.

    Raises:
        InvalidInputError: there is no model, or transformers is missing or cannot load it.
    """
    if not (folder / "config.json").is_file():
        raise InvalidInputError(f"the folder {folder} has no config.json, so it holds no model")
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        names = [n for n in config.architectures or () if hasattr(transformers, n)]
        kind = getattr(transformers, names[0]) if names else transformers.AutoModel
        model: nn.Module = kind.from_pretrained(folder, config=config, local_files_only=True)
    except Exception as error:  # a missing package, or whatever transformers raises
        raise InvalidInputError(f"the model in {folder} cannot be loaded: {told(error)}") from error
    return model.float().eval()


def random_inputs(shapes: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
    """Normally distributed inputs, the same at every call."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(sizes, generator=generator) for sizes in shapes)


def arguments_for(options: argparse.Namespace, model: nn.Module) -> Arguments:
    """The arguments that ``--shape`` and ``--input`` describe; a saved model knows its own.

    Raises:
        InvalidInputError: nothing describes them.
    """
    from x86quant.compiled import CompiledModule
    from x86quant.profiling.recorder import example_call

    inputs = [*(InputShape(sizes) for sizes in options.shape), *options.input]
    if not inputs and isinstance(model, CompiledModule):
        args, kwargs = example_call(model)
        return Arguments(tuple(args), dict(kwargs))
    if not inputs:
        raise InvalidInputError("give the model's inputs: --shape 1,3,224,224 or --input 1x9:int64")
    return random_arguments(inputs, 0)


def random_arguments(inputs: Sequence[InputShape], seed: int) -> Arguments:
    """Random tensors, the same for the same seed; integers are 0 or 1, which index anything."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def made(one: InputShape) -> torch.Tensor:
        dtype = getattr(torch, one.dtype)
        if dtype == torch.float32:
            return torch.randn(one.sizes, generator=generator)
        return torch.randint(0, 2, one.sizes, generator=generator).to(dtype)

    return Arguments(
        tuple(made(one) for one in inputs if one.name is None),
        {one.name: made(one) for one in inputs if one.name is not None},
    )


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
        raise InvalidInputError(f"the model fails on inputs of {call}: {told(error)}") from error
    if _has_int8(model):
        return Forms(None, None, model)
    if _is_converted(model):
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
        return x86quant.quantize(model, batches, speed_check=False, progress=False)
    except x86quant.UnsupportedError as error:
        raise x86quant.UnsupportedError(
            f"torch.fx cannot trace the model: {told(reason)}; and {error}"
        ) from reason


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
            prepared(*(torch.randn(x.shape, generator=generator) for x in call.args))
        converted: nn.Module = convert_fx(prepared)
    return converted


def is_quantized(model: nn.Module) -> bool:
    """Whether ``model`` is compiled, wholly or in parts, or converted by stock PyTorch."""
    return _has_int8(model) or _is_converted(model)


def _has_int8(model: nn.Module) -> bool:
    from x86quant.compiled import CompiledModule
    from x86quant.dynamic import Int8Linear, WeightOnlyEmbedding

    kinds = (CompiledModule, Int8Linear, WeightOnlyEmbedding)
    return any(isinstance(module, kinds) for module in model.modules())


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


def told(error: BaseException) -> str:
    """The kind of ``error`` and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

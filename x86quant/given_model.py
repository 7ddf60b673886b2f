"""A model somebody names: in a module, in a file of Python, saved; and what to call it with."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from x86quant.errors import InvalidInputError, first_line

if TYPE_CHECKING:
    import torch
    from torch import nn

Form = Literal["float", "converted", "compiled"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a model is called with."""

    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(str(tuple(x.shape)) for x in (*self.args, *self.kwargs.values()))

    def converted(self, function: Callable[[Any], Any]) -> Arguments:
        """``function`` of every value."""
        return Arguments(
            tuple(map(function, self.args)), {k: function(v) for k, v in self.kwargs.items()}
        )


@dataclasses.dataclass(frozen=True)
class InputShape:
    """An input to be made: ``--input ids=1x128:int64``."""

    sizes: tuple[int, ...]
    dtype: str = "float32"
    name: str | None = None


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
        raise InvalidInputError(f"cannot import {module_name!r}: {first_line(error)}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise InvalidInputError(f"{name!r}: {found!r} has no attribute {part!r}")
        found = getattr(found, part)
    return found


def called(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of the user's returns.

    Raises:
        InvalidInputError: whatever it raised, told with its ``name``.
    """
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        raise InvalidInputError(f"{name} failed: {first_line(error)}") from error


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


def load_model(name: str, *, packed_cache: bool = False) -> nn.Module:
    """The module, in evaluation mode, that ``module:factory`` is or returns, or a file holds.

    A file is one that x86quant saved, or an ONNX model.

    Args:
        name: of the module.
        packed_cache: keep packed weights beside the file.

    Raises:
        InvalidInputError: it cannot be found, raises, is no ``nn.Module``, or no file although
            packed weights should lie beside it.
    """
    from torch import nn

    if name.endswith(".onnx") and not packed_cache:
        from x86quant.onnx_models import from_onnx

        return from_onnx(name)
    if ":" not in name and Path(name).is_file() and not name.endswith(".py"):
        from x86quant.artifacts import load

        saved: nn.Module = load(name, packed_cache=packed_cache)
        return saved
    if packed_cache:
        raise InvalidInputError(
            f"{name!r} is not a file that x86quant saved: there is nothing that packed weights "
            "could lie beside; leave out --packed-cache"
        )
    if ":" not in name and Path(name).is_dir():
        return _pretrained(Path(name))
    found = load_object(name)
    if isinstance(found, type) or not isinstance(found, nn.Module):
        if not callable(found):
            raise InvalidInputError(
                f"{name!r} is {type(found).__name__}, no nn.Module and not callable"
            )
        found = called(repr(name), found)
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
        raise InvalidInputError(
            f"the model in {folder} cannot be loaded: {first_line(error)}"
        ) from error
    return model.float().eval()


def random_arguments(inputs: Sequence[InputShape], seed: int) -> Arguments:
    """Random tensors, the same for the same seed; integers are 0 or 1, which index anything."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def made(one: InputShape) -> torch.Tensor:
        dtype = getattr(torch, one.dtype)
        if dtype == torch.float32:
            return torch.randn(one.sizes, generator=generator, dtype=torch.float32)
        return torch.randint(0, 2, one.sizes, generator=generator).to(dtype)

    return Arguments(
        tuple(made(one) for one in inputs if one.name is None),
        {one.name: made(one) for one in inputs if one.name is not None},
    )


def form_of(model: nn.Module) -> Form:
    """Whether ``model`` is float, converted to int8 by stock PyTorch, or runs on x86quant."""
    import torch
    from torch.fx import GraphModule

    from x86quant.ops.float_type import Int8Module
    from x86quant.stock.pack_sites import pack_sites

    if any(isinstance(module, Int8Module) for module in model.modules()):
        return "compiled"
    quantizes = isinstance(model, GraphModule) and any(
        node.target is torch.quantize_per_tensor for node in model.graph.nodes
    )
    return "converted" if quantizes or any(True for _ in pack_sites(model)) else "float"

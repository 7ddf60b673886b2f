"""The layers of the user's own model, with the sizes they run at."""

from __future__ import annotations

import collections
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from x86quant.errors import InvalidInputError
from x86quant.spec import OpSpec
from x86quant.torchvision_import import import_torchvision
from x86quant.tuning.cases import Shape

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
#: The input of a torchvision model where no shape is given.
PICTURE = (1, 3, 224, 224)


def load_model(name: str) -> nn.Module:
    """The model that ``module:factory`` returns, or the torchvision model of this name.

    Raises:
        InvalidInputError: there is none, or it is no model.
    """
    factory = _factory(*name.rsplit(":", 1)) if ":" in name else _torchvision(name)
    try:
        model = factory()
    except TypeError as error:
        raise InvalidInputError(
            f"--model {name} cannot be called without arguments: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"--model {name}: got a {type(model).__name__}, not an nn.Module")
    return model.eval()


def _factory(module: str, attribute: str) -> Callable[[], Any]:
    # As `python -m` does: modules beside the user are found.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(f"--model {module}:{attribute}: {error}") from error
    if not callable(found):
        raise InvalidInputError(f"--model {module}:{attribute} is no function that makes a model")
    return found  # type: ignore[no-any-return]


def _torchvision(name: str) -> Callable[[], Any]:
    try:
        torchvision: Any = import_torchvision()
        if torchvision is None:
            raise ImportError("no module named 'torchvision'")
    except (ImportError, RuntimeError) as error:
        raise InvalidInputError(
            f"--model {name}: torchvision cannot be imported ({error}); install it, or write "
            "module:factory, the name of a function that makes your model"
        ) from error
    models = torchvision.models
    if name not in models.list_models():
        raise InvalidInputError(
            f"--model {name}: torchvision has no such model; write module:factory for your own"
        )
    return lambda: models.get_model(name, weights=None)


def model_shapes(
    model: nn.Module, name: str, inputs: Sequence[int] | Sequence[Tensor] = PICTURE
) -> tuple[Shape, ...]:
    """Every convolution and linear that runs on ``inputs``, a shape or example tensors.

    Convolutions keep their spatial size, linears the rows they have for each sample of the batch.

    Raises:
        InvalidInputError: the model does not run on the inputs, or has no such layer.
    """
    counts: collections.Counter[OpSpec] = collections.Counter()
    hooks = [
        module.register_forward_hook(_recorder(counts))
        for module in model.modules()
        if isinstance(module, (nn.Linear, *_CONVOLUTIONS))
    ]
    example = _tensors(inputs)
    try:
        with torch.no_grad():
            model(*example)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InvalidInputError(
            f"{name} does not run on an input of {[tuple(x.shape) for x in example]}: {error}; "
            "give its input by --shape"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if not counts:
        raise InvalidInputError(f"{name} runs no convolution or linear module")
    return tuple(Shape(spec, name, count) for spec, count in counts.items())


def _tensors(inputs: Sequence[int] | Sequence[Tensor]) -> list[Tensor]:
    if all(isinstance(size, int) for size in inputs):
        return [torch.zeros(*inputs, dtype=torch.float32)]
    return list(inputs)  # type: ignore[arg-type]


def _recorder(counts: collections.Counter[OpSpec]) -> Callable[[nn.Module, Any, Tensor], None]:
    def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.numel():
            counts[_spec_of(module, inputs[0], output)] += 1

    return record


def _spec_of(module: Any, x: Tensor, y: Tensor) -> OpSpec:
    if isinstance(module, nn.Linear):
        rows = y.numel() // module.out_features
        return OpSpec("linear", module.in_features, module.out_features, rows=rows)
    dims = len(module.kernel_size)
    transposed = bool(module.transposed)
    padding = _padding(module, x)
    return OpSpec(
        f"conv{dims}d",  # type: ignore[arg-type]
        module.in_channels,
        module.out_channels,
        module.groups,
        tuple(module.kernel_size),
        tuple(module.stride),
        padding,
        tuple(module.dilation),
        tuple(module.output_padding) if transposed else (0,) * dims,
        transposed=transposed,
        per_channel=not transposed,
        spatial=tuple(x.shape[-dims:]),
        batch=x.shape[0] if x.dim() == dims + 2 else 1,
    )


def _padding(module: Any, x: Tensor) -> tuple[int, ...]:
    """Numbers for a padding that may be a word; an odd "same" loses its last row."""
    if isinstance(module.padding, tuple):
        return module.padding
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    sides = zip(module.kernel_size, module.dilation, strict=True)
    return tuple(d * (k - 1) // 2 for k, d in sides)

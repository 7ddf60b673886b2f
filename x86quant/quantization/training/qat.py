"""Quantization-aware training: prepare, train as usual, convert.

The training itself is stock PyTorch's: torch.ao is imported when it is asked for.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx.proxy import TraceError

from x86quant.calling.wording import quiet
from x86quant.compiled import CompiledModule, compile
from x86quant.errors import InvalidInputError, UnsupportedError, first_line

_EXAMPLE = "x86quant_example_inputs"


def prepare_qat(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    activation_bits: int = 8,
    float_layers: Collection[str] = (),
) -> GraphModule:
    """``model`` with rounding simulated in its forward pass, in training mode.

    Train what is returned as you would train the model, then call :func:`convert_qat`. Ranges
    follow the data; batch norms train on. To freeze either for the last epochs::

        prepared.apply(torch.ao.quantization.disable_observer)
        prepared.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats)

    Args:
        model: a float model that torch.fx can trace; it is not changed.
        example_inputs: the tuple of positional inputs.
        activation_bits: as in ``get_default_qat_qconfig_mapping``.
        float_layers: paths of modules to keep in float.

    Raises:
        InvalidInputError: ``example_inputs`` is no tuple, or ``float_layers`` names no module.
        UnsupportedError: torch.fx cannot trace the model.
    """
    example = _checked_example(example_inputs)
    with _stock():
        from torch.ao.quantization.quantize_fx import prepare_qat_fx

        from x86quant.stock.qconfig import get_backend_config, get_default_qat_qconfig_mapping
    mapping = get_default_qat_qconfig_mapping(activation_bits=activation_bits)
    modules = dict(model.named_modules())
    for name in float_layers:
        if name not in modules:
            raise InvalidInputError(f"float_layers: the model has no module {name!r}")
        mapping.set_module_name(name, None)
    with quiet(), _forgetful():
        try:
            prepared: GraphModule = prepare_qat_fx(
                copy.deepcopy(model).train(), mapping, example, backend_config=get_backend_config()
            )
        except TraceError as error:
            raise UnsupportedError(
                f"torch.fx cannot trace {type(model).__name__} ({first_line(error)}); wrap the "
                "part that depends on values in torch.fx.wrap, or quantize it after training "
                "with x86quant.quantize"
            ) from error
    prepared.meta[_EXAMPLE] = example
    return prepared.train()


def convert_qat(prepared: nn.Module, example_inputs: Sequence[Any] | None = None) -> CompiledModule:
    """The trained model in int8.

    Args:
        prepared: what :func:`prepare_qat` returned, trained; it is not changed.
        example_inputs: those given to :func:`prepare_qat`, unless others are given.

    Raises:
        InvalidInputError: ``prepared`` was not made by :func:`prepare_qat`, or never ran.
    """
    with _stock():
        from torch.ao.quantization import FakeQuantizeBase
        from torch.ao.quantization.quantize_fx import convert_to_reference_fx

        from x86quant.stock.qconfig import get_backend_config
    example = prepared.meta.get(_EXAMPLE) if isinstance(prepared, GraphModule) else None
    if example_inputs is not None:
        example = _checked_example(example_inputs)
    fakes = [m for m in prepared.modules() if isinstance(m, FakeQuantizeBase)]
    if example is None or not isinstance(prepared, GraphModule) or not fakes:
        raise InvalidInputError(
            "convert_qat takes what x86quant.prepare_qat returned, after training it"
        )
    if not any(_has_run(fake) for fake in fakes):
        raise InvalidInputError("the prepared model never ran: train it before convert_qat")
    with quiet(), _forgetful():
        reference = convert_to_reference_fx(
            copy.deepcopy(prepared).eval(), backend_config=get_backend_config()
        )
        return compile(reference, example)


@contextlib.contextmanager
def _stock() -> Iterator[None]:
    """A block that imports stock quantization."""
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(
            f"quantization-aware training is stock PyTorch's, and this torch has no torch.ao "
            f"({first_line(error)}); x86quant.quantize needs none"
        ) from error


@contextlib.contextmanager
def _forgetful() -> Iterator[None]:
    """A block of stock code, which would remember models, weights and all, for ever."""
    from torch.ao.quantization.fx.utils import assert_and_get_unique_device

    try:
        yield
    finally:
        assert_and_get_unique_device.cache_clear()


def _has_run(fake: Any) -> bool:
    """Whether ``fake`` has seen an activation. Weights are observed without any input."""
    from torch.ao.quantization import MovingAverageMinMaxObserver

    observer: Any = fake.activation_post_process
    return isinstance(observer, MovingAverageMinMaxObserver) and bool(
        torch.isfinite(observer.min_val).all()
    )


def _checked_example(example_inputs: Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(example_inputs, torch.Tensor) or not isinstance(example_inputs, Sequence):
        raise InvalidInputError(
            "example_inputs must be a tuple of inputs; write (x,) for one tensor"
        )
    return tuple(example_inputs)

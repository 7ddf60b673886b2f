"""Every pattern of torchao's ``X86InductorQuantizer``: what it annotates is multiplied in int8.

Each model is one of the patterns that its lowering for Inductor knows. The reference is what
``convert_pt2e`` returns, run as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant

pytest.importorskip("torchao", reason="torchao is not installed: pip install x86quant[pt2e]")

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's export and torchao

IMAGE, ROWS = (2, 8, 10, 10), (2, 5, 32)


class Model(nn.Module):
    """A function of an input and of layers, which are ``m.a``, ``m.b`` and so on."""

    def __init__(self, body: Callable[..., torch.Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.body = body
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def conv(inputs: int = 8, kernel: Any = 3, padding: Any = 1, **more: Any) -> nn.Module:
    return nn.Conv2d(inputs, 8, kernel, padding=padding, **more)


def linear(inputs: int = 32, **more: Any) -> nn.Module:
    return nn.Linear(inputs, 32, **more)


Pattern = tuple[tuple[int, ...], Callable[..., torch.Tensor], dict[str, nn.Module]]


def _of_images(body: Callable[..., torch.Tensor], **layers: nn.Module) -> Pattern:
    return IMAGE, body, layers


def _of_rows(body: Callable[..., torch.Tensor], **layers: nn.Module) -> Pattern:
    return ROWS, body, layers


CONV_ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
}
LINEAR_ACTIVATIONS = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def patterns() -> dict[str, Pattern]:
    torch.manual_seed(0)
    found = {
        "conv": _of_images(lambda m, x: m.b(m.a(x)), a=conv(), b=conv(kernel=1, padding=0)),
        "conv, strides": _of_images(
            lambda m, x: m.b(m.a(x)),
            a=conv(stride=2, groups=4),
            b=conv(kernel=(3, 1), padding=(2, 0), dilation=2, stride=(1, 2), bias=False),
        ),
        "conv + add": _of_images(lambda m, x: m.c(m.a(x) + m.b(x)), a=conv(), b=conv(), c=conv()),
        "conv + add + relu": _of_images(
            lambda m, x: m.c(F.relu(m.a(x) + m.b(x))), a=conv(), b=conv(), c=conv()
        ),
        "conv + add of floats": _of_images(lambda m, x: F.relu(m.a(x) + x), a=conv()),
        "conv + batch norm + relu": _of_images(
            lambda m, x: m.b(F.relu(m.n(m.a(x)))), a=conv(), n=nn.BatchNorm2d(8), b=conv()
        ),
        "max pool": _of_images(lambda m, x: m.b(F.max_pool2d(m.a(x), 2)), a=conv(), b=conv()),
        "cat": _of_images(
            lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1)), a=conv(), b=conv(), c=conv(16)
        ),
        "cat of one value": _of_images(
            lambda m, x: m.b(torch.cat([y := m.a(x), y], 1)), a=conv(), b=conv(16)
        ),
        "average pool": _of_images(lambda m, x: m.b(F.avg_pool2d(m.a(x), 2)), a=conv(), b=conv()),
        "adaptive pool, flatten": _of_images(
            lambda m, x: m.b(F.adaptive_avg_pool2d(m.a(x), 1).flatten(1)), a=conv(), b=linear(8)
        ),
        "maximum over positions": _of_images(
            lambda m, x: m.b(m.a(x).amax((2, 3))), a=conv(), b=linear(8)
        ),
        "flatten": _of_images(lambda m, x: m.b(m.a(x).flatten(1)), a=conv(), b=linear(800)),
        "mul": _of_images(lambda m, x: m.c(m.a(x) * m.b(x)), a=conv(), b=conv(), c=conv()),
        "linear": _of_rows(lambda m, x: m.b(m.a(x)), a=linear(), b=linear(bias=False)),
        "linear + add": _of_rows(lambda m, x: m.b(m.a(x) + x), a=linear(), b=linear()),
        "linear + add + relu": _of_rows(
            lambda m, x: m.c(F.relu(m.a(x) + m.b(x))), a=linear(), b=linear(), c=linear()
        ),
    }
    for name, act in CONV_ACTIVATIONS.items():
        found[f"conv + {name}"] = _of_images(
            lambda m, x, act=act: m.b(act(m.a(x))), a=conv(), b=conv()
        )
        found[f"conv + {name}, last"] = _of_images(lambda m, x, act=act: act(m.a(x)), a=conv())
    for name, act in LINEAR_ACTIVATIONS.items():
        found[f"linear + {name}"] = _of_rows(
            lambda m, x, act=act: m.b(act(m.a(x))), a=linear(), b=linear()
        )
        found[f"linear + {name}, last"] = _of_rows(lambda m, x, act=act: act(m.a(x)), a=linear())
    return found


PATTERNS = patterns()
#: Rounded from the mean of codes, not of floats: what lies between two codes may fall to either.
MEANS = ("average pool", "adaptive pool, flatten")


def converted(model: nn.Module, x: torch.Tensor, config: Any = None) -> Any:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as quantizers

    quantizer = quantizers.X86InductorQuantizer()
    quantizer.set_global(config or quantizers.get_default_x86_inductor_quantization_config())
    exported = torch.export.export(model.eval().requires_grad_(False), (x,)).module()
    prepared = prepare_pt2e(exported, quantizer)
    prepared(x)
    return convert_pt2e(prepared)


def noise(exact: torch.Tensor, found: torch.Tensor) -> float:
    off = (exact - found).square().mean() / exact.square().mean()
    return float(10 * torch.log10(off.clamp(min=1e-20)))


def products_in_float(compiled: Any) -> list[str]:
    names = ("convolution", "linear", "addmm", "mm.", "matmul")
    return [node.op for node in compiled.float_nodes if node.op.startswith(names)]


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_right_and_int8(name: str) -> None:
    shape, body, layers = PATTERNS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    program = converted(Model(body, **layers), x)
    compiled = x86quant.compile(program, (x,))
    assert not products_in_float(compiled)
    assert noise(program(x), compiled(x)) < (-30 if name in MEANS else -60)


def test_ranges_at_run_time_are_those_of_rows() -> None:
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as quantizers

    config = quantizers.get_default_x86_inductor_quantization_config(is_dynamic=True)
    model, x = Model(lambda m, x: m.b(F.relu(m.a(x))), a=linear(), b=linear()), torch.randn(ROWS)
    program = converted(model, x, config)
    compiled = x86quant.compile(program, (x,))
    assert not compiled.float_nodes
    assert noise(model(x), compiled(x)) < noise(model(x), program(x)) + 1


def test_weights_in_float16_stay_float() -> None:
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as quantizers

    config = quantizers.get_x86_inductor_linear_dynamic_fp16_config()
    model, x = Model(lambda m, x: F.relu(m.a(x)), a=linear()), torch.randn(ROWS)
    program = converted(model, x, config)
    with pytest.warns(x86quant.X86QuantWarning, match="nothing in .* is int8"):
        compiled = x86quant.compile(program, (x,))
    assert noise(program(x), compiled(x)) < -120


def test_groups_that_give_floats_are_told() -> None:
    model = Model(lambda m, x: F.hardswish(m.a(x)), a=conv(groups=8))
    x = torch.randn(IMAGE)
    compiled = x86quant.compile(program := converted(model, x), (x,))
    (node, _) = compiled.float_nodes
    assert node.reason == "a convolution with groups that gives floats has no int8 form"
    assert noise(program(x), compiled(x)) < -120


def test_a_program_without_int8_returns_what_it_returned() -> None:
    model, x = nn.Sequential(nn.Conv1d(8, 8, 3)), torch.randn(2, 8, 10)
    program = converted(model, x)  # conv1d is none of its patterns
    with pytest.warns(x86quant.X86QuantWarning, match="nothing in .* is int8"):
        compiled = x86quant.compile(program, (x,))
    assert torch.allclose(compiled(x), program(x), atol=1e-6)

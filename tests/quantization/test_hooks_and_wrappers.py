"""Hooks, and models that something is wrapped around."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.quantization.any_model import Net, images, quantized, sqnr
from x86quant.compiled import CompiledModule
from x86quant.errors import InvalidInputError


def test_hooks_of_layers_run():
    model = Net(lambda _, x: F.relu(x))
    seen: list[float] = []
    model.a.register_forward_hook(lambda m, a, r: (seen.append(1), r * 0.5)[1])
    result = quantized(model, images())
    x = images(seed=1)
    exact = model(x)
    seen.clear()
    assert sqnr(exact, result(x)) > 25
    assert len(seen) == 1


@pytest.mark.parametrize("transformers_own", [False, True])
def test_hooks_that_transformers_collects_by_leave_a_network_whole(transformers_own: bool) -> None:
    """They do nothing unless a model asks; what they then did is in the graph."""

    collected: list[torch.Tensor] | None = None

    def hook(module: nn.Module, args: object, result: torch.Tensor) -> None:
        if collected is not None:
            collected.append(result)

    if transformers_own:
        hook.__module__ = "transformers.utils.output_capturing"

    def collects(model: Net, x: torch.Tensor) -> torch.Tensor:
        nonlocal collected
        collected = []
        result = F.relu(x) + model.inner(x)
        result, collected = result + collected[0], None
        return result

    model = Net(collects)
    model.inner = nn.Sequential(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()))
    model.inner[0].register_forward_hook(hook)
    result = quantized(model.eval(), images())
    assert isinstance(result, CompiledModule) is transformers_own
    x = images(seed=1)
    assert sqnr(model(x), result(x)) > 25


def test_hooks_of_the_model_run_exactly_once():
    model = Net(lambda _, x: F.relu(x))
    seen: list[float] = []
    model.register_forward_pre_hook(lambda m, args: (seen.append("pre"), (args[0] / 3 + 1,))[1])
    model.register_forward_hook(lambda m, a, r: (seen.append("post"), r * 2)[1])
    result = quantized(model, images())
    x = images(seed=1)
    exact = model(x)
    seen.clear()
    assert sqnr(exact, result(x)) > 25
    assert seen == ["pre", "post"]


def test_models_of_torch_compile_are_unwrapped():
    model = Net(lambda _, x: F.relu(x))
    result = quantized(torch.compile(model), images())
    assert isinstance(result, CompiledModule)


def test_script_modules_are_refused():
    model = torch.jit.trace(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), images())
    with pytest.raises(InvalidInputError, match="ScriptModule"):
        quantized(model, images())


def test_pruned_weights() -> None:
    model = Net(lambda _, x: F.relu(x))
    prune.l1_unstructured(model.a, "weight", amount=0.5)
    prune.random_unstructured(model.b, "weight", amount=0.2)
    prune.l1_unstructured(model.b, "bias", amount=1)
    x = images(seed=1)
    exact = model.eval()(x)
    result = quantized(model, images())
    assert isinstance(result, CompiledModule)
    assert sqnr(exact, result(x)) > 25
    assert prune.is_pruned(model)  # the user's own stays as it was
    assert torch.equal(model(x), exact)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_norms_of_weights_by_hooks():
    model = Net(lambda _, x: F.relu(x))
    torch.nn.utils.weight_norm(model.a)
    torch.nn.utils.spectral_norm(model.b)
    model.eval()
    result = quantized(model, images())
    assert isinstance(result, CompiledModule)
    assert sqnr(model(images(seed=1)), result(images(seed=1))) > 25
    assert len(model.a._forward_pre_hooks) == 1  # the model given is not changed


def test_parametrized_layers():
    model = Net(lambda _, x: F.relu(x))
    parametrizations.weight_norm(model.a)
    parametrizations.spectral_norm(model.b)
    model.eval()
    result = quantized(model, images())
    assert sqnr(model(images(seed=1)), result(images(seed=1))) > 25


class ReadsAttributes(Net):
    """A parent that looks at its children, as many in transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 1e6).any()):
            x = x / 2
        x = x.to(self.a.weight.dtype)
        y = self.a(x)[:, :, :: self.a.stride[0]]
        return self.b(y.to(self.b.weight.device)) + self.b.bias.mean()


def test_attributes_of_replaced_layers_can_be_read():
    model = ReadsAttributes(lambda _, x: x)
    result = quantized(model, images())
    assert set(result.quantization.int8_layers) == {"a", "b"}
    assert sqnr(model(images(seed=1)), result(images(seed=1))) > 25

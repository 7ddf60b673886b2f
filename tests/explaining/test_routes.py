"""What ``explain`` and ``repr`` say is what runs: at every call, and after the rules change."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import x86quant
from tests.packs import Problem, packing_for, quantized_weight
from tests.runtime.compiled_models import compiled
from tests.stock_tensors import activation, engine, steps_apart, weight
from x86quant import kernels
from x86quant.dynamic import DynamicLinear, DynamicMultiheadAttention
from x86quant.kernels import all_kernels, dynamic_kernels, graph_kernels
from x86quant.kernels.reference import ReferenceKernel
from x86quant.routing.in_force import routing_in_force
from x86quant.spec import OpSpec
from x86quant.tables.conditions import parse_pattern
from x86quant.tables.table import Rule, RuleTable
from x86quant.tables.table_reader import parse_table

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
Q = torch.ops.quantized


def prefers(*use: str, op: str = "*", **when: object) -> RuleTable:
    kinds, conditions = parse_pattern(op, when)
    last = Rule("*", {}, (*all_kernels(), *graph_kernels()), "", "t#2")
    return RuleTable("t", (Rule(kinds, conditions, use, "said", "t#1"), last))


def conv_pack(w: torch.Tensor) -> object:
    return Q.conv2d_prepack(w, None, [1, 1], [1, 1], [1, 1], 1)


# ---------------------------------------------------------------------------- a new kernel


def test_adding_a_stock_kernel_touches_its_folder_and_the_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fake(ReferenceKernel):  # refuses nothing
        name = "fake"
        engine = "fbgemm"  # its packer

    registry = kernels._register([*all_kernels().values(), Fake()])
    monkeypatch.setattr(kernels, "_KERNELS", registry)
    table = parse_table('schema = 1\nname = "t"\n[[rule]]\nop = "*"\nuse = "fake"\n')
    x, w = activation(2, 8, 6, 6), weight(8, 8, 3, 3, largest=60)
    with engine("x86"), x86quant.enable(), x86quant.use_rules(table):
        pack = conv_pack(w)
        (choice,) = x86quant.explain_pack("conv2d", pack)
    assert (choice.kernel, choice.rule) == ("fake", "t#1")
    with engine("fbgemm"):
        stock = Q.conv2d(x, conv_pack(w), 0.5, 100)
    assert torch.equal(Q.conv2d(x, pack, 0.5, 100).int_repr(), stock.int_repr())


# ---------------------------------------------------------------------------- detours at run time


def test_a_pack_refuses_a_situation_it_does_not_know() -> None:
    with packing_for(all_kernels()["reference"]):
        arguments = (weight(8, 8), None, [-1], ["reference"] * 2)
        with pytest.raises(ValueError, match="unknown situation"):
            torch.ops.x86quant.pack_linear(*arguments, ["eclipse"], [0, 1, -1, 1, 0], "", "", 255)
        with pytest.raises(ValueError, match="starts from"):
            torch.ops.x86quant.pack_linear(*arguments, ["bias"], [1, 1, -1, 1, 0], "", "", 255)
        with pytest.raises(ValueError, match="nothing packs weights"):
            torch.ops.x86quant.pack_linear(
                weight(8, 8), None, [-1], ["nobody"], [], [], "", "", 255
            )


def test_a_bias_that_qnnpack_cannot_hold_runs_on_the_kernel_that_explain_names() -> None:
    tiny = Problem(
        OpSpec("linear", 8, 4),
        torch.zeros(1, 8, dtype=torch.uint8),
        torch.zeros(4, 8, dtype=torch.int8),
        weight_scale=torch.full((4,), 1e-12),
        bias=torch.full((4,), 1e-3),
    )
    with engine("x86"), x86quant.enable(), x86quant.override("qnnpack"):
        pack = Q.linear_prepack(quantized_weight(tiny), tiny.bias)
    (choice,) = x86quant.explain_pack("linear", pack)
    (instead,) = choice.instead
    assert choice.kernel == "qnnpack"
    assert instead.kernel != "qnnpack"
    assert "bias" in instead.when
    x = torch._make_per_tensor_quantized_tensor(tiny.x, tiny.x_scale, 0)
    y = Q.linear(x, pack, tiny.y_scale, 120)
    assert int((y.int_repr().int() - tiny.expected().int()).abs().max()) <= 1
    assert "other kernels run where these cannot" in str(x86quant.explain_pack("linear", pack))


@pytest.mark.parametrize("name", [name for name in all_kernels() if name != "reference"])
def test_a_convolution_that_is_quantized_as_it_runs_is_exact(name: str) -> None:
    """The stock library's own cut the output off at the range of the input."""
    # FBGEMM takes 8 or 16 channels for a group, which a capped CPU does not know to be exact.
    x, w = torch.randn(1, 12, 6, 6), weight(12, 12, 3, 3, largest=60)
    with engine("x86"), x86quant.enable(), x86quant.override(name, op="conv2d"):
        pack = conv_pack(w)
    (choice,) = x86quant.explain_pack("conv2d", pack)
    instead = {other.when: other.kernel for other in choice.instead}
    assert choice.kernel == name
    assert instead["the input is quantized as it runs"] == "reference"
    want = nn.functional.conv2d(x, w.dequantize(), padding=1)
    step = float(x.max() - x.min()) / 255
    largest = float(w.dequantize().abs().sum((1, 2, 3)).max())
    assert float((Q.conv2d_dynamic(x, pack) - want).abs().max()) <= step * largest
    assert float(want.abs().max()) > float(x.abs().max())  # what would be cut off


def test_a_static_module_is_not_explained_for_inputs_that_it_never_gets() -> None:
    conv = torch.ao.nn.quantized.Conv2d(8, 8, 3)
    with engine("x86"), x86quant.enable():
        conv.set_weight_bias(weight(8, 8, 3, 3), None)
        assert not any(
            "as it runs" in one.when for c in x86quant.explain(conv) for one in c.instead
        )
        alone = x86quant.explain_pack("conv2d", conv._packed_params)
    assert all(any("as it runs" in one.when for one in choice.instead) for choice in alone)


def test_a_zero_point_beyond_seven_bits_keeps_all_eight() -> None:
    """Who promised 7 bits and gives a zero point of 200 gets the right answer all the same."""
    w = torch._make_per_channel_quantized_tensor(
        torch.full((128, 1, 3, 3), 127, dtype=torch.int8),
        torch.full((128,), 0.01, dtype=torch.double),
        torch.zeros(128, dtype=torch.long),
        0,
    )
    codes = torch.randint(0, 256, (1, 128, 6, 6), dtype=torch.uint8)
    x = torch._make_per_tensor_quantized_tensor(codes, 0.05, 200)
    with (
        engine("x86"),
        x86quant.enable(saturation="7bit"),
        x86quant.override("fbgemm", op="conv2d", activation_max=127),
    ):
        pack = Q.conv2d_prepack(w, None, [1, 1], [1, 1], [1, 1], 128)
    (choice,) = x86quant.explain_pack("conv2d", pack)
    assert choice.kernel == "fbgemm"
    assert any(other.when.startswith("the input's zero point") for other in choice.instead)
    y = Q.conv2d(x, pack, 10.0, 100)
    want = nn.functional.conv2d(x.dequantize(), w.dequantize(), padding=1, groups=128)
    assert steps_apart(y, torch.quantize_per_tensor(want, 10.0, 100, torch.quint8)) <= 1


def test_outputs_of_an_awkward_width_run_on_the_kernel_that_explain_names() -> None:
    """oneDNN mixes up rows one column wide, with a stride, on AMX; it is not asked anywhere."""
    spec = OpSpec(
        "conv2d", 16, 16, 1, (3, 3), (1, 2), (1, 1), (1, 1), (0, 0), per_channel=False, batch=1
    )
    generator = torch.Generator().manual_seed(0)
    w = torch.randint(-60, 61, (16, 16, 3, 3), generator=generator).to(torch.int8)
    for width, instead in ((2, True), (4, False)):
        x = torch.randint(0, 256, (1, 16, 9, width), generator=generator).to(torch.uint8)
        problem = Problem(spec.replace(spatial=(9, width), bias=False), x, w, x_zero_point=101)
        with engine("x86"), x86quant.enable(), x86quant.override("onednn", op="conv2d"):
            pack = Q.conv2d_prepack(quantized_weight(problem), None, [1, 2], [1, 1], [1, 1], 1)
        (choice,) = x86quant.explain_pack("conv2d", pack)
        assert choice.kernel == "onednn"
        found = {other.when: other.kernel for other in choice.instead}
        assert found["the output is 1 wide"] != "onednn"
        y = Q.conv2d(
            torch._make_per_tensor_quantized_tensor(x, 0.02, 101), pack, problem.y_scale, 120
        )
        assert int((y.int_repr().int() - problem.expected().int()).abs().max()) <= 1, instead


# ---------------------------------------------------------------------------- rules that change


def test_explain_of_stock_packs_says_what_is_packed_until_rerouted() -> None:
    with engine("x86"), x86quant.enable():
        with x86quant.use_rules(prefers("qnnpack")):
            model = nn.Sequential(torch.ao.nn.quantized.Linear(16, 8))
            # Weights that are legal for every kernel on every CPU; those it comes with are not set.
            model[0].set_weight_bias(
                torch.quantize_per_tensor(torch.ones(8, 16), 1, 0, torch.qint8), None
            )
        with x86quant.use_rules(prefers("fbgemm")):
            assert x86quant.explain(model)[0].kernel == "qnnpack"
            assert x86quant.explain(x86quant.reroute(model))[0].kernel == "fbgemm"
        assert x86quant.explain(model)[0].kernel == "fbgemm"


def test_explain_and_repr_of_dynamic_linears_say_what_is_packed_until_rerouted() -> None:
    model, x = nn.Sequential(DynamicLinear.from_float(nn.Linear(16, 8))), torch.randn(3, 16)
    want = model(x)
    with x86quant.override("reference", op="linear", dynamic=True):
        assert "kernel=native" in repr(model)
        assert x86quant.explain(model)[0].kernel == "native"
        x86quant.reroute(model)
        assert torch.allclose(model(x), want, atol=1e-4)
        assert "kernel=reference" in repr(model)
    assert x86quant.explain(model)[0].kernel == "reference"
    with torch.no_grad():
        model[0].int8_weight.zero_()  # packed again at the next call, by the rules then
    assert x86quant.explain(model)[0].kernel == "native"


def test_the_parts_of_an_attention_are_explained_and_rerouted() -> None:
    attention = DynamicMultiheadAttention.from_float(nn.MultiheadAttention(16, 2))
    q, k = torch.randn(3, 1, 16), torch.randn(5, 1, 16)
    attention(q, k, k)
    model = nn.ModuleDict({"attention": attention})
    with x86quant.override("reference", op="linear", dynamic=True):
        x86quant.reroute(model)
        attention(q, k, k)
        kernels_of = {c.layer: c.kernel for c in x86quant.explain(model)}
    assert kernels_of["attention.in_proj.q"] == kernels_of["attention.out_proj"] == "reference"


def test_explain_of_a_compiled_model_says_what_is_planned_until_rerouted() -> None:
    module = compiled(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)), 1, 16, 8, 8)
    x = torch.randn(1, 16, 8, 8)
    want = module(x)
    (layer,) = (c for c in x86quant.explain(module, (x,)) if c.op == "conv")
    spec = OpSpec(
        "conv2d", 16, 16, 1, (3, 3), (1, 1), (1, 1), (1, 1), (0, 0),
        dynamic=False, post_op="none", batch=1, rows=64, spatial=(8, 8), caller="graph",
    )  # fmt: skip
    refused = routing_in_force(graph_kernels()).refusals(spec)
    other = next(
        (name for name in graph_kernels() if name not in refused and name != layer.kernel), None
    )
    if other is None or not x86quant.cpu().vnni:
        pytest.skip("one kernel alone runs this layer on this CPU, whatever its weights")
    with x86quant.override(other, caller="graph"):
        assert [c.kernel for c in x86quant.explain(module, (x,)) if c.op == "conv"] == [
            layer.kernel
        ]
        x86quant.reroute(module)
        assert float((module(x) - want).abs().max()) < 0.1
    assert [c.kernel for c in x86quant.explain(module, (x,)) if c.op == "conv"] == [other]


# ---------------------------------------------------------------------------- scrambled tables


@pytest.mark.parametrize("order", list(itertools.permutations(graph_kernels())), ids=",".join)
def test_compiled_models_under_scrambled_tables(order: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1, groups=4), nn.Conv2d(16, 4, 1),
        nn.Flatten(), nn.Linear(64, 12),
    )  # fmt: skip
    module, x = compiled(model, 2, 8, 8, 8), torch.randn(2, 8, 8, 8)
    want = module.graph_module(x)
    with x86quant.use_rules(prefers(*order)):
        got = x86quant.CompiledModule(module.graph_module)(x)
    assert float((got - want).abs().max()) <= float(want.max() - want.min()) / 50


@pytest.mark.parametrize("order", list(itertools.permutations(dynamic_kernels())), ids=",".join)
def test_dynamic_linears_under_scrambled_tables(order: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    layer, x = DynamicLinear.from_float(nn.Linear(24, 8)), torch.randn(5, 24)
    want = layer(x)
    step = float(x.max() - x.min()) / 255
    largest = float((layer.weight_scale * layer.int8_weight.abs().sum(1)).max())
    with x86quant.use_rules(prefers(*order, op="linear", rows="<= 2")):
        x86quant.reroute(layer)
        for rows in (1, 2, 5):
            assert float((layer(x[:rows]) - want[:rows]).abs().max()) <= step * largest

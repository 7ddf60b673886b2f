"""Each pass alone: what it rewrites, what it must leave, and that results stay the same."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Node

from x86quant.lowering.from_fx import from_fx
from x86quant.lowering.graph_tools import is_op, op_name
from x86quant.lowering.passes import PASSES, Pass, name_of, run_passes

IMAGE = torch.linspace(-4, 4, 2 * 4 * 6 * 6).sin().mul(3).reshape(2, 4, 6, 6)
STEP = 0.05


def q(x: torch.Tensor, scale: float = STEP, zero_point: int = 128) -> torch.Tensor:
    """Quantize and dequantize, the way a reference model does."""
    return torch.quantize_per_tensor(x, scale, zero_point, torch.quint8).dequantize()


def weight_qparams(channels: int) -> dict[str, object]:
    return {
        "qscheme": torch.per_channel_affine,
        "dtype": torch.qint8,
        "scale": torch.linspace(0.004, 0.009, channels),
        "zero_point": torch.zeros(channels, dtype=torch.int),
        "axis": 0,
    }


def conv(inputs: int = 4, outputs: int = 4, kernel: int = 3, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Conv2d(inputs, outputs, kernel, **{"padding": kernel // 2, **more})
    return nnqr.Conv2d.from_float(layer, weight_qparams(outputs))


def linear(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nnqr.Linear.from_float(nn.Linear(inputs, outputs), weight_qparams(outputs))


class Net(nn.Module):
    """A reference model written as a function of its input and its layers."""

    def __init__(self, body: Callable[..., torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(q(x), *self.layers)


def canonical(
    body: Callable[..., torch.Tensor], *layers: nn.Module, x: torch.Tensor = IMAGE
) -> GraphModule:
    return from_fx(Net(body, *layers).eval(), (x,))


def changes(gm: GraphModule, name: str) -> int:
    """Run the passes up to and including ``name``; how much that one changed."""
    index = [name_of(one) for one in PASSES].index(name)
    return run_passes(gm, PASSES[: index + 1])[-1].changed


def kinds(gm: GraphModule) -> collections.Counter[str]:
    """How many of each op, other than those at the ends: quantize, dequantize, contiguous."""
    calls = [n for n in gm.graph.nodes if n.op.startswith("call_")]
    names = [
        op_name(n) if is_op(n) else str(getattr(n.target, "__name__", n.target)) for n in calls
    ]
    ends = collections.Counter(quantize=1, dequantize=1, contiguous=1)
    return collections.Counter(names) - ends


def find(gm: GraphModule, name: str) -> Node:
    (node,) = (n for n in gm.graph.nodes if is_op(n, name))
    return node


def difference(
    body: Callable[..., torch.Tensor], gm: GraphModule, *layers: nn.Module, x: torch.Tensor = IMAGE
) -> float:
    """Largest difference to the reference, in reals."""
    with torch.no_grad():
        return float((Net(body, *layers).eval()(x) - gm(x)).abs().max())


# What each pass does to the smallest model that needs it:
# (pass, model, layers, ops that the graph ends with)
CASES: list[tuple[str, Callable[..., torch.Tensor], list[nn.Module], dict[str, int]]] = [
    ("lower_convolution", lambda x, c: q(c(x)), [conv()], {"conv": 1}),
    ("lower_convolution", lambda x, c: q(F.relu(c(x))), [conv()], {"conv": 1}),
    ("lower_residual", lambda x, c: q(F.relu(x + c(x))), [conv()], {"conv": 1}),
    ("lower_residual", lambda x, f: q(f(x) + x), [linear(6, 6)], {"linear": 1}),
    ("lower_linear", lambda x, f: q(F.relu6(f(x))), [linear(6, 3)], {"linear": 1}),
    (
        "lower_affine",
        lambda x, b: q(F.relu(b(x))),
        [nn.BatchNorm2d(4).eval()],
        {"affine": 1},
    ),
    ("lower_binary", lambda x: q(F.relu(x + q(x, 0.1))), [], {"add": 1}),
    ("lower_binary", lambda x: q(x * q(x, 0.13)), [], {"mul": 1, "requantize": 1}),
    ("lower_layer_norm", lambda x, n: q(n(x)), [nn.LayerNorm(6)], {"layer_norm": 1}),
    ("lower_pool", lambda x: q(F.avg_pool2d(x, 2)), [], {"avg_pool": 1}),
    ("lower_pool", lambda x: q(F.adaptive_avg_pool2d(x, 2)), [], {"adaptive_avg_pool": 1}),
    ("lower_upsample", lambda x: q(F.interpolate(x, scale_factor=2)), [], {"upsample": 1}),
    ("lower_unary", lambda x: q(F.gelu(x)), [], {"lut": 1}),
    ("lower_unary", lambda x: q(torch.sigmoid(x) * 2 + 1), [], {"lut": 1}),
    ("look_up_reals", lambda x: F.gelu(x), [], {"lut_real": 1}),
    ("look_up_reals", lambda x: x * torch.sigmoid(x), [], {"lut_real": 1}),
    ("look_up_reals", lambda x: F.softmax(F.silu(x), 1), [], {"lut_real": 1, "softmax": 1}),
]


@pytest.mark.parametrize(("name", "body", "layers", "expected"), CASES)
def test_a_float_op_between_quantized_tensors_becomes_one_op(
    name: str,
    body: Callable[..., torch.Tensor],
    layers: list[nn.Module],
    expected: dict[str, int],
) -> None:
    gm = canonical(body, *layers)
    assert changes(gm, name) == 1
    run_passes(gm)
    assert kinds(gm) == expected
    assert difference(body, gm, *layers) <= STEP * 1.001


def test_max_pool_moves_onto_the_codes() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return q(F.max_pool2d(x, 3, 2, 1))

    gm = canonical(body)
    assert changes(gm, "lower_pool") == 1
    run_passes(gm)
    assert kinds(gm) == {"max_pool": 1}
    assert difference(body, gm) == 0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda x, c: q(F.max_pool2d(F.relu(c(x)), 2)), {"conv": 1, "max_pool": 1}),
        (lambda x, c: q(torch.cat([c(x), x], 1)), {"conv": 1, "cat": 1}),
        (lambda x, c: q(F.interpolate(c(x), scale_factor=2)), {"conv": 1, "upsample": 1}),
        (
            lambda x, c: q(F.max_pool2d(c(x), 2).flatten(1)),
            {"conv": 1, "max_pool": 1, "flatten": 1},
        ),
    ],
)
def test_a_layer_ends_in_codes_before_what_only_moves_them(
    body: Callable[..., torch.Tensor], expected: dict[str, int]
) -> None:
    """As PT2E leaves it: quantized where the next layer reads."""
    layer = conv()
    gm = canonical(body, layer)
    assert changes(gm, "hoist_quantize") >= 1
    run_passes(gm)
    assert kinds(gm) == expected
    assert difference(body, gm, layer) == 0


def test_sizes_are_those_of_the_codes_and_no_function_is_computed_for_them() -> None:
    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        y = F.silu(q(c(x)))
        return q(y).reshape(y.shape[0], y.shape[2], -1)

    layer = conv()
    gm = canonical(body, layer)
    run_passes(gm)
    assert kinds(gm)["conv"] == 1
    assert torch.ops.aten.silu.default not in {node.target for node in gm.graph.nodes}
    assert difference(body, gm, layer) <= STEP * 1.001


def test_a_value_quantized_twice_ends_in_the_wider_codes() -> None:
    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        y = F.relu(c(x))
        wide, narrow = q(y, 0.05, 100), torch.cat([y, x], 1)
        return wide.mean() + q(narrow, 0.04, 60)

    layer = conv()
    gm = canonical(body, layer)
    assert changes(gm, "hoist_quantize") == 2
    run_passes(gm)
    assert kinds(gm)["conv"] == 1
    assert difference(body, gm, layer) <= 0.04 * 1.001


def test_a_value_quantized_twice_stays_float_where_codes_would_not_reach() -> None:
    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        y = c(x)
        return q(y, 0.05, 0).mean() + q(y, 0.04, 200)  # only the other has negative codes

    layer = conv()
    gm = canonical(body, layer)
    assert changes(gm, "hoist_quantize") == 0
    assert difference(body, gm, layer) <= 1e-5


def test_mean_over_positions_is_a_pool() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return q(x.mean([2, 3]))

    gm = canonical(body)
    assert changes(gm, "lower_mean") == 1
    assert kinds(gm) == {"adaptive_avg_pool": 1, "flatten": 1}
    assert difference(body, gm) <= STEP * 1.001


@pytest.mark.parametrize(("dims", "keepdim"), [((2,), True), ((-1,), False), ((3,), True)])
def test_mean_over_some_positions_is_a_pool(dims: tuple[int, ...], keepdim: bool) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return q(x.mean(dims, keepdim))

    gm = canonical(body)
    assert changes(gm, "lower_mean") == 1
    run_passes(gm)
    assert kinds(gm) == ({"adaptive_avg_pool": 1} | ({} if keepdim else {"squeeze": 1}))
    assert difference(body, gm) <= STEP * 1.001


@pytest.mark.parametrize(("dims", "keepdim"), [((2, 3), True), ((-1,), True), ((3, 2), False)])
def test_maximum_over_positions_is_a_pool(dims: tuple[int, ...], keepdim: bool) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return q(torch.amax(x, dims, keepdim))

    gm = canonical(body)
    assert changes(gm, "lower_maximum") == 1
    run_passes(gm)
    assert kinds(gm) == ({"adaptive_max_pool": 1} | ({} if keepdim else {"squeeze": 1}))
    assert difference(body, gm) == 0


def test_a_maximum_over_channels_stays_in_float() -> None:
    gm = canonical(lambda x: q(x.amax(1)))
    assert changes(gm, "lower_maximum") == 0
    (largest,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.amax.default)
    assert "not over positions" in largest.meta["why"]


def test_a_mean_over_one_axis_stays_in_float() -> None:
    gm = canonical(lambda x: q(x.mean(1)))
    assert changes(gm, "lower_mean") == 0
    (mean,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.mean.dim)
    assert "not over positions alone" in mean.meta["why"]


def test_lower_cat_keeps_each_inputs_qparams() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return q(torch.cat([x, q(x, 0.13, 10)], 1))

    gm = canonical(body)
    assert changes(gm, "lower_cat") == 1
    assert find(gm, "cat").kwargs["x_scales"] == pytest.approx([0.05, 0.13])
    assert difference(body, gm) <= STEP * 1.001


def test_constants_are_computed_once() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([1.0, 2, 3, 4]).reshape(4, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return q(q(x) * q(self.scale))

    gm = from_fx(Scaled(), (IMAGE,))
    assert changes(gm, "fold_constants") == 2  # quantize and dequantize of the scale
    run_passes(gm)
    assert kinds(gm) == {"affine": 1}
    assert float((gm(IMAGE) - Scaled()(IMAGE)).abs().max()) <= STEP * 1.001


def test_a_list_of_constants_is_taken_apart_once() -> None:
    """As the weights of a fusion of feature maps are, which its code goes through."""
    weights = nn.Parameter(torch.tensor([1.0, 3.0]))

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = weights

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = torch.ops.aten.unbind.int(torch.ops.aten.relu.default(self.weights))
            return q(q(x) * first + second)

    gm = from_fx(Fused(), (IMAGE,))
    assert changes(gm, "fold_constants") == 3
    assert float((gm(IMAGE) - Fused()(IMAGE)).abs().max()) <= STEP * 1.001


_GROUP_NORMS = (F.group_norm, torch.ops.aten.group_norm.default)


@pytest.mark.parametrize(
    ("norm", "count"),
    [
        (nn.InstanceNorm2d(4, affine=True), 2),
        (nn.InstanceNorm2d(4), 2),
        (nn.InstanceNorm2d(4, track_running_stats=True), 0),
    ],
)
def test_an_instance_norm_is_a_group_norm(norm: nn.Module, count: int) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(q(x)) + self.norm(x)

    model = Normed().eval()
    gm = from_fx(model, (IMAGE,))
    run_passes(gm)
    norms = [node for node in gm.graph.nodes if node.target in _GROUP_NORMS]
    assert len(norms) == count
    gm.recompile()
    torch.testing.assert_close(gm(IMAGE), model(IMAGE), rtol=1e-4, atol=1e-4)


def settled_norm() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(4).eval()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, -0.5, 2.0, 0.0]))
        norm.bias.copy_(torch.tensor([0.1, 0.2, -0.3, 0.4]))
        norm.running_var.copy_(torch.tensor([1.0, 0.5, 2.0, 1.0]))
    return norm


def test_batch_norm_after_a_convolution_is_folded_even_with_negative_factors() -> None:
    def body(x: torch.Tensor, c: nn.Module, b: nn.Module) -> torch.Tensor:
        return q(b(c(x)))

    layers = (conv(), settled_norm())
    gm = canonical(body, *layers)
    assert changes(gm, "fold_batch_norm") == 1
    run_passes(gm)
    assert kinds(gm) == {"conv": 1}
    assert difference(body, gm, *layers) <= STEP * 1.001


def test_views_move_below_the_dequantize() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.size()
        shuffled = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        left, _ = shuffled.chunk(2, 1)
        return q(F.pad(left[:, :, 1:], (1, 2)).flatten(1))

    gm = canonical(body)
    # size, two views, transpose, chunk, slice, pad, flatten
    assert changes(gm, "views_on_codes") == 8
    run_passes(gm)
    assert not [n for n in gm.graph.nodes if is_op(n, "requantize")]
    # Another shape, and the padding: both come out as the reference has them.
    other = torch.randn(3, 4, 8, 5)
    assert torch.equal(gm(other), Net(body)(other))


def test_dequantize_quantize_pairs_vanish_or_become_requantize() -> None:
    same = canonical(lambda x: q(x))
    assert changes(same, "remove_float_pairs") == 1
    assert not kinds(same)
    other = canonical(lambda x: q(x, 0.2, 7))
    assert changes(other, "remove_float_pairs") == 1
    assert kinds(other) == {"requantize": 1}


def test_fuse_clamp_moves_a_relu_into_the_op_before_its_quantize() -> None:
    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        return q(F.relu6(q(c(x))), 0.04, 20)

    gm = canonical(body, conv())
    assert changes(gm, "fuse_clamp") == 1
    assert kinds(gm) == {"conv": 1}
    node = find(gm, "conv")
    assert (node.kwargs["lo"], node.kwargs["hi"]) == (20, 20 + 150)
    assert difference(body, gm, conv()) <= STEP * 1.001


def test_fuse_clamp_leaves_a_result_that_others_read() -> None:
    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        y = q(c(x))
        return q(y + q(F.relu(y)))

    gm = canonical(body, conv())
    assert changes(gm, "fuse_clamp") == 0


def test_fuse_clamp_leaves_a_clamp_that_a_float_op_reads_too() -> None:
    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        y = F.relu(q(c(x)))
        return q(torch.cumsum(y, 1), 0.2) + q(y, 0.02, 0)

    gm = canonical(body, conv())
    assert changes(gm, "fuse_clamp") == 0
    run_passes(gm)
    assert difference(body, gm, conv()) <= 0.2 * 1.001


def test_a_tanh_table_equals_the_float_op_on_every_code() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return q(torch.tanh(x), 2 / 255, 128)

    every = (torch.arange(256.0) - 128) * STEP
    gm = canonical(body, x=every)
    assert changes(gm, "lower_unary") == 1
    assert difference(body, gm, x=every) == 0


def test_a_parameter_per_channel_is_no_table() -> None:
    gm = canonical(lambda x, p: q(p(x)), nn.PReLU(4))
    assert changes(gm, "lower_unary") == 0


def test_permutes_around_norm_and_linear_cancel() -> None:
    def body(x: torch.Tensor, n: nn.Module, f: nn.Module) -> torch.Tensor:
        y = q(n(q(x.permute(0, 2, 3, 1))))
        return q(q(f(y)).permute(0, 3, 1, 2))

    layers = (nn.LayerNorm(4), linear(4, 5))
    gm = canonical(body, *layers)
    assert changes(gm, "sink_permutes") == 3
    assert kinds(gm) == {"layer_norm": 1, "conv": 1}
    assert find(gm, "layer_norm").kwargs["axis"] == 1
    assert difference(body, gm, *layers) <= STEP * 1.001


def test_requantize_moves_into_its_producer() -> None:
    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        return q(q(F.relu(c(x)), 0.05, 0), 0.06, 10)

    gm = canonical(body, conv())
    assert changes(gm, "fuse_requantize") == 1
    assert kinds(gm) == {"conv": 1}
    # The ReLU was the end of the range; in the new codes it is a bound of its own.
    assert find(gm, "conv").kwargs["lo"] == 10
    assert difference(body, gm, conv()) <= 0.06 * 1.001


def test_requantize_moves_into_the_sums_that_read_it_but_not_into_convolutions() -> None:
    summed = canonical(lambda x: q(q(x, 0.2, 7) + q(x, 0.1, 9)))
    assert changes(summed, "fuse_requantize") == 2
    assert kinds(summed) == {"add": 1}
    convolved = canonical(lambda x, c: q(c(q(x, 0.2, 7))), conv())
    assert changes(convolved, "fuse_requantize") == 0


def test_affine_after_a_layer_moves_into_its_scales() -> None:
    def body(x: torch.Tensor, c: nn.Module, b: nn.Module) -> torch.Tensor:
        return q(F.relu(b(q(c(x)))))

    layers = (conv(), settled_norm())
    gm = canonical(body, *layers)
    assert changes(gm, "fuse_affine") == 1
    assert kinds(gm) == {"conv": 1}
    assert find(gm, "conv").kwargs["lo"] == 128
    assert difference(body, gm, *layers) <= STEP * 1.001


def test_affine_along_another_axis_stays() -> None:
    rows = torch.tensor([1.0, 2.0, 0.5, -1.0, 0.0, 1.5]).reshape(6, 1)

    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        return q(q(c(x)) * c.rows)

    layer = conv(outputs=6)
    layer.register_buffer("rows", rows)
    gm = canonical(body, layer)
    assert changes(gm, "fuse_affine") == 0
    assert kinds(gm) == {"conv": 1, "affine": 1}
    assert difference(body, gm, layer) <= STEP * 1.001


def test_grouped_transposed_convolutions_repeat_their_scales() -> None:
    torch.manual_seed(0)
    layer = nnqr.ConvTranspose2d.from_float(
        nn.ConvTranspose2d(4, 6, 3, groups=2), {**weight_qparams(3), "axis": 1}
    )

    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        return q(c(x))

    gm = canonical(body, layer)
    assert changes(gm, "lower_convolution") == 1
    assert difference(body, gm, layer) <= STEP * 1.001


def test_residual_and_relu_move_into_the_later_convolution() -> None:
    def body(x: torch.Tensor, a: nn.Module, b: nn.Module) -> torch.Tensor:
        return q(F.relu(q(a(x)) + q(b(q(F.relu(a(x)))))))

    layers = (conv(), conv())
    gm = canonical(body, *layers)
    assert changes(gm, "fuse_residual") == 1
    assert kinds(gm) == {"conv": 3}
    last = [n for n in gm.graph.nodes if is_op(n, "conv")][-1]
    assert last.kwargs["residual"] is not None
    assert last.kwargs["lo"] == 128
    assert difference(body, gm, *layers) <= STEP * 1.001


@pytest.mark.parametrize("zero_point", [0, 128])
def test_a_relu_between_layer_and_sum_is_never_lost(zero_point: int) -> None:
    """With zero point 0 the ReLU is the end of the range and no code tells of it."""

    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        return q(x + q(F.relu(c(x)), STEP, zero_point))

    gm = canonical(body, conv())
    assert changes(gm, "fuse_residual") == 0
    assert difference(body, gm, conv()) <= STEP * 1.001


def test_a_broadcast_sum_is_no_residual() -> None:
    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        return q(x + q(c(q(F.adaptive_avg_pool2d(x, 1)))))

    gm = canonical(body, conv(kernel=1))
    assert changes(gm, "fuse_residual") == 0


def test_tables_move_into_layers_and_into_each_other() -> None:
    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        return q(torch.tanh(q(F.silu(q(c(x))))), 2 / 255)

    gm = canonical(body, conv())
    assert changes(gm, "fuse_table") == 2
    assert kinds(gm) == {"conv": 1}
    assert difference(body, gm, conv()) <= STEP * 1.001


def test_producers_of_a_cat_yield_its_qparams() -> None:
    def body(x: torch.Tensor, a: nn.Module, b: nn.Module) -> torch.Tensor:
        return q(torch.cat([q(F.relu(a(x)), 0.02, 0), q(b(x), 0.07, 99), x], 1))

    layers = (conv(), conv())
    gm = canonical(body, *layers)
    # The input is read by others too and keeps its qparams (which the cat's happen to be).
    assert changes(gm, "unify_cat") == 2
    cat = find(gm, "cat")
    assert set(cat.kwargs["x_scales"]) == {cat.kwargs["out_scale"]}  # type: ignore[arg-type]
    # One step of the coarsest intermediate result, and none of them clips here.
    assert difference(body, gm, *layers) <= 0.07 * 1.001


def test_a_cat_of_one_scale_starts_with_the_cat_before_it() -> None:
    def body(x: torch.Tensor, a: nn.Module, b: nn.Module) -> torch.Tensor:
        features = [q(x)]
        for layer in (a, b):
            features.append(q(layer(q(F.relu(q(torch.cat(features, 1)))))))
        both = q(torch.cat(features, 1))
        other = q(torch.cat(features, 1), 1.7 * STEP)  # of another scale: stays as it is
        return torch.cat([both, other], 1)

    layers = (conv(4), conv(8))
    gm = canonical(body, *layers)
    assert changes(gm, "nest_cats") == 2
    lengths = [len(n.kwargs["xs"]) for n in gm.graph.nodes if is_op(n, "cat")]  # type: ignore[arg-type]
    assert sorted(lengths) == [1, 2, 2, 3]
    assert difference(body, gm, *layers) <= 1e-6


def test_weights_of_float_layers_are_dequantized_once() -> None:
    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        return c(x)  # its result is never quantized

    gm = canonical(body, conv(groups=4))
    assert changes(gm, "fold_float_weights") == 1
    assert not [n for n in gm.graph.nodes if is_op(n, "dequantize_weight")]
    assert difference(body, gm, conv(groups=4)) < 1e-5
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.convolution.default)
    assert "with groups that gives floats" in node.meta["why"]


@pytest.mark.parametrize(
    ("body", "layer", "expected"),
    [
        (lambda x, c: c(x), conv(), ["conv_real"]),
        (lambda x, c: F.silu(c(x)), conv(stride=2, dilation=2), ["conv_real"]),
        (lambda x, c: q(F.silu(c(x))), conv(kernel=2), ["conv_real"]),
        (lambda x, c: c(x).relu(), conv(kernel=1), ["conv_real"]),
        (lambda x, c: (y := c(x)) * torch.sigmoid(y), conv(kernel=1, stride=2), None),
        (lambda x, f: F.gelu(f(x)), linear(6, 3), ["linear_real"]),
        (lambda x, f: q(F.elu(f(x))) + 1, linear(6, 3), ["linear_real"]),
    ],
)
def test_products_whose_results_are_not_quantized_give_floats(
    body: Callable[..., torch.Tensor], layer: nn.Module, expected: list[str] | None
) -> None:
    gm = canonical(body, layer)
    assert changes(gm, "give_floats") == 1
    run_passes(gm)
    names = [op_name(n) for n in gm.graph.nodes if is_op(n, "conv_real", "linear_real")]
    assert names == (expected or ["conv_real"])
    assert not [n for n in gm.graph.nodes if n.target is torch.ops.aten.convolution.default]
    rounded = any(is_op(n, "quantize") for n in list(gm.graph.nodes)[2:])
    assert difference(body, gm, layer) <= (STEP * 1.001 if rounded else 1e-5)


def test_a_float_result_read_twice_is_refused_with_its_readers() -> None:
    def body(x: torch.Tensor, c: nn.Module) -> torch.Tensor:
        y = c(x)
        return q(y) + y

    gm = canonical(body, conv())
    assert changes(gm, "lower_convolution") == 0
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.convolution.default)
    assert "used more than once" in node.meta["why"]


@pytest.mark.parametrize("one", PASSES, ids=name_of)
def test_a_pass_has_nothing_left_to_do_the_second_time(one: Pass) -> None:
    def body(x: torch.Tensor, a: nn.Module, b: nn.Module) -> torch.Tensor:
        y = q(F.relu(q(a(x)) + x))
        return q(torch.cat([q(F.silu(q(b(y)))), F.max_pool2d(y, 3, 1, 1)], 1)).flatten(1)

    gm = canonical(body, conv(), conv())
    run_passes(gm)
    assert one(gm) == 0


def test_every_pass_says_what_it_does_in_one_line() -> None:
    for report in run_passes(canonical(lambda x: q(x))):
        assert report.description.endswith(".") or "becom" in report.description, report
        assert str(report).startswith(report.name)

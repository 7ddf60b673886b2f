"""Row codes and attention as steps of a program: the bytes of the ops, in one native call."""

from __future__ import annotations

import copy
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import x86quant
from tests.isa import LEVELS, coded_keys, has, in_bfloat16
from tests.row_samples import NORM, QKV, SAMPLES, WEIGHT, floats, int8s
from tests.serving.served import Served
from tests.torch_threads import threads_of
from x86quant.compiled.module import CompiledModule
from x86quant.ops.cache_codes import cache_codes
from x86quant.ops.rows import CODES, NORMED, TOTAL
from x86quant.profiling.recorder import record

ops = torch.ops.x86quant

#: What a graph holds as constants; all else are inputs.
_CONSTANT = ("weight", "weight_scale", "bias", "gate", "up", "norm_weight", "norm_bias", "order")


#: Tokens of a sentence.
_SEQUENCE = 6


class _Net:
    """A graph under construction."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.root = nn.Module()

    def input(self, name: str) -> Any:
        return self.graph.placeholder(name)

    def constant(self, tensor: torch.Tensor) -> Any:
        name = f"c{len(list(self.root.buffers()))}"
        self.root.register_buffer(name, tensor)
        return self.graph.get_attr(name)

    def call(self, op: str, **kwargs: Any) -> Any:
        given = {
            k: self.constant(v) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()
        }
        return self.graph.call_function(getattr(ops, op).default, (), given)

    def items(self, node: Any, *numbers: int) -> list[Any]:
        return [self.graph.call_function(operator.getitem, (node, n)) for n in numbers]

    def rows(self, x: Any) -> dict[str, Any]:
        names = ("codes", "scale", "zero_point")
        found = self.items(self.call("quantize_rows", x=x), 0, 1, 2)
        return dict(zip(names, found, strict=True))

    def compiled(self, *outputs: Any) -> CompiledModule:
        self.graph.output(outputs)
        return CompiledModule(GraphModule(self.root, self.graph).eval())


def _steps(module: CompiledModule) -> list[list[str]]:
    """The ops of each segment's latest plan."""
    return [[step.op for step in segment.plans[-1].steps] for segment in module.segments]


def _same(module: CompiledModule, *inputs: Any) -> None:
    """Assert that what runs gives the bytes of the graph's own ops."""
    with torch.no_grad():
        actual, expected = module(*inputs), module.graph_module(*inputs)
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def _layer(net: _Net, x: Any, heads: int = 4, size: int = 8, mask: Any = None) -> Any:
    """A block of an encoder: attention and feed-forward, with norms after each."""
    width = heads * size
    view = torch.ops.aten.reshape.default
    total = net.call(
        "norm_rows", x=x, residual=None, norm_weight=floats(width), norm_bias=None, eps=1e-5,
        kind="layer", outputs=NORMED | CODES,
    )  # fmt: skip
    normed, *codes = net.items(total, 1, 2, 3, 4)
    given = dict(zip(("codes", "scale", "zero_point"), codes, strict=True))
    parts = net.call("linear_rows", **given, **_weights(3 * width, width), activation=None)
    heads_of = [
        net.graph.call_function(
            view,
            (
                net.graph.call_function(
                    torch.ops.aten.slice.Tensor, (parts, -1, i * width, (i + 1) * width)
                ),
                [-1, _SEQUENCE, heads, size],
            ),
        )
        for i in range(3)
    ]  # fmt: skip
    attended = net.call(
        "attention_rows", **dict(zip("qkv", heads_of, strict=True)), mask=mask, causal=mask is None,
        scale=0.35,
    )  # fmt: skip
    given = dict(zip(("codes", "scale", "zero_point"), net.items(attended, 0, 1, 2), strict=True))
    more = net.call(
        "linear_rows_norm", **given, **_weights(width, width), residual=normed,
        norm_weight=floats(width), norm_bias=floats(width), eps=1e-6, kind="rms",
        outputs=TOTAL | CODES,
    )  # fmt: skip
    total, *codes = net.items(more, 0, 2, 3, 4)
    given = dict(zip(("codes", "scale", "zero_point"), codes, strict=True))
    gate, up = _weights(2 * width, width), _weights(2 * width, width)
    names = {"weight": "weight", "weight_scale": "scale", "bias": "bias"}
    gated = net.call(
        "gated_rows_rows", **given, activation="silu",
        **{f"gate_{names[k]}": v for k, v in gate.items()},
        **{f"up_{names[k]}": v for k, v in up.items()},
    )  # fmt: skip
    given = dict(zip(("codes", "scale", "zero_point"), net.items(gated, 0, 1, 2), strict=True))
    wide = net.call("linear_rows_rows", **given, **_weights(width, 2 * width), activation="gelu")
    given = dict(zip(("codes", "scale", "zero_point"), net.items(wide, 0, 1, 2), strict=True))
    last = net.call(
        "linear_rows_norm", **given, **_weights(width, width), residual=total, norm_weight=None,
        norm_bias=None, eps=1e-5, kind="layer", outputs=NORMED,
    )  # fmt: skip
    return net.items(last, 1)[0]


def _weights(n: int, k: int) -> dict[str, Any]:
    return {"weight": int8s(n, k), "weight_scale": torch.rand(n) / 300, "bias": floats(n)}


def test_blocks_are_one_native_call() -> None:
    net = _Net()
    x = net.input("x")
    module = net.compiled(_layer(net, _layer(net, x)))
    for batch in (1, 3, 2):
        _same(module, floats(batch, _SEQUENCE, 32))
    (steps,) = _steps(module)
    assert len(steps) == 2 * 8
    assert steps.count("gated_rows_rows") == 2
    (segment,) = module.segments
    assert len(segment.plans) == 3


def test_blocks_in_a_program_file(tmp_path: Path) -> None:
    """Packed weights of rows, gates, norms and attention, as C++ without torch runs them."""
    net = _Net()
    x = net.input("x")
    module = net.compiled(_layer(net, _layer(net, x)))
    calls = [floats(3, _SEQUENCE, 32), floats(1, _SEQUENCE, 32)]
    x86quant.export_program(module, tmp_path / "blocks.xq", calls)
    for level in filter(has, LEVELS):
        served = Served(tmp_path / "blocks.xq", threads=2, isa=level)
        for call in calls:
            (actual,), (expected,) = served(call), module(call)
            # Attention rounds another way at each level, and a code behind it may be the next one.
            torch.testing.assert_close(actual, expected, rtol=0, atol=0.1)
            if level == x86quant.cpu().isa:
                assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", ["bool", "float", "one for all", "expanded", "apart", "one cell"])
def test_masks_of_each_kind(kind: str) -> None:
    net = _Net()
    x, mask = net.input("x"), net.input("mask")
    module = net.compiled(_layer(net, x, mask=mask))
    sees = torch.rand(3, 1, _SEQUENCE, _SEQUENCE) < 0.6
    sees[1, :, 2] = False  # a query that sees nothing
    given = {
        "bool": sees,
        "float": torch.where(sees, 0.0, -torch.inf) + floats(3, 4, _SEQUENCE, _SEQUENCE),
        "one for all": sees[:1, :, :1],
        "expanded": sees[:, :, :1].expand(3, 4, _SEQUENCE, _SEQUENCE),
        "apart": floats(_SEQUENCE, _SEQUENCE).t()[None, None],
        "one cell": sees[:, :, :1, :1].expand(3, 4, _SEQUENCE, _SEQUENCE),
    }[kind]
    _same(module, floats(3, _SEQUENCE, 32), given)
    assert len(module.segments) == 1
    assert not module.float_nodes


@pytest.mark.parametrize("apart", ["q", "k", "v"])
def test_heads_that_torch_laid_out_in_another_way_are_copied(apart: str) -> None:
    net = _Net()
    given = {name: net.input(name) for name in "qkv"}
    module = net.compiled(net.call("attention", **{**QKV, **given, "mask": None}))
    heads = {name: QKV[name] for name in "qkv"}
    heads[apart] = heads[apart].transpose(1, 3).contiguous().transpose(1, 3)
    _same(module, *heads.values())
    assert not module.float_nodes


#: Of the second one the kernel sums in another order, the third is plain torch, and of the others
#: rows behind those that are present are not said: they have tests of their own.
_ELSEWHERE = (
    "linear_rows", "cached_attention", "int8_cached_attention", "newest_sees", "gather_tokens",
    "present_attention_rows"
)  # fmt: skip


@pytest.mark.parametrize("op", [name for name in SAMPLES if name not in _ELSEWHERE])
def test_each_op_alone(op: str) -> None:
    """As a graph of its own: results that nobody wants, codes that come from outside."""
    net = _Net()
    given = {}
    inputs = []
    for name, value in SAMPLES[op].items():
        if isinstance(value, torch.Tensor) and not name.startswith(_CONSTANT):
            given[name] = net.input(name)
            inputs.append(value)
        else:
            given[name] = value
    node = net.call(op, **given)
    count = len(getattr(ops, op).default._schema.returns)
    module = net.compiled(*(net.items(node, *range(count)) if count > 1 else [node]))
    _same(module, *inputs)
    from_outside = "zero_point" in given
    assert [reason for n in module.float_nodes if "outside" in (reason := n.reason)] or (
        not from_outside and len(module.segments) == 1
    )


def test_codes_in_another_order_meet_a_weight_whose_columns_lie_so() -> None:
    """As ``linear_dynamic`` of the features in that order, bit for bit."""
    net = _Net()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(5))
    rows = net.rows(net.input("x"))
    rows["codes"] = net.call("reorder_codes", codes=rows["codes"], order=order.to(torch.int32))
    module = net.compiled(net.call("linear_rows", **rows, **WEIGHT, activation=None))
    x = floats(3, 5, 16)
    (found,) = module(x)
    assert torch.equal(found, ops.linear_dynamic(x.index_select(-1, order), **WEIGHT))
    assert _steps(module) == [["quantize_rows", "reorder_codes", "linear_rows"]]
    assert not module.float_nodes


@pytest.mark.parametrize("outputs", range(1, 8))
def test_results_of_a_norm_that_are_wanted(outputs: int) -> None:
    net = _Net()
    x, residual = net.input("x"), net.input("residual")
    norm = {**NORM, "outputs": outputs}
    node = net.call("linear_rows_norm", **net.rows(x), **WEIGHT, residual=residual, **norm)
    wanted = [0] * bool(outputs & TOTAL) + [1] * bool(outputs & NORMED)
    wanted += [2, 3, 4] * bool(outputs & CODES)
    module = net.compiled(*net.items(node, *wanted))
    _same(module, floats(2, 3, 16), floats(2, 3, 7))
    assert _steps(module) == [["quantize_rows", "linear_rows_norm"]]


def test_rows_that_lie_apart_are_copied() -> None:
    net = _Net()
    x = net.input("x")
    select = net.graph.call_function(torch.ops.aten.select.int, (x, 1, 0))
    product = net.call("linear_rows", **net.rows(select), **WEIGHT, activation=None)
    module = net.compiled(product)
    _same(module, floats(4, 3, 16))
    _same(module, floats(3, 4, 16).transpose(0, 1))
    _same(module, floats(4, 3, 32)[..., ::2])


def test_views_of_what_leaves() -> None:
    net = _Net()
    x = net.input("x")
    product = net.call("linear_rows", **net.rows(x), **WEIGHT, activation="relu")
    flat = net.graph.call_function(torch.ops.aten.reshape.default, (product, [-1, 7]))
    last = net.graph.call_function(torch.ops.aten.select.int, (product, 1, -1))
    turned = net.graph.call_function(torch.ops.aten.transpose.int, (product, 0, 1))
    module = net.compiled(product, flat, last, turned)
    _same(module, floats(2, 3, 16))


def test_rows_that_are_not_finite_give_nan() -> None:
    net = _Net()
    x = net.input("x")
    module = net.compiled(_layer(net, x))
    bad = floats(2, _SEQUENCE, 32)
    bad[1, 3, 5] = torch.inf
    _same(module, bad)
    with torch.no_grad():
        assert not module(bad)[0][0].isnan().any()


def test_empty_batches_and_written_weights() -> None:
    net = _Net()
    x = net.input("x")
    module = net.compiled(_layer(net, x))
    _same(module, floats(2, _SEQUENCE, 32))
    _same(module, floats(0, _SEQUENCE, 32))
    before = module(given := floats(2, _SEQUENCE, 32))[0]
    for buffer in module.graph_module.buffers():
        if buffer.dtype is torch.int8:
            buffer.neg_()
    _same(module, given)
    assert not torch.equal(before, module(given)[0])
    twin = copy.deepcopy(module)
    _same(twin, given)


def test_operands_that_do_not_fit_are_refused_by_the_op() -> None:
    net = _Net()
    q, k, v = (net.input(name) for name in "qkv")
    module = net.compiled(net.call("attention", **{**QKV, "q": q, "k": k, "v": v, "mask": None}))
    _same(module, QKV["q"], QKV["k"], QKV["v"])
    with pytest.raises(ValueError, match="one shape"):
        module(QKV["q"], QKV["k"], QKV["v"][:, :3])
    with pytest.raises(ValueError, match="float32"):
        module(QKV["q"].double(), QKV["k"], QKV["v"])


def test_row_codes_of_different_tensors_are_refused_by_the_op() -> None:
    net = _Net()
    x, y = net.input("x"), net.input("y")
    mixed = {**net.rows(x), **{n: v for n, v in net.rows(y).items() if n != "codes"}}
    module = net.compiled(net.call("linear_rows", **mixed, **WEIGHT, activation=None))
    _same(module, floats(2, 3, 16), floats(2, 3, 16))
    with pytest.raises(ValueError, match="scale"):
        module(floats(2, 3, 16), floats(4, 3, 16))


def test_rolls_between_products_are_copies_in_the_program() -> None:
    """As windows are shifted: forth and back, by more than the size, by nothing."""
    aten = torch.ops.aten
    net = _Net()
    x = net.input("x")
    norm = {**NORM, "outputs": NORMED}
    normed = net.items(net.call("norm_rows", x=x, residual=None, **norm), 1)[0]
    for shifts, dims in (([-3, 2], [1, 2]), ([5], [1]), ([0, 12], [2, 1])):
        normed = net.graph.call_function(aten.roll.default, (normed, shifts, dims))
    turned = net.graph.call_function(aten.permute.default, (normed, [0, 2, 1, 3]))
    rolled = net.graph.call_function(aten.roll.default, (turned, [1], [2]))
    module = net.compiled(*net.rows(rolled).values())
    for batch in (1, 40):
        _same(module, floats(batch, 5, 7, 7))
    assert not module.float_nodes


def test_images_are_not_rolled_into_one_another_in_a_program() -> None:
    net = _Net()
    x = net.input("x")
    norm = {**NORM, "outputs": NORMED}
    normed = net.items(net.call("norm_rows", x=x, residual=None, **norm), 1)[0]
    rolled = net.graph.call_function(torch.ops.aten.roll.default, (normed, [1, 1], [0, 1]))
    module = net.compiled(*net.rows(rolled).values())
    _same(module, floats(40, 5, 7))
    assert len(module.segments) == 2


def _step_of_attention(tokens: int, in_pairs: bool) -> float:
    """What a level's products may differ by: of codes, of bfloat16, of floats."""
    from_keys = coded_keys(x86quant.cpu().isa)
    if from_keys and tokens >= from_keys:
        return 0.1
    return 0.03 if in_pairs else 1e-4


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("heads", "kv", "size", "tokens"),
    [(4, 2, 8, 1), (3, 3, 20, 1), (2, 1, 64, 2), (4, 2, 8, 40), (6, 3, 64, 300)],
)
def test_attention_extends_its_cache(
    heads: int, kv: int, size: int, tokens: int, threads: int
) -> None:
    net = _Net()
    names = ("q", "k", "v", "cache", "length", "hidden")
    inputs = {name: net.input(name) for name in names}
    module = net.compiled(net.call("cached_attention", **inputs, layer=1, scale=0.3))
    room = tokens + 5
    cache = floats(4, 2, kv, room, size)
    twin = cache.clone()
    # As one product of all heads gives them.
    lies = floats(2, tokens, heads + 2 * kv, size)
    new = lies.split([heads, kv, kv], 2)
    with torch.no_grad(), threads_of(threads):
        for length, hidden in ((0, 0), (3, 0), (5, 3), (2, tokens + 1)):
            told = (torch.tensor([length]), torch.tensor([hidden, 0]))
            (actual,) = module.run((*new, cache, *told))
            (expected,) = module.graph_module(*new, twin, *told)
            # Of bfloat16, where tiles multiply several tokens.
            step = _step_of_attention(tokens, in_bfloat16(x86quant.cpu().isa) and tokens > 1)
            torch.testing.assert_close(actual, expected, rtol=step, atol=step)
            assert torch.equal(cache, twin)
    assert _steps(module) == [["cached_attention"]]
    none = torch.tensor([0, 0])
    for length in (6, -1):
        with pytest.raises(ValueError, match=f"room for {room} tokens"):
            module.run((*new, cache, torch.tensor([length]), none))
    for hidden in (tokens + 3, -1):
        with pytest.raises(ValueError, match="cannot be hidden"):
            module.run((*new, cache, torch.tensor([3]), torch.tensor([0, hidden])))
    assert torch.equal(cache, twin)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("heads", "kv", "size", "tokens"),
    [(4, 2, 8, 1), (7, 1, 20, 1), (3, 3, 64, 1), (6, 2, 64, 2), (4, 2, 8, 40), (6, 3, 64, 300)],
)
def test_attention_extends_a_cache_of_codes(
    heads: int, kv: int, size: int, tokens: int, threads: int
) -> None:
    net = _Net()
    names = ("q", "k", "v", "cache", "scales", "length", "hidden")
    inputs = {name: net.input(name) for name in names}
    module = net.compiled(net.call("int8_cached_attention", **inputs, layer=1, scale=0.3))
    room = tokens + 5
    held = cache_codes(floats(4, 2, kv, room, size))
    twins = [x.clone() for x in held]
    new = floats(2, tokens, heads + 2 * kv, size).split([heads, kv, kv], 2)
    with torch.no_grad(), threads_of(threads):
        for length, hidden in ((0, 0), (3, 0), (5, 3), (2, tokens + 1)):
            told = (torch.tensor([length]), torch.tensor([hidden, 0]))
            (actual,) = module.run((*new, *held, *told))
            (expected,) = module.graph_module(*new, *twins, *told)
            # Of bfloat16, where tiles multiply many tokens.
            step = _step_of_attention(tokens, in_bfloat16(x86quant.cpu().isa) and tokens > 8)
            torch.testing.assert_close(actual, expected, rtol=step, atol=step)
            assert all(torch.equal(a, b) for a, b in zip(held, twins, strict=True))
    assert _steps(module) == [["int8_cached_attention"]]
    none = torch.tensor([0, 0])
    for length in (6, -1):
        with pytest.raises(ValueError, match=f"room for {room} tokens"):
            module.run((*new, *held, torch.tensor([length]), none))
        with pytest.raises(ValueError, match=f"room for {room} tokens"):
            module.graph_module(*new, *held, torch.tensor([length]), none)
    assert all(torch.equal(a, b) for a, b in zip(held, twins, strict=True))


def test_tokens_that_are_not_there_are_not_taken() -> None:
    net = _Net()
    x, places = net.input("x"), net.input("places")
    module = net.compiled(net.call("take_tokens", x=x, places=places))
    _same(module, floats(2, 5, 7), torch.tensor([4, -5]))
    _same(module, floats(3, 1, 7), torch.tensor([0]))
    _same(module, floats(2, 10, 7)[:, ::2], torch.tensor([1, 1, 1]))
    for place in (5, -6):
        with pytest.raises(ValueError, match="there is no number"):
            module.run((floats(2, 5, 7), torch.tensor([0, place])))
        with pytest.raises(ValueError, match="there is no number"):
            module.graph_module(floats(2, 5, 7), torch.tensor([0, place]))


@pytest.mark.parametrize("spread", [False, True])
def test_heads_are_rotated_where_they_lie(spread: bool) -> None:
    net = _Net()
    x, cos, sin = (net.input(name) for name in ("x", "cos", "sin"))
    turned = net.graph.call_function(torch.ops.aten.transpose.int, (x, 1, 2))
    rows = net.call("quantize_rows", x=turned)
    floats_of = net.call("rotate", x=x, cos=cos, sin=sin)
    module = net.compiled(floats_of, net.items(rows, 1)[0])
    batch = 1 if spread else 2
    angles = floats(batch, 5, 12), floats(2, 5, 12)
    _same(module, floats(2, 5, 3, 12), *angles)
    _same(module, floats(2, 5, 6, 24)[:, :, ::2, 6:18], *angles)
    assert "rotate" in [step for steps in _steps(module) for step in steps]
    with pytest.raises(ValueError, match="even size"):
        module.run((floats(2, 5, 3, 11), *angles))


def test_rows_that_are_moved_stay_whole() -> None:
    net, aten = _Net(), torch.ops.aten
    x = net.input("x")
    norm = {"residual": None, "norm_weight": torch.ones(16), "norm_bias": None, "eps": 1e-5}

    def normed(value: Any) -> Any:
        (found,) = net.items(
            net.call("norm_rows", x=value, **norm, kind="layer", outputs=NORMED), 1
        )
        return found

    moved = net.graph.call_function(aten.permute.default, (normed(x), [0, 1, 3, 2, 4, 5]))
    whole = net.graph.call_function(aten.reshape.default, (moved, [1, 6, 4, 16]))
    model = net.compiled(normed(whole))
    values = torch.randn(1, 2, 2, 3, 2, 16)
    moved_floats = nn.functional.layer_norm(values, (16,)).permute(0, 1, 3, 2, 4, 5)
    want = moved_floats.reshape(1, 6, 4, 16)
    torch.testing.assert_close(model(values)[0], nn.functional.layer_norm(want, (16,)))
    steps, _ = record(model, (values,))
    assert [step.op for step in steps] == [
        "norm_rows",
        "copy",
        "norm_rows",
    ]  # no other layout between

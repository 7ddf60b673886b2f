"""The passes that recognise attention and its masks: equal results, and what must not fuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests.lowering.row_graphs import Block, Forward, lowered
from x86quant.capture.exported import ops_from_export
from x86quant.dynamic import to_dynamic
from x86quant.forms.call_form import CallForm
from x86quant.lowering.graph_tools import is_op
from x86quant.lowering.lower import lower_rows
from x86quant.profiling.recorder import record
from x86quant.quantization.graphs.fused_blocks import compiled_rows


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def joined(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


def sdpa(m: Any, x: Any, mask: Any = None, **more: Any) -> Any:
    q, k, v = (heads(part(x)) for part in (m.q, m.k, m.v))
    return m.q(joined(F.scaled_dot_product_attention(q, k, v, mask, **more)))


def eager(m: Any, x: Any, mask: Any = None, scale: float = 0.25) -> Any:
    q, k, v = (heads(part(x)) for part in (m.q, m.k, m.v))
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores if mask is None else scores + mask
    return m.q(joined(scores.softmax(-1) @ v))


def by_einsum(m: Any, x: Any, scores: str, values: str, bias: Any = None) -> Any:
    """As MaxViT writes it: batches of groups of windows, keys that are scaled first."""

    def parts(layer: Any) -> Any:
        return layer(x).unflatten(-1, (2, 16)).transpose(-2, -3)

    q, k, v = parts(m.q), parts(m.k) * 0.25, parts(m.v)
    shares = torch.einsum(scores, q, k)
    shares = (shares if bias is None else shares + bias).softmax(-1)
    return m.q(torch.einsum(values, shares, v).transpose(-2, -3).flatten(-2))


#: Equations of scores and of values, for batches and for batches of groups.
EINSUMS = {
    4: ("BHID,BHJD->BHIJ", "BHIJ,BHJD->BHID"),
    5: ("B G H I D, B G H J D -> B G H I J", "B G H I J, B G H J D -> B G H I D"),
}


@pytest.mark.parametrize("rank", EINSUMS)
@pytest.mark.parametrize("bias", [None, torch.randn(1, 2, 6, 6), torch.randn(6)])
def test_attention_by_einsum(rank: int, bias: Any) -> None:
    x = torch.randn(2, 6, 32) if rank == 4 else torch.randn(2, 3, 6, 32)
    found = lowered(lambda m, x: by_einsum(m, x, *EINSUMS[rank], bias), x)
    assert found.keys() & {"attention", "attention_rows"}


@pytest.mark.parametrize(
    ("scores", "values"),
    [
        ("BHID,BHJD->BHJI", "BHIJ,BHJD->BHID"),  # scores are turned
        ("BHID,BHJD->BHIJ", "BHIJ,BHID->BHJD"),  # values of queries
        ("BHID,BHJD->HBIJ", "HBIJ,BHJD->BHID"),  # heads first
        ("BHID,BHJD->BHIJ", "BHIJ,BHJD->BHDI"),
        ("BHID,BHDD->BHID", "BHIJ,BHJD->BHID"),  # a diagonal
    ],
)
def test_other_einsums_are_left_alone(scores: str, values: str) -> None:
    x = torch.randn(2, 16, 32)
    found = lowered(lambda m, x: by_einsum(m, x, scores, values).reshape(2, 16, 32), x)
    assert not found.keys() & {"attention", "attention_rows"}


@pytest.mark.parametrize("bias", [torch.randn(3, 2, 6, 6), torch.randn(2, 1, 2, 6, 6)])
def test_masks_of_groups_of_windows_are_left_alone(bias: Any) -> None:
    x = torch.randn(2, 3, 6, 32)
    found = lowered(lambda m, x: by_einsum(m, x, *EINSUMS[5], bias), x)
    assert not found.keys() & {"attention", "attention_rows"}


ATTENTION = {"quantize_rows": 1, "linear_rows": 2, "attention_rows": 1}


X = torch.randn(2, 5, 32)


@pytest.mark.parametrize(
    "forward",
    [
        sdpa,
        eager,
        lambda m, x: sdpa(m, x, is_causal=True),
        lambda m, x: sdpa(m, x, scale=0.5),
        lambda m, x: m.q(
            joined(
                (heads(m.q(x)) @ heads(m.k(x)).transpose(2, 3) / math.sqrt(16)).softmax(3)
                @ heads(m.v(x))
            )
        ),
    ],
)
def test_attention_fuses(forward: Forward) -> None:
    assert lowered(forward, X) == ATTENTION


@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (1, 1, 5, 5), (2, 2, 5, 5), (5, 5), (2, 5, 5)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks_fuse(shape: tuple[int, ...], kind: torch.dtype) -> None:
    mask = torch.rand(shape) > 0.3 if kind is torch.bool else torch.randn(shape)
    mask[..., 0] = 1
    assert lowered(sdpa, X, mask) == ATTENTION
    if kind is torch.float32:
        assert lowered(eager, X, mask) == ATTENTION


def test_heads_that_are_repeated_for_groups_are_read_once() -> None:
    def forward(m: Any, x: Any) -> Any:
        q, k, v = (heads(part(x)) for part in (m.q, m.k, m.v))
        k, v = (t[:, :1][:, :, None].expand(-1, -1, 2, -1, -1).reshape(t.shape) for t in (k, v))
        return m.q(joined(F.scaled_dot_product_attention(q, k, v)))

    assert lowered(forward, X) == ATTENTION


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: sdpa(m, x, dropout_p=0.5),
        lambda m, x: joined(
            F.scaled_dot_product_attention(*(heads(p(x).double()) for p in (m.q, m.k, m.v)))
        ),
        lambda m, x: joined(
            (heads(m.q(x)) @ heads(m.k(x)).transpose(2, 3)).softmax(2) @ heads(m.v(x))
        ),
        lambda m, x: joined(
            (heads(m.q(x)) @ heads(m.k(x)).transpose(2, 3) * x.mean()).softmax(3) @ heads(m.v(x))
        ),
    ],
)
def test_other_attentions_stay(forward: Forward) -> None:
    found = lowered(forward, X)
    assert "attention" not in found
    assert "attention_rows" not in found


def test_scores_that_are_returned_are_computed() -> None:
    def forward(m: Any, x: Any) -> Any:
        shares = (heads(m.q(x)) @ heads(m.k(x)).transpose(2, 3)).softmax(-1)
        return joined(shares @ heads(m.v(x))), shares

    assert "attention" not in lowered(forward, X)


def test_an_attention_that_is_read_otherwise_too_is_not_quantized_alone() -> None:
    def forward(m: Any, x: Any) -> Any:
        q, k, v = (heads(part(x)) for part in (m.q, m.k, m.v))
        out = joined(F.scaled_dot_product_attention(q, k, v))
        return m.q(out), out

    assert lowered(forward, X) == {"quantize_rows": 2, "linear_rows": 2, "attention": 1}


def test_tokens_joined_otherwise_are_no_rows() -> None:
    def forward(m: Any, x: Any) -> Any:
        q, k, v = (heads(part(x)) for part in (m.q, m.k, m.v))
        out = F.scaled_dot_product_attention(q, k, v)
        return m.q(out.reshape(x.shape))  # heads before tokens

    assert "attention_rows" not in lowered(forward, X)


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("images", [1, 3])
def test_the_masks_of_shifted_windows_are_one(images: int, said: bool) -> None:
    windows, tokens = 4, 5

    def forward(m: Any, x: Any) -> Any:
        q, k, v = (heads(one(x)) for one in (m.q, m.k, m.v))
        scores = (q * 0.25) @ k.transpose(-2, -1)
        scores = scores + m.rms[: 2 * tokens].reshape(1, 2, tokens, 1).expand(1, 2, tokens, tokens)
        hidden = x.new_zeros((windows, tokens, tokens))
        hidden[1:, :2] = -100.0
        count = x.shape[0] // windows if said else -1
        apart = scores.view(count, windows, 2, tokens, tokens)
        apart = apart + hidden.unsqueeze(1).unsqueeze(0)
        return joined(apart.view(-1, 2, tokens, tokens).softmax(-1) @ v)

    found = lowered(forward, torch.randn(images * windows, tokens, 32))
    assert found == {"quantize_rows": 1, "linear_rows": 1, "attention": 1}


def by_places(m: Any, x: Any, *, turned: bool = False) -> Any:
    """As SAM has it: heads and batches in one, and what rows and columns add to the scores."""
    q, k, v = (heads(part(x)).flatten(0, 1) for part in (m.q, m.k, m.v))
    scores = (q * 0.25) @ k.transpose(-2, -1)
    both = q.shape[0]
    pixels = q.reshape(both, 2, 3, 16)
    rows = torch.einsum(
        "bhwc,hkc->bhwk", pixels, m.rms.reshape(1, 1, 32)[..., :16].expand(2, 2, 16)
    )
    columns = torch.einsum("bhwc,wkc->bhwk", pixels, m.rms[:16].expand(3, 3, 16))
    apart = scores.view(both, 2, 3, 2, 3) + rows[..., None] + columns[..., None, :]
    if turned:
        apart = apart.transpose(1, 2)
    shares = apart.reshape(both, 6, 6).softmax(-1)
    return m.q((shares @ v).view(-1, 2, 6, 16).transpose(1, 2).flatten(2))


def test_attention_with_rows_and_columns_of_positions_fuses() -> None:
    found = lowered(by_places, torch.randn(3, 6, 32))
    assert found["attention"] == 1


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_without_heads_fuses(batch: int) -> None:
    def forward(m: Any, x: Any, bias: Any) -> Any:
        return m.q((m.q(x) @ m.k(x).transpose(1, 2) / 4 + bias).softmax(2) @ m.v(x))

    for shape in ((batch, 5, 5), (1, 5, 5), (5, 5), (5,)):
        assert lowered(forward, torch.randn(batch, 5, 32), torch.randn(shape))["attention"] == 1


def test_scores_that_are_turned_on_the_way_are_left_alone() -> None:
    assert "attention" not in lowered(
        lambda m, x: by_places(m, x, turned=True), X.repeat(1, 2, 1)[:, :6]
    )


def mask_nodes(forward: Forward) -> tuple[list[Any], Any, Any]:
    """The nodes that are left of ``forward`` on a mask of free sizes, and both graphs."""
    model = to_dynamic(Block(forward).eval())
    given = (torch.randn(2, 5, 32), torch.ones(2, 5, dtype=torch.long))
    form, leaves = CallForm.of(model, given, {})
    exported = ops_from_export(model, form, leaves, free=True)
    fused, _ = lower_rows(exported.graph_module)
    return [n.target for n in fused.graph.nodes], exported.graph_module, fused


def padding_as_transformers_asks(m: Any, x: Any, mask: Any) -> Any:
    batch, tokens = torch.arange(x.shape[0]), torch.arange(x.shape[1])
    q, k = tokens[None, None, :, None], tokens[None, None, None, :] + 0
    seen = mask.bool()[batch[:, None, None, None], k]
    seen = (q.new_ones((), dtype=torch.bool) & (q >= 0)) & seen
    seen = seen.expand(x.shape[0], -1, x.shape[1], x.shape[1])
    q, k, v = (heads(one(x)) for one in (m.q, m.k, m.v))
    return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))


def test_a_padding_mask_is_no_longer_looked_up() -> None:
    targets, before, after = mask_nodes(padding_as_transformers_asks)
    aten = torch.ops.aten
    assert not {aten.index.Tensor, aten.ge.Scalar, aten.__and__.Tensor} & {*targets}
    for batch, tokens in ((2, 5), (1, 7), (3, 2)):
        x, mask = torch.randn(batch, tokens, 32), torch.ones(batch, tokens, dtype=torch.long)
        mask[-1, 1:] = 0
        with torch.no_grad():
            (expected,), (actual,) = before(x, mask), after(x, mask)
        assert float((actual - expected).abs().max()) < 0.05  # attention may be in bfloat16
    with torch.no_grad(), pytest.raises((RuntimeError, IndexError, ValueError)):
        after(torch.randn(3, 5, 32), torch.ones(1, 5, dtype=torch.long))


@pytest.mark.parametrize("by_name", [True, False])
def test_a_mask_that_hides_nothing_is_left_out(by_name: bool) -> None:
    def forward(m: Any, x: Any, mask: Any) -> Any:
        tokens = torch.arange(x.shape[1])
        seen = (tokens[None, None, :, None] >= 0).expand(x.shape[0], -1, -1, x.shape[1])
        q, k, v = (heads(one(x)) for one in (m.q, m.k, m.v))
        if by_name:
            return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
        return joined(F.scaled_dot_product_attention(q, k, v, seen))

    targets, before, after = mask_nodes(forward)
    assert torch.ops.aten.ge.Scalar not in targets
    x, mask = torch.randn(3, 6, 32), torch.ones(3, 6, dtype=torch.long)
    with torch.no_grad():
        assert float((after(x, mask)[0] - before(x, mask)[0]).abs().max()) < 0.05


@pytest.mark.parametrize("late", [True, False])
def test_a_factor_of_queries_becomes_the_scale_of_attention(late: bool) -> None:
    def forward(m: Any, x: Any, mask: Any) -> Any:
        q = heads(m.q(x)) * 0.5 if late else heads(m.q(x) * 0.5)
        out = F.scaled_dot_product_attention(q, heads(m.k(x)), heads(m.v(x)), scale=0.75)
        return joined(out)

    targets, before, after = mask_nodes(forward)
    assert torch.ops.aten.mul.Tensor not in targets
    (attention,) = (n for n in after.graph.nodes if is_op(n, "attention"))
    assert attention.kwargs["scale"] == 0.375
    x, mask = torch.randn(3, 6, 32), torch.ones(3, 6, dtype=torch.long)
    with torch.no_grad():
        assert float((after(x, mask)[0] - before(x, mask)[0]).abs().max()) < 0.05


def test_queries_that_are_read_elsewhere_keep_their_factor() -> None:
    def forward(m: Any, x: Any, mask: Any) -> Any:
        q = heads(m.q(x)) * 0.5
        return joined(F.scaled_dot_product_attention(q, heads(m.k(x)), heads(m.v(x)))), q

    targets, before, after = mask_nodes(forward)
    assert torch.ops.aten.mul.Tensor in targets
    x, mask = torch.randn(3, 6, 32), torch.ones(3, 6, dtype=torch.long)
    with torch.no_grad():
        for got, want in zip(after(x, mask), before(x, mask), strict=True):
            assert float((got - want).abs().max()) < 0.05


@pytest.mark.parametrize("odd", ["backwards", "beyond", "later"])
def test_a_mask_that_is_asked_otherwise_is(odd: str) -> None:
    def forward(m: Any, x: Any, mask: Any) -> Any:
        batch, k = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None, :]
        if odd == "backwards":
            seen = mask.bool()[batch, x.shape[1] - 1 - k]
        elif odd == "beyond":
            seen = mask.bool()[batch, k] & (k >= 1)
        else:
            seen = mask.bool()[batch, k] & (mask.sum(1, keepdim=True) > k)
        return m.q(x) * seen.unsqueeze(-1)

    _, before, after = mask_nodes(forward)
    x, mask = torch.randn(2, 6, 32), torch.tensor([[1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    assert torch.equal(before(x, mask)[0], after(x, mask)[0])


def test_heads_that_torch_reads_too_stay_rows() -> None:
    """What leaves a segment lies as it did: attention in the next one reads rows of features."""
    model, x = to_dynamic(Block(by_places).eval()), torch.randn(3, 6, 32)
    form, leaves = CallForm.of(model, (x,), {})
    compiled = compiled_rows(*lower_rows(ops_from_export(model, form, leaves).graph_module))
    steps, _ = record(compiled, (x,))
    assert "attention" in [s.op for s in steps]
    operands = [s for s in steps if s.op == "copy" and "attention" in s.name]
    assert not operands, [s.name for s in operands]

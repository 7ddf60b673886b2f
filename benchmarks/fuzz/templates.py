"""The statements that random programs are drawn from, by kind.

A line is one statement, or several with ``;`` between them. ``{x}`` and ``{y}`` stand for tensors
that there are, ``{out}`` for a new name, ``{d}`` for a dimension behind the first and ``{e}`` for
any, ``{r}`` for the rank, ``{n}`` for the size of dimension ``{d}``, ``{c}`` and ``{w}`` for those
of the second and the last, ``{low}`` and ``{high}`` for bounds, ``{k}`` for a small number.
``{dims}`` is how many sizes follow batch and channels, ``{order}`` a permutation behind the batch.
What does not fit the tensors drawn is refused by torch when the statement is tried.
"""

from __future__ import annotations

_FUNCTIONAL = """relu relu6 hardtanh hardswish hardsigmoid silu gelu mish elu celu selu leaky_relu
    softplus logsigmoid softsign tanhshrink hardshrink softshrink sigmoid tanh glu normalize""".split()  # noqa: SIM905,E501
_WITH_IN_PLACE = """relu relu6 hardtanh hardswish hardsigmoid silu mish elu celu selu
    leaky_relu""".split()  # noqa: SIM905
_METHODS = """abs neg sigmoid tanh relu exp square erf sin cos contiguous clone detach floor round sign
    sqrt rsqrt reciprocal log1p expm1 trunc frac atan asinh positive logit erfc exp2""".split()  # noqa: SIM905,E501
_IN_PLACE = "abs_ neg_ sigmoid_ tanh_ relu_ square_ zero_ sin_ erf_ floor_ exp_ round_".split()  # noqa: SIM905
_ACTIVATIONS = """ReLU ReLU6 Hardtanh Hardswish Hardsigmoid SiLU GELU Mish ELU CELU SELU LeakyReLU
    Softplus LogSigmoid Softsign Sigmoid Tanh Identity Dropout PReLU Hardshrink Tanhshrink
    GLU Softmin""".split()  # noqa: SIM905
_MODULES_IN_PLACE = "ReLU ReLU6 SiLU ELU Hardswish LeakyReLU Hardsigmoid Mish".split()  # noqa: SIM905


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


#: Layers with weights, as lines of ``__init__`` without ``self.name =``; the arguments of the call
#: are behind ``<-``.
PRODUCTS = _lines("""
    nn.Conv{dims}d({c}, {o}, {k}, stride={stride}, padding={k} // 2, bias={bias}) <- {x}
    nn.Conv{dims}d({c}, {o}, {k}, stride={stride}, bias={bias}) <- {x}
    nn.Conv{dims}d({c}, {c}, {k}, padding={k} // 2, groups={c}, bias={bias}) <- {x}
    nn.Conv{dims}d({c}, {o}, 3, padding=2, dilation=2, bias={bias}) <- {x}
    nn.Conv{dims}d({c}, {o}, 3, padding='same', bias={bias}) <- {x}
    nn.Conv{dims}d({c}, {o}, 3, padding=1, padding_mode='reflect') <- {x}
    nn.Conv{dims}d({c}, {o}, {k}, padding={k} // 2, groups=2) <- {x}
    nn.ConvTranspose{dims}d({c}, {o}, 2, stride=2, bias={bias}) <- {x}
    nn.ConvTranspose{dims}d({c}, {o}, 3, stride=2, padding=1, output_padding=1) <- {x}
    nn.Linear({w}, {o}, bias={bias}) <- {x}
    nn.Linear({w}, {o}, bias={bias}) <- {x}
    nn.Linear({w}, {w}, bias={bias}) <- {x}
""")
#: Other layers beside them.
LAYERS = PRODUCTS + _lines("""
    nn.Bilinear({w}, {w}, {o}) <- {x}, {x}
    nn.Sequential(nn.Linear({w}, {o}), nn.ReLU(), nn.Linear({o}, {w})) <- {x}
    nn.Sequential(nn.Conv{dims}d({c}, {o}, 1), nn.BatchNorm{dims}d({o}), nn.ReLU(True)) <- {x}
    nn.Sequential(nn.Flatten(1), nn.Linear({c} * {w}, {o})) <- {x}
    nn.LayerNorm({w}) <- {x}
    nn.LayerNorm([{c}, {w}], elementwise_affine={bias}) <- {x}
    nn.RMSNorm({w}) <- {x}
    nn.BatchNorm1d({c}) <- {x}
    nn.BatchNorm{dims}d({c}, affine={bias}) <- {x}
    nn.GroupNorm(2, {c}) <- {x}
    nn.InstanceNorm{dims}d({c}, affine={bias}) <- {x}
    nn.LocalResponseNorm(2) <- {x}
    nn.utils.parametrizations.weight_norm(nn.Linear({w}, {o})) <- {x}
    nn.Embedding(10, {o}) <- {ids}
    nn.Embedding(10, {o}, padding_idx=0) <- {ids}.flip(1)
    nn.EmbeddingBag(10, {o}, mode='sum') <- {ids}
    nn.Embedding(10, {w}) <- {x}.abs().long().clamp(max=9).select(-1, 0)
    nn.Upsample(scale_factor=2) <- {x}
    nn.Flatten(1, -1) <- {x}
    nn.Unflatten(1, (2, -1)) <- {x}
    nn.Softmax(dim={e}) <- {x}
    nn.AdaptiveAvgPool{dims}d(1) <- {x}
    nn.MaxPool{dims}d(2, ceil_mode=True) <- {x}
    nn.AvgPool{dims}d(3, 1, 1) <- {x}
    nn.PixelUnshuffle(2) <- {x}
    nn.ZeroPad2d(1) <- {x}
    nn.CosineSimilarity(dim={d}) <- {x}, {y}
""")

#: The same; the call returns more than one tensor, or wants more than one.
STRUCTURED_LAYERS = _lines("""
    nn.LSTM({w}, {o}, batch_first=True) <- {out}, ({out}h, {out}c) = {m}({x})
    nn.LSTM({w}, {o}, num_layers=2, bidirectional=True, batch_first=True) <- {out} = {m}({x})[0]
    nn.GRU({w}, {o}, batch_first=True) <- {out}, {out}h = {m}({x})
    nn.RNN({w}, {o}, batch_first=True) <- {out} = {m}({x})[0]
    nn.GRU({w}, {o}, batch_first=True) <- {out} = {m}({x}, torch.zeros(1, {x}.shape[0], {o}))[1]
    nn.LSTMCell({w}, {o}) <- {out}, {out}c = {m}({x})
    nn.GRUCell({w}, {w}) <- {out} = {x};for _ in range(2):;    {out} = {m}({x}, {out})
    nn.MultiheadAttention({w}, 2, batch_first=True) <- {out} = {m}({x}, {x}, {x}, need_weights=False)[0]
    nn.MultiheadAttention({w}, 2, batch_first=True) <- {out}, {out}w = {m}({x}, {x}, {x})
    nn.TransformerEncoderLayer({w}, 2, 8, batch_first=True) <- {out} = {m}({x})
    nn.ModuleList([nn.Linear({w}, {w}) for _ in range(3)]) <- {out} = {x};for layer in {m}:;    {out} = {out} + layer({out})
    nn.ModuleDict({{'a': nn.Linear({w}, {w})}}) <- {out} = {m}['a']({x})
    nn.Linear({w}, {w}) <- {out} = {x};for _ in range(3):;    {out} = torch.tanh({m}({out}))
    nn.Linear({w}, {o}) <- {out} = F.linear({x}, {m}.weight, bias={m}.bias)
    nn.Linear({w}, {o}) <- {out} = {x} @ {m}.weight.t()
    nn.Linear({w}, {o}) <- {out} = torch.matmul({x}, {m}.weight.T) + {m}.bias
    nn.Conv{dims}d({c}, {o}, 1) <- {out} = F.conv{dims}d({x}, {m}.weight * 2, {m}.bias)
    nn.Conv{dims}d({c}, {o}, 3) <- {out} = F.conv{dims}d(input={x}, weight={m}.weight, padding=1)
    nn.Parameter(torch.randn({w})) <- {out} = {x} * {m}
    nn.Parameter(torch.randn({w}, {o})) <- {out} = {x}.matmul({m})
    nn.Parameter(torch.randn({w}, {o})) <- {out} = torch.einsum('...i,io->...o', {x}, {m})
    nn.Parameter(torch.randn(1, {c}, 1)) <- {out} = {x} + {m}
    nn.Buffer(torch.arange({w})) <- {out} = {x}.index_select(-1, {m})
    nn.Buffer(torch.randn({w}) > 0) <- {out} = {x}.masked_fill({m}, -1.0)
    nn.Buffer(torch.randn({w}) > 0) <- {out} = {x}[..., {m}]
    nn.LayerNorm({w}) <- {out} = F.layer_norm({x}, {m}.normalized_shape, {m}.weight, {m}.bias)
    nn.BatchNorm1d({c}) <- {out} = F.batch_norm({x}, {m}.running_mean, {m}.running_var)
    nn.Embedding(10, {w}) <- {out} = F.embedding({ids}, {m}.weight).sum(1)
    nn.Embedding(10, {w}) <- {out} = F.linear({x}, {m}.weight)
""")  # noqa: E501

#: Layers on a tensor, as what follows ``nn.``.
ACTIVATIONS = _ACTIVATIONS
ACTIVATIONS_IN_PLACE = _MODULES_IN_PLACE

UNARY = [
    *(f"{{out}} = {{x}}.{name}()" for name in _METHODS),
    *(f"{{out}} = F.{name}({{x}})" for name in _FUNCTIONAL),
    *(f"{{out}} = F.{name}({{x}}, inplace=True)" for name in _WITH_IN_PLACE),
    *(f"F.{name}({{x}}, inplace=True)" for name in _WITH_IN_PLACE),
    *_lines("""
    {out} = torch.sigmoid({x})
    {out} = torch.relu(input={x})
    {out} = torch.tanh(input={x})
    {out} = {x}.clamp({low}, {high})
    {out} = torch.clamp({x}, min={low})
    {out} = {x}.clamp(max={high})
    {out} = torch.clip({x}, {low}, {high})
    {out} = torch.clamp({x}, {y}, None)
    {out} = F.softmax({x}, dim={e})
    {out} = {x}.softmax({e})
    {out} = {x}.log_softmax(dim={e})
    {out} = F.leaky_relu({x}, {high})
    {out} = F.elu({x}, alpha={high})
    {out} = F.gelu({x}, approximate='tanh')
    {out} = F.threshold({x}, {low}, {high})
    {out} = F.hardtanh({x}, {low}, {high})
    {out} = -{x}
    {out} = abs({x})
    {out} = {x} ** 2
    {out} = {x}.pow(3)
    {out} = 2 ** {x}
    {out} = torch.sqrt({x}.abs() + 0.1)
    {out} = torch.log({x}.abs() + 1)
    {out} = F.dropout({x}, 0.5, self.training)
    {out} = torch.nan_to_num({x})
    {out} = {x}.to(torch.float32)
    {out} = {x} // 1
    {out} = {x} % 2
    {out} = torch.remainder({x}, 1.5)
    {out} = F.layer_norm({x}, ({w},))
    {out} = F.layer_norm({x}, {x}.shape[-1:])
    {out} = F.rms_norm({x}, ({w},))
    {out} = F.instance_norm({x})
    {out} = F.group_norm({x}, 2)
    {out} = F.normalize({x}, dim={d})
    """),
]

BINARY = _lines("""
    {out} = {x} + {y}
    {out} = {x} - {y}
    {out} = {x} * {y}
    {out} = {x} + {number}
    {out} = {x} / {number}
    {out} = {number} * {x}
    {out} = {number} - {x}
    {out} = {number} / ({x}.abs() + 1)
    {out} = torch.add({x}, {y})
    {out} = torch.mul({x}, other={y})
    {out} = torch.sub({x}, {y}, alpha=2)
    {out} = torch.add(input={x}, other={y}, alpha={number})
    {out} = torch.rsub({x}, {y})
    {out} = {x}.add({y})
    {out} = {x}.mul({y})
    {out} = {x}.sub({number})
    {out} = {x} / ({y}.abs() + 0.5)
    {out} = torch.div({x}, 2, rounding_mode='floor')
    {out} = torch.maximum({x}, {y})
    {out} = torch.minimum({x}, other={y})
    {out} = torch.where({x} > 0, {x}, {y})
    {out} = torch.where({x} > {low}, {x}, {number})
    {out} = {x}.where({y} > 0, {y})
    {out} = {x} * ({y} > 0)
    {out} = {x} * {y}.gt(0).float()
    {out} = {x}.masked_fill({y} < 0, {number})
    {out} = {x} * torch.sigmoid({y})
    {out} = {x} @ {y}.transpose(-1, -2)
    {out} = torch.matmul({x}, {y})
    {out} = torch.bmm({x}, {y}.mT)
    {out} = {x} @ {x}.mT
    {out} = torch.lerp({x}, {y}, 0.3)
    {out} = torch.addcmul({x}, {x}, {y}, value=0.5)
    {out} = torch.addcdiv({x}, {x}, {y}.abs() + 1)
    {out} = torch.atan2({x}, {y}.abs() + 1)
    {out} = torch.hypot({x}, {y})
    {out} = torch.cdist({x}, {y})
    {out} = F.cosine_similarity({x}, {y}, dim=1)
    {out} = torch.einsum('n...,n...->n...', {x}, {y})
    {out} = torch.einsum('nij,nkj->nik', {x}, {y})
    {out} = torch.einsum('nchw,ncxw->nchx', {x}, {x})
    {out} = torch.einsum('ni,nj->nij', {x}, {y})
    {out} = F.scaled_dot_product_attention({x}, {x}, {x})
    {out} = F.scaled_dot_product_attention({x}, {y}, {x}, is_causal=True)
    {out} = F.scaled_dot_product_attention({x}, {x}, {y}, attn_mask={x} @ {y}.mT > 0, scale=0.5)
    {out} = F.mse_loss({x}, {y}, reduction='none')
    {out} = torch.baddbmm({x} @ {x}.mT, {x}, {x}.mT, beta=0.5)
    {out} = torch.outer({x}.flatten()[:4], {y}.flatten()[:4])
    {out} = torch.cross({x}[..., :3], {y}[..., :3], dim=-1)
""")

IN_PLACE = [
    *(f"{{x}}.{name}()" for name in _IN_PLACE),
    *(f"{{out}} = {{x}}.{name}()" for name in _IN_PLACE),
    *_lines("""
    {x}.clamp_({low}, {high})
    {x}.clip_(max={high})
    {x}.mul_(2.0).add_(0.3)
    {x}.add_({y})
    {x}.sub_({y}, alpha=2)
    {x}.div_({y}.abs() + 1)
    {x}.lerp_({y}, 0.5)
    {x}.addcmul_({x}, {y}, value=0.5)
    {x}.pow_(2)
    {x}.copysign_({y})
    {x} += {y}
    {x} -= {number}
    {x} *= 0.5
    {x} /= 2
    {out} = {x};{out} += 1
    {x}[:, :1].mul_(0.0)
    {x}[:, 0] = {y}[:, 0]
    {x}[:, 0] += 1
    {x}[..., -1:] = 0.25
    {x}[..., ::2] *= -1
    {x}[0] = {x}[-1]
    {x}[{x} > 0.5] = 0.5
    {x}[{x} > 0] *= 2
    {x}[:, [0, 1]] = {y}[:, [1, 0]]
    {x}[:, torch.tensor([0, 1])] += 1.0
    {x}.masked_fill_({x} < 0, 0.1)
    {x}.masked_fill_(mask={y} > 0, value=-1.0)
    torch.relu_({x})
    torch.sigmoid_({x})
    {x}.copy_({y})
    {x}.fill_(0.5)
    {x}.fill_diagonal_(0.5)
    {x}.view(-1)[:2].add_(1.0)
    {x}.transpose(1, -1)[:, 0].zero_()
    {x}.t_()
    {x}.unsqueeze_(1)
    {x}.squeeze_()
    {x}.transpose_(1, -1)
    {out} = {x}.chunk(2, {e})[0];{out}.sigmoid_()
    {out} = {x}.view({x}.shape);{out}.add_(1);{out} = {out} + {x}
    {out}, {out}b = {x}.chunk(2, 1);{out}b.mul_({out})
    {out} = {x}.unbind(1)[0];{out} *= 2
    {out} = {x}.clone();{out}[:, 0] = 0;{x}.add_({out})
    {out} = torch.empty_like({x});{out}.copy_({x})
    {out} = torch.zeros_like({x});{out}[:, 1:] = {x}[:, :-1]
    {out} = {x}.new_zeros({x}.shape[0], 4);{out}[:, :2] += {x}.flatten(1)[:, :2]
    torch.add({x}, {y}, out={x})
    {out} = torch.empty_like({x});torch.mul({x}, {y}, out={out})
    {out} = torch.empty(0);torch.sigmoid({x}, out={out})
    {x}.index_fill_(1, torch.tensor([0]), 0.5)
    {x}.index_add_(1, torch.tensor([0, 1]), {y}[:, :2])
    {x}.index_copy_(1, torch.tensor([1, 0]), {y}[:, :2])
    {x}.scatter_(1, torch.zeros_like({x}, dtype=torch.long), {y})
    {x}.scatter_add_(-1, torch.zeros_like({x}).long(), {y})
    {x}.index_put_((torch.tensor([0]),), torch.tensor(0.5))
    {x}.masked_scatter_({x} > 0, {y})
    {x}.resize_as_({x})
    {x}.set_({y})
    """),
]

INDEX = _lines("""
    {out} = {x}[:, 0]
    {out} = {x}[:, 1:]
    {out} = {x}[:, :2]
    {out} = {x}[:, ::2]
    {out} = {x}[:, -1]
    {out} = {x}[:, [0, 1]]
    {out} = {x}[:, None]
    {out} = {x}[..., 0]
    {out} = {x}[..., 1:]
    {out} = {x}[..., :-1]
    {out} = {x}[..., None]
    {out} = {x}[:, torch.tensor([1, 0])]
    {out} = {x}[torch.arange({x}.shape[0]), 0]
    {out} = {x}[{x} > 0].sum() + {x}
    {out} = {x}[{x}.flatten(1)[:, 0] > 0].sum(0)
    {out} = {x}[:, {x}.mean(0).flatten()[: {x}.shape[1]] > 0].sum(1)
    {out} = torch.masked_select({x}, {x} > 0).mean() * {x}
    {out} = torch.nonzero({x} > 0).float().mean() + {x}
    {out} = torch.flip({x}, [{e}])
    {out} = {x}.flip(1, -1)
    {out} = torch.roll({x}, 1, {e})
    {out} = {x}.roll(shifts=(1, -1), dims=(1, -1))
    {out} = torch.rot90({x}, 1, [-2, -1])
    {out} = {x}.narrow({d}, 0, 2)
    {out} = {x}.select({d}, 0)
    {out} = torch.index_select({x}, 1, torch.tensor([0, 0, 1]))
    {out} = torch.gather({x}, 1, torch.zeros_like({x}[:, :1], dtype=torch.long))
    {out} = {x}.gather({d}, {x}.argsort({d}))
    {out} = torch.take_along_dim({x}, {x}.argmax({d}, keepdim=True), {d})
    {out} = torch.take({x}, torch.tensor([0, 2, 1]))
    {out} = torch.scatter({x}, 1, torch.zeros_like({x}).long(), {y})
    {out} = {x}.scatter_add(1, torch.ones_like({x}).long(), {y})
    {out} = torch.zeros_like({x}).scatter_reduce(1, torch.zeros_like({x}).long(), {x}, 'amax')
    {out} = {x}.index_add(1, torch.tensor([0, 1]), {y}[:, :2], alpha=0.5)
    {out} = torch.index_fill({x}, 1, torch.tensor([1]), 0.0)
    {out} = {x}.index_put((torch.tensor([0]),), torch.tensor(1.0))
    {out} = {x}.masked_scatter({x} > 0, {y})
    {out} = {x}.unbind(1)[1]
    {out} = torch.tril({x})
    {out} = torch.triu({x}, diagonal=1)
    {out} = {x}.diagonal(dim1=-2, dim2=-1)
    {out} = torch.diag_embed({x})
    {out} = {x}.expand(-1, *{x}.shape[1:])
    {out} = {x}.unsqueeze(1).expand(-1, 3, *{x}.shape[1:])
    {out} = {x}[:, :1].expand_as({x})
    {out} = {x}.repeat(1, 2, *[1] * ({x}.dim() - 2))
    {out} = {x}.repeat_interleave(2, dim={d})
    {out} = torch.tile({x}, (2,))
    {out} = {x}.unfold({d}, 2, 1)
    {out} = F.unfold({x}, 3, padding=1)
    {out} = F.fold(F.unfold({x}, 2, stride=2), {x}.shape[-2:], 2, stride=2)
    {out} = {x}.as_strided({x}.shape, {x}.stride())
    {out} = torch.as_strided({x}, (2, 2), (2, 1))
    {out} = F.one_hot({ids}, 10).float().mean(1)
    {out} = F.one_hot({x}.argmax(-1), {w}).to({x}.dtype)
    {out} = {x} * {ids}.sum(1).reshape(-1, *[1] * ({x}.dim() - 1))
""")

VIEW = _lines("""
    {out} = {x}.permute({order})
    {out} = {x}.permute(({order}))
    {out} = torch.permute({x}, dims=({order}))
    {out} = {x}.transpose(1, {d})
    {out} = torch.transpose({x}, dim0=1, dim1=-1)
    {out} = {x}.swapaxes(1, -1)
    {out} = {x}.mT
    {out} = {x}.flatten({d})
    {out} = {x}.flatten(-2)
    {out} = torch.flatten({x}, start_dim=1)
    {out} = {x}.reshape({x}.shape[0], -1)
    {out} = {x}.reshape(({x}.size(0), -1))
    {out} = {x}.contiguous().view({x}.size(0), -1, {w})
    {out} = {x}.view({x}.size(0), -1)
    {out} = {x}.view(*{x}.shape[:1], -1)
    {out} = {x}.reshape({x}.size(0), {x}.size(1), -1)
    {out} = {x}.reshape(-1, {w})
    {out} = {x}.reshape_as({y})
    {out} = {x}.unsqueeze({d})
    {out} = torch.unsqueeze({x}, dim=-1)
    {out} = {x}.squeeze({d})
    {out} = {x}.squeeze()
    {out} = {x}.unflatten(1, (2, -1))
    {out} = {x}.movedim(1, -1)
    {out} = torch.moveaxis({x}, -1, 1)
    {out} = {x}.view_as({x})
    {out} = torch.atleast_3d({x})
    {out} = torch.ravel({x})
    {out} = F.pixel_shuffle({x}, 2)
    {out} = F.channel_shuffle({x}, 2)
    {out} = F.pad({x}, (1, 0))
    {out} = F.pad({x}, pad=(1, 1), value=0.5)
    {out} = F.pad({x}, (1, 1, 1, 1), mode='reflect')
    {out} = F.pad({x}, (-1, 0))
    {out} = {x}.contiguous(memory_format=torch.channels_last)
    {out} = {x}.to(memory_format=torch.channels_last)
""")

JOIN = _lines("""
    {out} = torch.cat([{x}, {y}], {e})
    {out} = torch.cat(({x}, {y}), dim=1)
    {out} = torch.cat(tensors=[{x}, {y}], dim=-1)
    {out} = torch.cat([{x}, {y}], axis={e})
    {out} = torch.concat([{x}, {x}, {y}], 1)
    {out} = torch.stack([{x}, {y}], {e})
    {out} = torch.stack([{x}, {y}], dim=1)
    {out} = torch.hstack([{x}, {y}])
    {out} = torch.vstack([{x}, {y}])
    {out} = torch.cat([{x}, torch.zeros_like({x})], -1)
    {out} = torch.cat([one * 2 for one in {x}.split(1, 1)], 1)
    {out}, {out}b = {x}.chunk(2, {e})
    {out}, {out}b = torch.chunk({x}, 2, dim={e})
    {out}, {out}b = torch.split({x}, 2, {d})
    {out}, {out}b = {x}.tensor_split(2, dim={d})
    {out}, *{out}b = {x}.unbind(1)
    {out} = {x}.split([1, {c} - 1], 1)[1]
    {out}a, {out}b = {x}.chunk(2, 1);{out} = {out}a * torch.sigmoid({out}b)
    {out}a, {out}b = torch.broadcast_tensors({x}, {y});{out} = {out}a - {out}b
    {out} = sum([{x}, {y}, {x}])
    {out} = sum(one for one in {x}.unbind(-1))
    {out} = torch.block_diag({x}[0].flatten(1), {y}[0].flatten(1))
    {out}a, {out}b = torch.meshgrid({x}.flatten()[:3], {y}.flatten()[:2], indexing='ij');{out} = {out}a + {out}b
    {out} = torch.cartesian_prod({x}.flatten()[:3], {y}.flatten()[:2])
""")  # noqa: E501

POOL = _lines("""
    {out} = F.max_pool{dims}d({x}, 2)
    {out} = F.max_pool{dims}d({x}, kernel_size=3, stride=1, padding=1)
    {out} = F.max_pool{dims}d({x}, 2, 1, dilation=2)
    {out}, {out}i = F.max_pool{dims}d({x}, 2, return_indices=True)
    {out} = F.avg_pool{dims}d({x}, 2, ceil_mode=True)
    {out} = F.avg_pool{dims}d({x}, 3, 1, 1, count_include_pad=False)
    {out} = F.avg_pool2d({x}, 2, divisor_override=3)
    {out} = F.lp_pool{dims}d({x}, 2, 2)
    {out} = F.adaptive_avg_pool{dims}d({x}, {k})
    {out} = F.adaptive_avg_pool2d({x}, (None, 2))
    {out} = F.adaptive_max_pool{dims}d({x}, 2)
    {out} = F.interpolate({x}, scale_factor=2)
    {out} = F.interpolate({x}, scale_factor=2.0, mode='nearest')
    {out} = F.interpolate({x}, size={x}.shape[2:])
    {out} = F.interpolate({x}, size=(5, 7), mode='bilinear')
    {out} = F.interpolate({x}, size=(5, 7), mode='bilinear', align_corners=True)
    {out} = F.interpolate({x}, scale_factor=2, mode='bicubic')
    {out} = F.interpolate({x}, size=5, mode='linear')
    {out} = F.avg_pool{dims}d({x}, kernel_size={x}.shape[2:])
    {out} = F.grid_sample({x}, torch.zeros({x}.shape[0], 2, 2, 2), align_corners=False)
""")

REDUCE = _lines("""
    {out} = {x}.mean({d})
    {out} = {x}.mean({d}, keepdim=True)
    {out} = {x}.mean((2, 3), keepdims=True)
    {out} = {x}.mean(dim=[-2, -1])
    {out} = torch.mean({x}, axis={d})
    {out} = {x} - {x}.mean()
    {out} = {x}.sum({d}, keepdim=True)
    {out} = torch.sum({x}, dim=({d},))
    {out} = {x}.sum(-1, dtype=torch.float64).float()
    {out} = {x}.amax({d})
    {out} = torch.amin({x}, dim=(1, -1), keepdim=True)
    {out} = {x}.max({d})[0]
    {out} = {x}.max(dim={d}).values
    {out} = {x} / {x}.abs().max()
    {out} = torch.min({x}, {d}, keepdim=True).values
    {out} = torch.max({x}, {y})
    {out} = torch.sort({x}, {d})[0]
    {out} = {x}.sort(dim={d}, descending=True).values
    {out} = torch.topk({x}, 1, {d})[0]
    {out}, {out}i = {x}.topk(2, dim={d})
    {out} = torch.kthvalue({x}, 1, {d}).values
    {out} = {x}.median({d}).values
    {out} = {x}.cumsum({d})
    {out} = {x}.cumprod({d})
    {out} = {x}.cummax({d})[0]
    {out} = {x}.std({d}, keepdim=True)
    {out} = {x}.var({d}, unbiased=False)
    {out}, {out}m = torch.std_mean({x}, {d})
    {out} = {x}.prod({d})
    {out} = {x}.norm(dim={d}, keepdim=True)
    {out} = torch.linalg.vector_norm({x}, dim={d})
    {out} = torch.logsumexp({x}, {d})
    {out} = {x}.argmax({d})
    {out} = {x}.argmax({d}).float()
    {out} = ({x} > 0).any({d})
    {out} = ({x} > 0).sum({d})
    {out} = ({x} > 0).float().mean({d})
    {out} = {x}.diff(dim={d})
    {out} = torch.bucketize({x}, torch.tensor([0.0, 1.0])).float()
    {out} = {x}.double().mul(2).float()
    {out} = {x}.half().float()
    {out} = {x}.to(torch.bfloat16).to(torch.float32)
    {out} = {x}.double()
    {out} = {x}.int().float()
    {out} = {x}.long() + 1
    {out} = {x}.bool()
    {out} = {x}.type_as(x0)
    {out} = {x}.type(torch.float64).sum(-1).to(dtype=torch.float32)
    {out} = {x}.logical_not().to({x}.dtype)
""")

SIZES = _lines("""
    {out}n = {x}.shape[1];{out} = {x} * {out}n
    {out}b, {out}n, *_ = {x}.shape;{out} = {x}.reshape({out}b, {out}n, -1)
    {out} = {x} / {x}.size(-1) ** 0.5
    {out} = {x} / {x}.numel()
    {out} = {x} + len({x})
    {out} = {x} * {x}.dim()
    {out} = {x} + float({x}.shape[-1] % 2)
    {out} = {x}[:, : {x}.shape[1] // 2]
    {out} = {x}[..., {x}.shape[-1] // 2 :]
    {out} = {x}[:, -min(2, {x}.shape[1]) :]
    {out}n = {x}.size(0);{out} = {x}.reshape({out}n, -1)
    {out} = {x}.view({x}.shape[0] * {x}.shape[1], -1)
    {out} = {x} + torch.arange({w})
    {out} = {x} + torch.arange({x}.shape[-1])
    {out} = {x} * torch.linspace(0, 1, {x}.shape[-1])
    {out} = {x} + torch.ones({x}.shape[-1])
    {out} = {x} * torch.ones_like({x})
    {out} = {x} + torch.full(({w},), 0.5)
    {out} = {x}.new_ones({x}.shape) - {x}
    {out} = {x} + torch.eye({w})[0]
    {out} = {x} * torch.tensor({number})
    {out} = {x}.masked_fill(torch.ones({x}.shape[-1], {x}.shape[-1]).tril() == 0, -1.0)
    {out} = F.pad({x}, (0, {x}.shape[-1] % 3))
    {out} = F.adaptive_avg_pool2d({x}, ({x}.shape[-2] // 2, {x}.shape[-1] // 2))
    if {x}.shape[0] > 2:;    {x} = {x} * 2
    if {x}.shape[-1] % 2 == 0:;    {x} = {x}[..., :-1]
    if {x}.dim() > 3:;    {x} = {x}.flatten(2)
    if {x}.shape[0] == 1:;    {x} = {x} - 1
    {out} = {x} if {x}.shape[-1] > 6 else {x} * 3
    if {x}.sum() > 0:;    {x} = {x} + 1
    if {x}.mean().item() > 0.05:;    {x} = {x} * 2
    if bool(({x} > 1).any()):;    {x} = {x}.clamp(max=1)
    if self.training:;    {x} = {x} * 0
    if isinstance({x}, torch.Tensor) and {x}.dtype == torch.float32:;    {x} = {x} + 0.5
    {out} = {x};for i in range({x}.shape[1]):;    {out} = {out} + {x}[:, i : i + 1]
    {out} = {x};for i in range(3):;    {out} = {out} * 0.5 + i
    {out} = {x};while {out}.abs().max() > 1:;    {out} = {out} * 0.5
    {out} = [one.relu() for one in {x}.unbind(1)][-1]
    {out} = torch.stack([one.mean(0) for one in {x}])
    {out}s = {{'a': {x}, 'b': {y}}};{out} = {out}s['a'] + {out}s.get('b')
    {out}s = [{x}, {y}];{out}s.append({x} * 2);{out} = {out}s.pop() - {out}s[0]
    try:;    {out} = {x}.view(-1, 3);except RuntimeError:;    {out} = {x} * 2
    with torch.no_grad():;    {out} = {x} * 2
    {out} = (lambda one, scale=2.0: one * scale)({x}, scale=0.5)
    {out} = torch.func.vmap(lambda one: one * 2)({x})
    {out} = torch.utils.checkpoint.checkpoint(torch.sigmoid, {x}, use_reentrant=False)
    assert {x}.dim() > 0;{out} = {x} + 1
    {out} = {x} * float({y}.mean())
    {out} = {x} * int({x}.shape[1])
""")

"""What a graph in an artifact may call: closed lists, by name.

A name is looked up in these lists and nowhere else, so a file can name nothing that is not here.
Left out on purpose: whatever writes into its arguments, draws random numbers, touches files,
memory addresses, storages or Python objects.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from x86quant.ops import NAMESPACE, SCHEMAS

Target = Callable[..., Any]

_ELEMENTWISE = """
    abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil
    clamp clamp_max clamp_min clip cos cosh div eq erf erfc exp expm1 floor floor_divide fmod frac
    ge gt isfinite isinf isnan le lerp log log10 log1p log2 logical_and logical_not logical_or
    logical_xor logit lt masked_fill maximum minimum mul nan_to_num ne neg pow prelu reciprocal relu
    remainder round rsqrt rsub sigmoid sign sin sinc sinh sqrt square sub tan tanh tril triu
    true_divide trunc where xlogy
    absolute acosh addr arccos arcsin arctan arctan2 asinh atanh bitwise_left_shift
    bitwise_right_shift copysign deg2rad digamma divide erfinv exp2 float_power fmax fmin greater
    greater_equal heaviside hypot i0 igamma igammac ldexp less less_equal lgamma logaddexp
    logaddexp2 logical_xor multiply mvlgamma negative nextafter not_equal polygamma positive
    rad2deg sgn signbit subtract
"""
_REDUCTIONS = """
    all amax amin any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum logsumexp max
    mean median min norm prod sort std sum topk var var_mean
    aminmax bincount diff histc kthvalue logcumsumexp mode msort nanmean nanmedian nansum nonzero
    quantile renorm std_mean trace unique_consecutive
"""
_SHAPES = """
    broadcast_to cat chunk clone concat concatenate expand expand_as flatten flip gather
    index_select masked_select movedim moveaxis narrow permute repeat repeat_interleave reshape
    roll rot90
    scatter scatter_add select squeeze stack split swapaxes swapdims t take_along_dim tile
    transpose unbind
    unflatten unfold unsqueeze view view_as
    adjoint argwhere atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors
    cartesian_prod column_stack combinations diag_embed diagonal_scatter dsplit dstack fliplr flipud
    hsplit index_add index_copy index_fill index_put index_reduce masked_scatter ravel reshape_as
    row_stack scatter_reduce select_scatter slice_scatter take tensor_split unsafe_chunk
    unsafe_split vsplit
"""
_PRODUCTS = """
    addbmm addmm addmv baddbmm bmm chain_matmul dot einsum inner kron linear matmul mm mv outer
    tensordot vdot
"""

_COMPLEX = """
    angle complex conj_physical imag is_complex isreal polar real resolve_conj resolve_neg
    view_as_complex view_as_real
"""
_FOURIER = """
    fft fft2 fftn fftfreq fftshift hfft hfft2 hfftn ifft ifft2 ifftn ifftshift ihfft ihfft2 ihfftn
    irfft irfft2 irfftn rfft rfft2 rfftn rfftfreq
"""

_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy
    ctc_loss gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss
    mse_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss
    nll_loss2d_forward nll_loss_forward nll_loss_nd cross_entropy_loss poisson_nll_loss
    smooth_l1_loss soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss
"""
_LINALG = """
    cholesky cond cross det diagonal eig eigh eigvals eigvalsh householder_product inv lstsq lu
    lu_factor lu_solve matmul matrix_exp matrix_norm matrix_power matrix_rank multi_dot norm pinv qr
    slogdet solve solve_triangular svd svdvals tensorinv tensorsolve vander vecdot vector_norm
"""
_SPECIAL = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 digamma entr erf erfc erfcx erfinv exp2 expit
    expm1 gammainc gammaincc gammaln i0 i0e i1 i1e log1p log_ndtr log_softmax logit logsumexp
    modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln ndtr
    ndtri polygamma psi round scaled_modified_bessel_k0 scaled_modified_bessel_k1 sinc softmax
    spherical_bessel_j0 xlog1py xlogy zeta
"""
#: Of the functions and the methods alike.
_MORE = """
    allclose arccosh arcsinh arctanh cholesky_inverse cholesky_solve corrcoef cov
    cumulative_trapezoid det diagflat dist equal fix frexp gcd inverse isclose isin isneginf
    isposinf lcm logdet
    matrix_exp matrix_power narrow_copy numel pinverse qr slogdet svd trapezoid trapz
    triangular_solve unsafe_split_with_sizes
"""

# fmt: off
_TORCH = f"""
    {_MORE} {_LOSSES} adaptive_max_pool1d constant_pad_nd convolution dequantize grid_sampler_2d
    grid_sampler_3d gru_cell is_signed lstm_cell native_group_norm native_layer_norm
    norm_except_dim numel pdist rnn_relu_cell rnn_tanh_cell sym_float sym_int sym_max sym_min
    sym_not _sym_log2 _sym_sqrt
    _assert tensor threshold unique
    {_ELEMENTWISE} {_REDUCTIONS} {_SHAPES} {_PRODUCTS} {_COMPLEX}
    affine_grid_generator bartlett_window blackman_window conj grid_sampler hamming_window
    hann_window istft kaiser_window stft
    adaptive_avg_pool1d arange avg_pool1d batch_norm bilinear bucketize celu celu conv1d conv2d
    conv3d conv_transpose1d conv_transpose2d conv_transpose3d cdist channel_shuffle
    cosine_similarity cross detach diag diagonal diff embedding empty_like eye finfo full full_like
    group_norm hardshrink hstack instance_norm is_floating_point layer_norm linspace max_pool1d
    max_pool2d max_pool3d meshgrid ones ones_like pixel_shuffle pixel_unshuffle rms_norm
    searchsorted selu softmax log_softmax split_with_sizes vstack zeros zeros_like
"""
_FUNCTIONAL = f"""
    {_LOSSES} adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices
    adaptive_max_pool3d_with_indices lp_pool3d max_pool1d_with_indices max_pool2d_with_indices
    max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d pdist
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d affine_grid alpha_dropout avg_pool1d avg_pool2d
    avg_pool3d batch_norm bilinear celu conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d cosine_similarity dropout dropout1d dropout2d dropout3d elu embedding
    embedding_bag feature_alpha_dropout fold gelu glu grid_sample group_norm hardshrink hardsigmoid
    hardswish hardtanh instance_norm interpolate layer_norm leaky_relu linear local_response_norm
    log_softmax logsigmoid lp_pool1d lp_pool2d max_pool1d max_pool2d max_pool3d mish normalize
    one_hot pad pairwise_distance pixel_shuffle pixel_unshuffle prelu relu relu6 rms_norm
    scaled_dot_product_attention selu sigmoid silu softmax softmin softplus softshrink softsign tanh
    tanhshrink threshold unfold upsample
"""
_OPERATOR = """
    abs add and_ eq floordiv ge getitem gt index invert is_ is_not le lshift lt matmul mod mul ne
    neg not_ or_ pos pow rshift sub truediv truth xor
"""
#: Of sizes and other plain numbers.
_MATH = "ceil copysign exp fabs floor hypot isfinite isinf isnan log log10 log2 pow prod sqrt trunc"
_ATEN = f"""
    {_ELEMENTWISE} {_REDUCTIONS} {_SHAPES} {_PRODUCTS} {_COMPLEX}
    {" ".join(f"fft_{name}" for name in _FOURIER.split())}
    {" ".join(f"linalg_{name}" for name in _LINALG.split())}
    {" ".join(f"special_{name}" for name in _SPECIAL.split())}
    {_MORE} {_LOSSES} _embedding_bag_forward_only _euclidean_dist _functional_assert_async
    _grouped_mm _local_scalar_dense _pdist_forward _unique2 _unsafe_index_put
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    adaptive_max_pool1d
    adaptive_max_pool3d bucketize eye fill is_same_size is_signed isin item
    linalg_cholesky_ex linalg_inv_ex linalg_lu_factor_ex linalg_solve_ex log_sigmoid_forward
    logspace
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices max_unpool2d
    max_unpool3d meshgrid numel pad_sequence pairwise_distance pdist searchsorted
    segment_reduce softshrink threshold tril_indices triu_indices unique_dim
    _conj _fft_c2c _fft_c2r _fft_r2c _neg_view affine_grid_generator bartlett_window blackman_window
    conj grid_sampler_3d hamming_window hann_window istft kaiser_window stft
    _adaptive_avg_pool2d _adaptive_avg_pool3d _native_batch_norm_legit _prelu_kernel _safe_softmax
    _trilinear _unsafe_index _weight_norm_interface _assert_scalar _assert_tensor_metadata
    _native_batch_norm_legit_no_training
    __and__ __or__ __xor__
    _softmax _log_softmax _to_copy _unsafe_view adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool2d alias arange avg_pool1d avg_pool2d avg_pool3d batch_norm
    celu channel_shuffle constant_pad_nd contiguous conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d copy cosine_similarity cross diag diagonal
    conv_transpose3d convolution detach detach_ dropout elu embedding embedding_bag empty_like full
    full_like gelu glu grid_sampler grid_sampler_2d group_norm hardshrink hardsigmoid hardswish
    hardtanh index instance_norm layer_norm leaky_relu lift_fresh_copy linspace log_sigmoid
    log_softmax
    max_pool1d max_pool2d max_pool3d mish native_group_norm native_layer_norm new_full new_ones
    new_zeros col2im gru_cell im2col lstm_cell one_hot ones ones_like pad pixel_shuffle
    pixel_unshuffle reflection_pad1d
    reflection_pad2d reflection_pad3d relu6 replication_pad1d replication_pad2d replication_pad3d
    rms_norm rnn_relu_cell rnn_tanh_cell scalar_tensor scaled_dot_product_attention
    selu silu slice softmax softplus split_with_sizes sym_constrain_range_for_size sym_numel
    sym_size sym_stride to type_as upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d zeros zeros_like
"""

#: Methods of tensors.
METHODS: frozenset[str] = frozenset(f"""
    {_ELEMENTWISE} {_REDUCTIONS} {_SHAPES} {_PRODUCTS} {_MORE}
    angle cdouble cfloat cross diag diagonal new_tensor sum_to_size unique conj
    conj_physical is_complex isreal istft resolve_conj resolve_neg stft
    bfloat16 bool byte char contiguous cpu dequantize detach dim double element_size float half
    hardshrink int int_repr is_contiguous is_floating_point item log_softmax long ndimension
    new_full new_ones new_zeros nelement numel short size softmax split_with_sizes stride to type_as
""".split())
# fmt: on

#: What ``getattr`` may read off a value.
ATTRIBUTES: frozenset[str] = frozenset(
    {
        *("T", "device", "dtype", "H", "mH", "mT", "ndim", "shape", "layout", "is_quantized"),
        *("real", "imag"),
        *("values", "indices"),  # of what topk, sort and max return
    }
)


def _table() -> dict[str, Target]:
    """Every allowed function by its name."""
    table: dict[str, Target] = {"getattr": getattr}
    for prefix, home, names in (
        ("operator", operator, _OPERATOR),
        ("math", math, _MATH),
        ("torch", torch, _TORCH),
        ("torch.nn.functional", F, _FUNCTIONAL),
        ("torch.fft", torch.fft, _FOURIER),
        ("torch.linalg", torch.linalg, _LINALG),
        ("torch.special", torch.special, _SPECIAL),
    ):
        table.update({f"{prefix}.{n}": getattr(home, n) for n in names.split() if hasattr(home, n)})
    for name in SCHEMAS:
        table[f"{NAMESPACE}::{name}"] = getattr(torch.ops.x86quant, name).default
    for name in _ATEN.split():
        table.update(_overloads(name))
    return table


def _overloads(name: str) -> dict[str, Target]:
    """The overloads of an aten op that change none of their arguments."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return {}
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return {
        f"aten::{name}.{overload._overloadname}": overload
        for overload in overloads
        if not overload._schema.is_mutable
    }


#: Writes in place, which only the graph of an ``OnCopy`` may do, to what it has copied.
_WRITES = f"""
    {_ELEMENTWISE} {_PRODUCTS} copy fill index_add index_copy index_fill index_put index_reduce
    masked_scatter scatter scatter_add scatter_reduce zero celu elu hardtanh leaky_relu relu6 selu
    silu threshold
"""
_WRITING_OPERATORS = """
    iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor
"""
WRITING_METHODS: frozenset[str] = frozenset(
    f"{name}_" for name in _WRITES.split() if hasattr(torch.Tensor, f"{name}_")
)


def _writing_table() -> dict[str, Target]:
    """Every function that writes in place by its name."""
    table: dict[str, Target] = {"operator.setitem": operator.setitem}
    table.update({f"operator.{n}": getattr(operator, n) for n in _WRITING_OPERATORS.split()})
    for prefix, home in (("torch", torch), ("torch.nn.functional", F)):
        for name in _WRITES.split():
            if hasattr(home, f"{name}_"):
                table[f"{prefix}.{name}_"] = getattr(home, f"{name}_")
    for name in _WRITES.split():
        packet = getattr(torch.ops.aten, f"{name}_", None)
        for overload in [] if packet is None else packet.overloads():
            function = getattr(packet, overload)
            written = [x.name for x in function._schema.arguments if _is_written(x)]
            if written == ["self"]:
                table[f"aten::{name}_.{function._overloadname}"] = function
    return table


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class _Functions:
    """Both directions of a table, made when first needed."""

    def __init__(self, make: Callable[[], dict[str, Target]]) -> None:
        self._make = make
        self._by_name: dict[str, Target] = {}
        self._names: dict[Target, str] = {}

    def _fill(self) -> None:
        if not self._by_name:
            table = self._make()
            # Of several names of one function the first stays.
            self._names = {function: name for name, function in reversed(table.items())}
            self._by_name = table

    def name(self, target: object) -> str | None:
        """The name ``target`` is stored under, or None when it is not allowed."""
        self._fill()
        if isinstance(target, torch._ops.OpOverloadPacket):
            target = getattr(target, "default", target)
        return self._names.get(target) if callable(target) else None

    def find(self, name: str) -> Target | None:
        """The function stored as ``name``, or None when it is not allowed."""
        self._fill()
        return self._by_name.get(name)


FUNCTIONS = _Functions(_table)
WRITING_FUNCTIONS = _Functions(_writing_table)

// The element-wise, pooling and resampling calls of the C interface.
#include "internal.h"

namespace xq {
namespace {

bool sane(const xq_tensor& t) {
  const bool sizes = t.n >= 0 && t.d >= 0 && t.h >= 0 && t.w >= 0 && t.c >= 0;
  return sizes && (t.data || t.n * t.d * t.h * t.w * t.c == 0);
}

bool same_pixels(const xq_tensor& a, const xq_tensor& b) {
  return a.n == b.n && a.d == b.d && a.h == b.h && a.w == b.w;
}

constexpr int64_t kMostNormalized = int64_t{1} << 18;  // C² · 255² then fits a double's 53 bits
constexpr int64_t kPoolBlock = 128;  // channels of an item where a pool has one row a image

// Blocks of channels that an item's row splits into.
int64_t channel_blocks(const xq_op& op) {
  const bool average = op.kind == XQ_OP_AVG_POOL || op.kind == XQ_OP_ADAPTIVE_POOL;
  return average && op.out.d * op.out.h == 1 ? ceil_div(op.out.c, kPoolBlock) : 1;
}

// The op on one block of channels only.
xq_op block_of(xq_op op, int64_t block) {
  const int64_t first = block * kPoolBlock;
  op.a.c = op.out.c = min64(kPoolBlock, op.out.c - first);
  op.a.data += first, op.out.data += first;
  return op;
}

bool gives_reals(const xq_op& op) { return op.kind == XQ_OP_DEQUANTIZE || op.kind == XQ_OP_LUT_REAL; }

// Floats in neither of the two usual layouts.
bool odd_strides(const xq_op& op) {
  if (op.out.c == 1) return false;
  if (op.kind == XQ_OP_QUANTIZE) return op.a_stride_c != 4 && op.a.stride_w != 4;
  return gives_reals(op) && op.out_stride_c != 4 && op.out.stride_w != 4;
}

// With one pixel a row, the step between pixels shows in another stride.
void settle_step(xq_tensor& t) {
  if (t.w == 1) t.stride_w = t.h > 1 ? t.stride_h : t.d > 1 ? t.stride_d : t.stride_n;
}

// Whether the codes of a window, less their zero points, may sum to more than an int32.
bool sums_are_long(const xq_op& op) {
  if (op.kind != XQ_OP_AVG_POOL && op.kind != XQ_OP_ADAPTIVE_POOL) return false;
  const int64_t in[3] = {op.a.d, op.a.h, op.a.w}, out[3] = {op.out.d, op.out.h, op.out.w};
  int64_t pixels = 1;
  for (int i = 0; i < 3; ++i)  // an adaptive window may straddle two more pixels than its share
    pixels *= op.kind == XQ_OP_AVG_POOL ? min64(op.kernel[i], in[i]) : min64(in[i], ceil_div(in[i], out[i]) + 1);
  return pixels > INT32_MAX / 255;
}

void run_rows(xq_op op, int64_t begin, int64_t end) {
  if (pixelwise(op)) {
    settle_step(op.a), settle_step(op.out);
    if (b_is_wide(op)) settle_step(op.b);
  }
  if (op.isa == XQ_ISA_REFERENCE || odd_strides(op) || sums_are_long(op)) return op_reference(op, begin, end);
  kernels_of(op.isa).op_rows(op, begin, end);
}

bool byte_range(int32_t v) { return v >= 0 && v <= 255; }

bool pool_fits(const xq_op& op) {
  const int64_t in[3] = {op.a.d, op.a.h, op.a.w}, out[3] = {op.out.d, op.out.h, op.out.w};
  int64_t window = 1;
  for (int i = 0; i < 3; ++i) {
    if (__builtin_mul_overflow(window, op.kernel[i], &window)) return false;
    if (op.kernel[i] < 1 || op.stride[i] < 1 || op.padding[i] < 0 || op.dilation[i] < 1) return false;
    if (op.kind == XQ_OP_AVG_POOL && op.dilation[i] != 1) return false;
    if (int64_t{2} * op.padding[i] > op.kernel[i]) return false;
    // Every window starts inside the input or its left padding, as with ceil_mode.
    if ((out[i] - 1) * op.stride[i] >= in[i] + op.padding[i]) return false;
  }
  return true;
}

bool scale_usable(const xq_op& op) {
  for (float s : op.scale)
    if (!(s >= 0 && s <= 65536)) return false;
  return true;
}

bool shapes_fit(const xq_op& op) {
  const xq_tensor &a = op.a, &b = op.b, &out = op.out;
  if (a.n != out.n || a.c != out.c) return false;
  const bool point = b.d == 1 && b.h == 1 && b.w == 1 && b.n == out.n;
  switch (op.kind) {
    case XQ_OP_COPY:
    case XQ_OP_LUT:
    case XQ_OP_REQUANT:
    case XQ_OP_QUANTIZE:
    case XQ_OP_DEQUANTIZE:
    case XQ_OP_LUT_REAL:
    case XQ_OP_AFFINE: return same_pixels(a, out);
    case XQ_OP_LAYER_NORM: return same_pixels(a, out) && a.c <= kMostNormalized;
    case XQ_OP_ADD: return same_pixels(a, out) && same_pixels(b, out) && b.c == out.c;
    case XQ_OP_MUL: return same_pixels(a, out) && (same_pixels(b, out) || point) && b.c == out.c;
    case XQ_OP_SHUFFLE: return same_pixels(a, out) && op.groups >= 1 && a.c % op.groups == 0;
    case XQ_OP_NEAREST: return scale_usable(op);
    case XQ_OP_BILINEAR: return a.d == out.d && scale_usable(op);
    case XQ_OP_MAX_POOL:
    case XQ_OP_AVG_POOL: return pool_fits(op);
    default: return true;
  }
}

}  // namespace
}  // namespace xq

using namespace xq;

int xq_op_check(const xq_op* op) {
  if (!op || op->kind < XQ_OP_COPY || op->kind > XQ_OP_LUT_REAL) return XQ_BAD_ARGUMENT;
  if (op->isa < XQ_ISA_REFERENCE || op->isa > XQ_ISA_AMX_INT8) return XQ_BAD_ARGUMENT;
  if (!sane(op->a) || !sane(op->out)) return XQ_BAD_ARGUMENT;
  if ((op->kind == XQ_OP_ADD || op->kind == XQ_OP_MUL) && !sane(op->b)) return XQ_BAD_ARGUMENT;
  if (op->kind == XQ_OP_LUT && !op->lut) return XQ_BAD_ARGUMENT;
  if (op->kind == XQ_OP_LUT_REAL && !op->reals) return XQ_BAD_ARGUMENT;
  if (op->kind == XQ_OP_AFFINE && !(op->scale_c && op->shift_c)) return XQ_BAD_ARGUMENT;
  if (op->kind == XQ_OP_LAYER_NORM && !(op->eps >= 0)) return XQ_BAD_ARGUMENT;
  if (!__builtin_isfinite(op->a_mult) || !__builtin_isfinite(op->b_mult) || !__builtin_isfinite(op->eps)) return XQ_NOT_FINITE;
  if (!byte_range(op->a_zp) || !byte_range(op->b_zp) || !byte_range(op->out_zp)) return XQ_BAD_ARGUMENT;
  if (!byte_range(op->lo) || !byte_range(op->hi) || op->lo > op->hi) return XQ_BAD_ARGUMENT;
  if (!shapes_fit(*op)) return XQ_BAD_SHAPE;
  const bool empty_in = op->a.d * op->a.h * op->a.w == 0;
  const bool wanted = op->out.n * op->out.d * op->out.h * op->out.w != 0;
  return empty_in && wanted ? XQ_BAD_SHAPE : XQ_OK;
}

int64_t xq_op_items(const xq_op* op) { return op->out.n * op->out.d * op->out.h * channel_blocks(*op); }

void xq_op_run(const xq_op* op, int64_t begin, int64_t end) {
  if (op->out.w == 0 || op->out.c == 0 || begin >= end) return;
  const int64_t blocks = channel_blocks(*op);
  if (blocks == 1) return run_rows(*op, begin, end);
  for (int64_t item = begin; item < end; ++item)
    run_rows(block_of(*op, item % blocks), item / blocks, item / blocks + 1);
}

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

bool byte_range(int32_t v) { return v >= 0 && v <= 255; }

bool pool_fits(const xq_op& op) {
  const int64_t in[3] = {op.a.d, op.a.h, op.a.w}, out[3] = {op.out.d, op.out.h, op.out.w};
  for (int i = 0; i < 3; ++i) {
    if (op.kernel[i] < 1 || op.stride[i] < 1 || op.padding[i] < 0 || op.dilation[i] < 1) return false;
    if (op.kind == XQ_OP_AVG_POOL && op.dilation[i] != 1) return false;
    if (2 * op.padding[i] > op.kernel[i]) return false;
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
    case XQ_OP_REQUANT: return same_pixels(a, out);
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
  if (!op || op->kind < XQ_OP_COPY || op->kind > XQ_OP_BILINEAR) return XQ_BAD_ARGUMENT;
  if (op->isa < XQ_ISA_REFERENCE || op->isa > XQ_ISA_AMX_INT8) return XQ_BAD_ARGUMENT;
  if (!sane(op->a) || !sane(op->out)) return XQ_BAD_ARGUMENT;
  if ((op->kind == XQ_OP_ADD || op->kind == XQ_OP_MUL) && !sane(op->b)) return XQ_BAD_ARGUMENT;
  if (op->kind == XQ_OP_LUT && !op->lut) return XQ_BAD_ARGUMENT;
  if (!byte_range(op->a_zp) || !byte_range(op->b_zp) || !byte_range(op->out_zp)) return XQ_BAD_ARGUMENT;
  if (!byte_range(op->lo) || !byte_range(op->hi) || op->lo > op->hi) return XQ_BAD_ARGUMENT;
  if (!shapes_fit(*op)) return XQ_BAD_SHAPE;
  const bool empty_in = op->a.d * op->a.h * op->a.w == 0;
  const bool wanted = op->out.n * op->out.d * op->out.h * op->out.w != 0;
  return empty_in && wanted ? XQ_BAD_SHAPE : XQ_OK;
}

int64_t xq_op_items(const xq_op* op) { return op->out.n * op->out.d * op->out.h; }

void xq_op_run(const xq_op* op, int64_t begin, int64_t end) {
  if (op->out.w == 0 || op->out.c == 0 || begin >= end) return;
  if (op->isa == XQ_ISA_REFERENCE) return op_reference(*op, begin, end);
  kernels_of(op->isa).op_rows(*op, begin, end);
}

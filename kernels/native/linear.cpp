// The dynamic-linear calls of the C interface: rows to codes, codes times weights to floats.
#include <algorithm>
#include <cmath>

#include "row_tasks.h"

namespace xq {
namespace {

const Packed* packed_of(const xq_linear_call& call) {
  const auto* p = static_cast<const Packed*>(call.packed);
  const bool ours = p && reinterpret_cast<uintptr_t>(p) % kAlign == 0 && p->magic == kMagic;
  return ours && p->weight_sums ? p : nullptr;
}

// Codes, then scales, then zero points. Rows are whole cache lines, an odd number of them: rows a power
// of two apart would share their place in L1. Tiles read whole, so rows are rounded up.
struct Codes {
  int64_t lda, rows;
  uint8_t* codes;
  float* scale;
  int32_t* zp;
  int64_t size;

  explicit Codes(const xq_linear_call& call) {
    const auto& p = *static_cast<const Packed*>(call.packed);
    lda = copied_stride(p.conv.in_channels);
    rows = round_up(call.rows, kRowTile);
    codes = static_cast<uint8_t*>(call.codes);
    size = rows * (lda + 8);
    if (!codes) return;
    scale = reinterpret_cast<float*>(codes + rows * lda);
    zp = reinterpret_cast<int32_t*>(scale + rows);
  }
};

Cut cut_of(const xq_linear_call& call) {
  const auto& p = *static_cast<const Packed*>(call.packed);
  const int64_t tiles = ceil_div(call.rows, kRowTile), threads = call.threads;
  // Sharing out outputs reads the rows once a thread; sharing out rows the weights.
  const bool wide = p.conv.out_channels > call.rows && p.n_blocks >= threads;
  if (p.algo != XQ_ALGO_REFERENCE && (wide || tiles < threads))
    return {tiles, 1, max64(1, min64(threads, p.n_blocks))};
  return {tiles, min64(tiles, threads), 1};
}

}  // namespace

float activate_reference(float x, int32_t activation) {
  switch (activation) {
    case XQ_ACT_RELU: return x < 0 ? 0 : x;
    case XQ_ACT_GELU: return 0.5f * x * (1 + std::erf(x * 0.707106781f));
    case XQ_ACT_GELU_TANH: return 0.5f * x * (1 + std::tanh(0.797884561f * (x + 0.044715f * x * x * x)));
    case XQ_ACT_SILU: return x / (1 + std::exp(-x));
    case XQ_ACT_SIGMOID: return 1 / (1 + std::exp(-x));
    case XQ_ACT_TANH: return std::tanh(x);
    default: return x;
  }
}

namespace {

void linear_reference(const DenseTask& t) {
  const Packed& p = *t.packed;
  const auto* weight = p.at<int8_t>(p.weights);
  const int64_t in = p.conv.in_channels;
  for (int64_t m = 0; m < t.rows; ++m)
    for (int64_t c = 0; c < p.conv.out_channels; ++c) {
      uint32_t sum = 0;
      for (int64_t k = 0; k < in; ++k)
        sum += (uint32_t{t.a[m * t.lda + k]} - static_cast<uint32_t>(t.row_zp[m])) * static_cast<uint32_t>(weight[c * in + k]);
      const float v = std::fma(static_cast<float>(static_cast<int32_t>(sum)),
                               t.row_scale[m] * p.at<float>(p.mult)[c], p.at<float>(p.bias)[c]);
      reinterpret_cast<float*>(t.out + m * t.out_pixel)[c] = activate_reference(v, p.activation);
    }
}

void multiply(const xq_linear_call& call, const Codes& codes, int64_t begin, int64_t end, int32_t b0, int32_t b1) {
  const auto& p = *static_cast<const Packed*>(call.packed);
  const int64_t zero = 0;
  DenseTask t{};
  t.packed = &p, t.corr = p.at<int32_t>(p.corr);
  t.a = codes.codes + begin * codes.lda, t.offsets = &zero, t.lda = codes.lda;
  t.segments = 1, t.rows = t.row_len = t.row_valid = end - begin;
  t.tail_begin = INT64_MAX;
  t.out_pixel = call.out_stride * 4;
  t.out = reinterpret_cast<uint8_t*>(call.out) + begin * t.out_pixel;
  t.row_scale = codes.scale + begin, t.row_zp = codes.zp + begin;
  t.block_begin = b0, t.block_end = b1;
  linear_product(t);
}

}  // namespace

void linear_product(const DenseTask& t) {
  const Packed& p = *t.packed;
  if (p.groups) return linear_groups(t);
  p.isa == XQ_ISA_REFERENCE ? linear_reference(t) : kernels_of(p.isa).linear(t);
}

void quantize_reference(const RowsTask& t) {
  for (int64_t m = 0; m < t.rows; ++m) {
    const auto* row = reinterpret_cast<const float*>(t.in + m * t.in_stride);
    float low = 0, high = 0;
    bool finite = true;
    for (int64_t k = 0; k < t.features; ++k) {
      low = std::min(low, row[k]), high = std::max(high, row[k]);
      finite = finite && std::isfinite(row[k]);
    }
    const RowRange range = range_of(low, high, finite);
    t.scale[m] = range.scale;
    t.zp[m] = finite ? static_cast<int32_t>(std::nearbyint(-low * range.inverse)) : 0;
    for (int64_t k = 0; k < t.features; ++k) {
      const float steps = finite ? std::nearbyint(row[k] * range.inverse) : 0;
      t.codes[m * t.lda + k] = static_cast<uint8_t>(std::clamp(static_cast<int32_t>(steps) + t.zp[m], 0, 255));
    }
  }
}

}  // namespace xq

using namespace xq;

int xq_linear_check(const xq_linear_call* call) {
  const Packed* p = call ? packed_of(*call) : nullptr;
  if (!p || call->threads < 1 || call->rows < 0) return XQ_BAD_ARGUMENT;
  if (call->rows == 0) return XQ_OK;
  if (!call->in || !call->out) return XQ_BAD_ARGUMENT;
  const bool fits = call->in_stride >= p->conv.in_channels && call->out_stride >= p->conv.out_channels;
  return fits || call->rows == 1 ? XQ_OK : XQ_BAD_SHAPE;
}

size_t xq_linear_codes_size(const xq_linear_call* call) {
  xq_linear_call sizes = *call;
  sizes.codes = nullptr;
  return static_cast<size_t>(Codes(sizes).size);
}

int xq_linear_by_rows(const xq_linear_call* call) { return cut_of(*call).by_block == 1; }

void xq_linear_quantize(const xq_linear_call* call, int64_t begin, int64_t end) {
  const auto& p = *static_cast<const Packed*>(call->packed);
  const Codes codes(*call);
  const RowsTask t{reinterpret_cast<const uint8_t*>(call->in + begin * call->in_stride), call->in_stride * 4,
                   end - begin, p.conv.in_channels, codes.codes + begin * codes.lda, codes.lda,
                   codes.scale + begin, codes.zp + begin};
  p.isa == XQ_ISA_REFERENCE ? quantize_reference(t) : kernels_of(p.isa).quantize_rows(t);
}

int64_t xq_linear_items(const xq_linear_call* call) { return cut_of(*call).items(); }

void xq_linear_run(const xq_linear_call* call, int64_t begin, int64_t end) {
  const auto& p = *static_cast<const Packed*>(call->packed);
  const Cut cut = cut_of(*call);
  const Codes codes(*call);
  for (int64_t item = begin; item < end; ++item) {
    const CutPiece some = piece_of(cut, item, p);
    const int64_t first = some.first * kRowTile, last = min64(some.last * kRowTile, call->rows);
    if (cut.by_block == 1) xq_linear_quantize(call, first, last);
    multiply(*call, codes, first, last, some.block_begin, some.block_end);
  }
}

int xq_weight_only_check(const xq_weight_only* op) {
  if (!op || !op->scale || op->rows < 0 || op->in_features < 0 || op->out_features < 0) return XQ_BAD_ARGUMENT;
  if (op->activation < XQ_ACT_NONE || op->activation > XQ_ACT_TANH) return XQ_BAD_ARGUMENT;
  if (op->isa <= XQ_ISA_REFERENCE || op->isa > XQ_ISA_AMX_INT8) return XQ_UNSUPPORTED;
  if (op->rows * op->out_features == 0) return XQ_OK;
  if (!op->out || (op->in_features > 0 && (!op->in || !op->weight))) return XQ_BAD_ARGUMENT;
  const bool fits = op->in_stride >= op->in_features && op->out_stride >= op->out_features;
  return fits || op->rows == 1 ? XQ_OK : XQ_BAD_SHAPE;
}

void xq_weight_only_run(const xq_weight_only* op, int64_t begin, int64_t end) {
  if (begin >= end) return;
  kernels_of(op->isa).weight_only({op->in, op->out, op->weight, op->scale, op->bias, op->rows, op->in_stride,
                                   op->out_stride, op->in_features, op->activation, begin, end});
}

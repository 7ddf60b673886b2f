// The calls on row codes of the C interface: GEMM by groups of rows, whose float results stay in cache until they are
// normed and quantized.
#include <algorithm>
#include <cmath>

#include "row_tasks.h"

namespace xq {
namespace {

const Packed* linear_of(const void* packed) {
  const auto* p = static_cast<const Packed*>(packed);
  const bool ours = p && reinterpret_cast<uintptr_t>(p) % kAlign == 0 && p->magic == kMagic;
  return ours && p->weight_sums ? p : nullptr;
}

bool has_codes(const xq_codes& c) { return c.codes && c.scale && c.zp; }
bool no_codes(const xq_codes& c) { return !c.codes && !c.scale && !c.zp; }

// Whether products read codes where they are: whole cache lines that do not put one another out.
bool in_place(int32_t isa, int64_t features) { return features % kAlign == 0 && !rows_collide(isa, features); }

// How a call is cut, and where its pieces lie.
struct Plan {
  const Packed *packed, *up;
  int64_t parts;            // of rows, in phase 1
  int64_t block_parts;      // of outputs, in phase 0: 0 where phase 1 multiplies
  int64_t group;            // rows that are multiplied before they are finished
  bool value_is_total;      // products go where the caller wants them
  int64_t row_floats;       // of a thread: a total and a normed row that nobody wants
  int64_t group_floats;     // products of a group
  int64_t copy_bytes;       // codes of a group where they cannot be read in place

  explicit Plan(const xq_rows& op) {
    packed = linear_of(op.packed), up = linear_of(op.up);
    const int64_t tiles = ceil_div(op.rows, kRowTile);
    parts = max64(1, min64(op.threads, packed ? tiles : op.rows));
    block_parts = 0;
    // Too few rows for all threads: they share out the outputs instead.
    if (packed && op.isa != XQ_ISA_REFERENCE && parts < op.threads && packed->n_blocks > 1) {
      block_parts = min64(op.threads, packed->n_blocks);
      parts = max64(1, min64(op.threads, op.rows));
    }
    value_is_total = packed && !up && !op.residual && op.total;
    const bool combined = up || op.residual;
    row_floats = ((combined && !op.total) + (op.norm != XQ_NORM_NONE && !op.normed)) * round_up(op.features, 16);
    group = op.rows, group_floats = 0, copy_bytes = 0;
    if (!packed) return;
    const int64_t bytes = op.features * 4 * (up ? 2 : 1), most = round_up(ceil_div(op.rows, parts), kRowTile);
    const bool finished = combined || op.norm != XQ_NORM_NONE || op.out.codes;
    group = block_parts ? round_up(op.rows, kRowTile) : most;
    // The floats of a group take half of L2, weights pass through the rest. Where three quarters hold all rows, weights
    // need not pass twice.
    const int64_t l2 = packed->caches.l2;
    if (!block_parts && finished && most * bytes > l2 * 3 / 4) group = min64(most, max64(l2 / 2 / bytes / kRowTile, 2) * kRowTile);
    const int64_t features = packed->conv.in_channels;
    if (!block_parts && rows_collide(op.isa, features))
      group = min64(group, copied_rows(*packed, features, kRowTile));
    group_floats = (value_is_total ? 0 : group * op.features) + (up ? group * op.features : 0);
    if (op.isa == XQ_ISA_REFERENCE) return;
    copy_bytes = (in_place(op.isa, features) ? kRowTile : group) * copied_stride(features);
  }

  // Threads that share out the outputs share one group's products.
  size_t shared_bytes() const { return block_parts ? static_cast<size_t>(group_floats * 4) : 0; }
  size_t thread_bytes() const {
    const int64_t floats = row_floats + (block_parts ? 0 : round_up(group_floats, 16));
    return static_cast<size_t>(floats * 4 + copy_bytes);
  }
};

// Products of rows [first, last) with blocks [b0, b1): their copied codes, if any, have been made.
void multiply(const xq_rows& op, const Packed& p, const uint8_t* copy, int64_t first, int64_t last, float* out, int64_t b0,
              int64_t b1) {
  const int64_t zero = 0, features = p.conv.in_channels;
  const bool reference = p.isa == XQ_ISA_REFERENCE, as_they_lie = reference || in_place(p.isa, features);
  DenseTask t{};
  t.packed = &p, t.corr = p.at<int32_t>(p.corr);
  t.a = as_they_lie ? op.in.codes + first * features : copy;
  t.lda = as_they_lie ? features : copied_stride(features);
  t.offsets = &zero;
  t.segments = 1, t.rows = t.row_len = t.row_valid = last - first;
  t.tail_begin = INT64_MAX;
  if (as_they_lie && !reference && t.rows % kRowTile) {
    t.tail_begin = t.rows / kRowTile * kRowTile;
    t.tail = copy, t.tail_lda = copied_stride(features);
  }
  t.out_pixel = op.features * 4;
  t.out = reinterpret_cast<uint8_t*>(out);
  t.row_scale = op.in.scale + first, t.row_zp = op.in.zp + first;
  t.block_begin = static_cast<int32_t>(b0), t.block_end = static_cast<int32_t>(b1);
  linear_product(t);
}

// The codes of rows [first, last) that products may not read where they are: they read whole tiles and cache lines.
void copy_codes(const xq_rows& op, int64_t features, int64_t first, int64_t last, uint8_t* copy) {
  const int64_t begin = in_place(op.isa, features) ? first + (last - first) / kRowTile * kRowTile : first;
  for (int64_t m = begin; m < last; ++m)
    memcpy(copy + (m - begin) * copied_stride(features), op.in.codes + m * features, static_cast<size_t>(features));
}

void finish_reference(const FinishTask& t) {
  for (int64_t m = 0; m < t.rows; ++m) {
    const float* x = t.value + m * t.value_stride;
    if (t.up || t.residual) {
      float* total = t.total + m * t.total_stride;
      for (int64_t k = 0; k < t.features; ++k) {
        float v = x[k];
        if (t.up) v *= t.up[m * t.up_stride + k];
        if (t.residual) v += t.residual[m * t.features + k];
        total[k] = v;
      }
      x = total;
    }
    if (t.norm != XQ_NORM_NONE) {
      float* normed = t.normed + m * t.normed_stride;
      float mean = 0, squares = 0;
      if (t.norm == XQ_NORM_LAYER)
        for (int64_t k = 0; k < t.features; ++k) mean += x[k];
      mean /= static_cast<float>(t.features);
      for (int64_t k = 0; k < t.features; ++k) squares += (x[k] - mean) * (x[k] - mean);
      const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(t.features) + t.eps);
      for (int64_t k = 0; k < t.features; ++k)
        normed[k] = std::fma((x[k] - mean) * rstd, t.norm_weight ? t.norm_weight[k] : 1.0f, t.norm_bias ? t.norm_bias[k] : 0.0f);
      x = normed;
    }
    if (t.codes)
      quantize_reference({reinterpret_cast<const uint8_t*>(x), 0, 1, t.features, t.codes + m * t.features, 0, t.scale + m, t.zp + m});
  }
}

// Rows [first, last), whose products, if any, lie at value and up.
void finish(const xq_rows& op, const float* value, const float* up, int64_t first, int64_t last, float* row) {
  const int64_t n = op.features;
  FinishTask t{};
  t.value = value, t.up = up, t.value_stride = t.up_stride = n;
  t.residual = op.residual ? op.residual + first * n : nullptr;
  t.rows = last - first, t.features = n;
  t.norm = op.norm, t.norm_weight = op.norm_weight, t.norm_bias = op.norm_bias, t.eps = op.eps;
  if (up || op.residual) {
    t.total = op.total ? op.total + first * n : row, t.total_stride = op.total ? n : 0;
    if (!op.total) row += round_up(n, 16);
  }
  t.normed = op.normed ? op.normed + first * n : row, t.normed_stride = op.normed ? n : 0;
  if (op.out.codes) t.codes = op.out.codes + first * n, t.scale = op.out.scale + first, t.zp = op.out.zp + first;
  op.isa == XQ_ISA_REFERENCE ? finish_reference(t) : row_kernels_of(op.isa).finish_rows(t);
}

// What is done to rows once they are multiplied, if anything.
bool finishes(const xq_rows& op) { return op.up || op.residual || op.norm != XQ_NORM_NONE || op.out.codes; }

}  // namespace
}  // namespace xq

using namespace xq;

int xq_rows_check(const xq_rows* op) {
  if (!op || op->isa < XQ_ISA_REFERENCE || op->isa > XQ_ISA_AMX_INT8) return XQ_BAD_ARGUMENT;
  if (op->rows < 0 || op->features < 0 || op->threads < 1) return XQ_BAD_ARGUMENT;
  if (op->norm < XQ_NORM_NONE || op->norm > XQ_NORM_RMS || !(op->eps >= 0)) return XQ_BAD_ARGUMENT;
  if (!__builtin_isfinite(op->eps)) return XQ_NOT_FINITE;
  if (!has_codes(op->out) && !no_codes(op->out)) return XQ_BAD_ARGUMENT;
  if (op->normed && op->norm == XQ_NORM_NONE) return XQ_BAD_ARGUMENT;
  const Packed *packed = linear_of(op->packed), *up = linear_of(op->up);
  if ((op->packed && !packed) || (op->up && !(up && packed))) return XQ_BAD_ARGUMENT;
  if (packed && (packed->isa != op->isa || packed->conv.out_channels != op->features)) return XQ_BAD_SHAPE;
  if (up && (up->isa != op->isa || up->conv.out_channels != op->features ||
             up->conv.in_channels != packed->conv.in_channels))
    return XQ_BAD_SHAPE;
  if (op->rows == 0 || op->features == 0) return XQ_OK;
  if (packed ? !has_codes(op->in) : !op->x) return XQ_BAD_ARGUMENT;
  // Without a product or a residual the total is x itself.
  if (!packed && !op->residual && op->total) return XQ_BAD_ARGUMENT;
  return op->total || op->normed || op->out.codes ? XQ_OK : XQ_BAD_ARGUMENT;
}

size_t xq_rows_shared(const xq_rows* op) {
  return Plan(*op).shared_bytes();
}

size_t xq_rows_scratch(const xq_rows* op) { return Plan(*op).thread_bytes(); }

int64_t xq_rows_items(const xq_rows* op, int phase) {
  if (op->rows == 0 || op->features == 0) return 0;
  const Plan plan(*op);
  if (phase == 0) return plan.block_parts;
  return plan.block_parts && !finishes(*op) ? 0 : plan.parts;
}

void xq_rows_run(const xq_rows* op, int phase, int64_t begin, int64_t end, void* shared, void* scratch) {
  const Plan plan(*op);
  const int64_t n = op->features;
  // Copied codes, then rows, then products of the rows of a group, then those of `up`.
  auto* copy = static_cast<uint8_t*>(scratch);
  auto* row = reinterpret_cast<float*>(copy + plan.copy_bytes);
  float* base = plan.block_parts ? static_cast<float*>(shared) : row + plan.row_floats;
  float* up = plan.up ? base + (plan.value_is_total ? 0 : plan.group * n) : nullptr;
  if (phase == 0) {
    if (begin < end) copy_codes(*op, plan.packed->conv.in_channels, 0, op->rows, copy);
    for (int64_t item = begin; item < end; ++item) {
      const auto part = [&](const Packed& p, float* out) {
        const int64_t first = item * p.n_blocks / plan.block_parts, last = (item + 1) * p.n_blocks / plan.block_parts;
        multiply(*op, p, copy, 0, op->rows, out, first, last);
      };
      part(*plan.packed, plan.value_is_total ? op->total : base);
      if (up) part(*plan.up, up);
    }
    return;
  }
  for (int64_t item = begin; item < end; ++item) {
    const int64_t step = plan.packed && !plan.block_parts ? kRowTile : 1, tiles = ceil_div(op->rows, step);
    const int64_t first = item * tiles / plan.parts * step, last = min64((item + 1) * tiles / plan.parts * step, op->rows);
    if (!plan.packed) {
      finish(*op, op->x + first * n, nullptr, first, last, row);
    } else if (plan.block_parts) {
      finish(*op, (plan.value_is_total ? op->total : base) + first * n, up ? up + first * n : nullptr, first, last, row);
    } else {
      for (int64_t m = first; m < last; m += plan.group) {
        const int64_t stop = min64(m + plan.group, last);
        float* value = plan.value_is_total ? op->total + m * n : base;
        if (op->isa != XQ_ISA_REFERENCE) copy_codes(*op, plan.packed->conv.in_channels, m, stop, copy);
        multiply(*op, *plan.packed, copy, m, stop, value, 0, plan.packed->n_blocks);
        if (up) multiply(*op, *plan.up, copy, m, stop, up, 0, plan.up->n_blocks);
        if (finishes(*op)) finish(*op, value, up, m, stop, row);
      }
    }
  }
}

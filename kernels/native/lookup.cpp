// Lookups and interactions: checks of their description, of every index and offset, and the plain loops.
#include <algorithm>
#include <cmath>

#include "float_loops.h"
#include "internal.h"

namespace xq {
namespace {

// Bags whose indices are compared with their bounds at a time, right before their rows are read: the indices are
// then still in L1.
constexpr int64_t kBagsAtOnce = 256;

bool isa_known(int isa) { return isa >= XQ_ISA_REFERENCE && isa <= XQ_ISA_AMX_INT8; }

int64_t code_bytes(const xq_lookup& op) { return (int64_t{op.dim} * op.bits + 7) / 8; }

bool refuse(xq_lookup_fault* fault, int32_t kind, int64_t position, int64_t value) {
  *fault = {kind, position, value};
  return false;
}

// Whether the offsets of these bags are known to rise up to the number of indices at most.
bool offsets_rise(const xq_lookup& op, int64_t begin, int64_t end) {
  if (op.isa == XQ_ISA_REFERENCE) return false;
  const int64_t last = end < op.bags || op.last_offset ? end : end - 1;  // of those that are written down
  const void* first = static_cast<const char*>(op.offsets) + begin * (op.long_indices ? 8 : 4);
  return lookup_number(op, op.offsets, last) <= op.index_count &&
         float_loops_of(op.isa).rising(first, op.long_indices, last - begin + 1);
}

bool offsets_fit(const xq_lookup& op, int64_t begin, int64_t end, xq_lookup_fault* fault) {
  if (!op.offsets) return true;  // xq_lookup_check has compared bags * each with the number of indices
  int64_t before = lookup_start(op, begin);
  if (begin == 0 && before != 0) return refuse(fault, XQ_FAULT_FIRST, 0, before);
  if (before < 0 || before > op.index_count) return refuse(fault, XQ_FAULT_OFFSET, begin, before);
  if (!offsets_rise(op, begin, end))
    for (int64_t bag = begin + 1; bag <= end; ++bag) {
      const int64_t now = lookup_start(op, bag);
      if (now < before || now > op.index_count) return refuse(fault, XQ_FAULT_OFFSET, bag, now);
      before = now;
    }
  const int64_t last = lookup_start(op, end);
  if (end == op.bags && last != op.index_count) return refuse(fault, XQ_FAULT_LAST, end, last);
  return true;
}

bool indices_fit(const xq_lookup& op, int64_t begin, int64_t end, xq_lookup_fault* fault) {
  const int64_t from = lookup_start(op, begin), count = lookup_start(op, end) - from;
  if (op.isa != XQ_ISA_REFERENCE && count > 0) {
    // More rows than an index can count are as good as the most that it can: no index is equal to that bound.
    const int64_t bound = op.long_indices ? op.row_count : std::min(op.row_count, int64_t{INT32_MAX} + 1);
    const void* first = static_cast<const char*>(op.indices) + from * (op.long_indices ? 8 : 4);
    if (float_loops_of(op.isa).within(first, op.long_indices, count, bound)) return true;
  }
  for (int64_t i = from; i < from + count; ++i) {
    const int64_t index = lookup_number(op, op.indices, i);
    if (index < 0 || index >= op.row_count) return refuse(fault, XQ_FAULT_INDEX, i, index);
  }
  return true;
}

float code_of(const xq_lookup& op, const uint8_t* row, int64_t column) {
  if (op.bits == 32) {
    float value;
    memcpy(&value, row + op.codes_at + column * 4, 4);
    return value;
  }
  const int64_t bit = column * op.bits;
  return static_cast<float>(row[op.codes_at + bit / 8] >> (bit % 8) & ((1 << op.bits) - 1));
}

void lookup_reference(const LookupTask& t) {
  const xq_lookup& op = *t.op;
  for (int64_t bag = t.begin; bag < t.end; ++bag)
    for (int64_t column = 0; column < op.dim; ++column) {
      const bool max = op.mode == XQ_POOL_MAX;
      float acc = max ? -INFINITY : 0.0f;
      int64_t rows = 0;
      for (int64_t i = lookup_start(op, bag); i < lookup_start(op, bag + 1); ++i) {
        const int64_t index = lookup_number(op, op.indices, i);
        if (index == op.padding) continue;
        ++rows;
        const uint8_t* row = op.rows + index * op.row_stride;
        const RowScale own = row_scale(op, row);
        const float w = op.weights ? op.weights[i] : 1.0f, scale = w * own.scale;
        const float bias = op.bits == 32 ? 0.0f : w * own.bias;  // not NaN for a weight that is infinite
        const float code = code_of(op, row, column);
        if (max) {
          const float value = std::fma(code, scale, bias);
          acc = value > acc ? value : acc;
        } else {
          acc = std::fma(code, scale, acc + bias);
        }
      }
      if (max && rows == 0) acc = 0;
      if (op.mode == XQ_POOL_MEAN && rows > 0) acc *= 1.0f / static_cast<float>(rows);
      op.out[bag * op.out_stride + column] = acc;
    }
}

void interact_reference(const xq_interaction& op, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    const float *first = op.first + n * op.first_stride, *in = op.in + n * op.in_stride;
    float* out = std::copy(first, first + op.dim, op.out + n * op.out_stride);
    const auto put_product = [&](int64_t row, int64_t other) {  // -1 is `first`
      const float *a = row < 0 ? first : in + row * op.dim, *b = other < 0 ? first : in + other * op.dim;
      float sums[16] = {};
      for (int64_t k = 0; k < op.dim; ++k) sums[k % 16] = std::fma(a[k], b[k], sums[k % 16]);
      for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
      *out++ = sums[0];
    };
    for (int64_t row = 0; row < op.vectors; ++row)
      for (int64_t other = -1; other < row; ++other) put_product(row, other);
    for (int64_t row = -1; op.squares && row < op.vectors; ++row) put_product(row, row);
  }
}

}  // namespace
}  // namespace xq

using namespace xq;

int xq_lookup_check(const xq_lookup* op) {
  if (!op || !isa_known(op->isa) || op->mode < XQ_POOL_SUM || op->mode > XQ_POOL_MAX) return XQ_BAD_ARGUMENT;
  if (op->bits != 32 && op->bits != 8 && op->bits != 4 && op->bits != 2) return XQ_BAD_ARGUMENT;
  if (op->row_count < 0 || op->dim < 1 || op->bags < 0 || op->index_count < 0 || op->each < 0) return XQ_BAD_ARGUMENT;
  if (op->weights && op->mode != XQ_POOL_SUM) return XQ_BAD_ARGUMENT;
  if ((op->row_count && !op->rows) || (op->index_count && !op->indices) || (op->bags && !op->out)) return XQ_BAD_ARGUMENT;
  const int64_t scale_end = op->scale_at + scale_bytes(*op), codes_end = op->codes_at + code_bytes(*op);
  if (op->codes_at < 0 || op->scale_at < 0 || scale_end > op->row_stride || codes_end > op->row_stride) return XQ_BAD_SHAPE;
  if (op->bits != 32 && op->scale_at < codes_end && op->codes_at < scale_end) return XQ_BAD_SHAPE;
  if (!op->offsets) {
    const bool fits = op->each == 0 ? op->index_count == 0 : op->index_count % op->each == 0 && op->index_count / op->each == op->bags;
    if (!fits) return XQ_BAD_SHAPE;
  }
  if (op->offsets && op->bags == 0 && op->index_count) return XQ_BAD_SHAPE;
  return op->bags > 1 && op->out_stride < op->dim ? XQ_BAD_SHAPE : XQ_OK;
}

int xq_lookup_verify(const xq_lookup* op, int64_t begin, int64_t end, xq_lookup_fault* fault) {
  *fault = {};
  return begin >= end || (offsets_fit(*op, begin, end, fault) && indices_fit(*op, begin, end, fault));
}

int xq_lookup_run(const xq_lookup* op, int64_t begin, int64_t end, xq_lookup_fault* fault) {
  *fault = {};
  for (int64_t bag = begin; bag < end; bag += kBagsAtOnce) {
    const LookupTask t{op, bag, min64(bag + kBagsAtOnce, end)};
    if (!xq_lookup_verify(op, t.begin, t.end, fault)) return 0;
    op->isa == XQ_ISA_REFERENCE ? lookup_reference(t) : float_loops_of(op->isa).lookup(t);
  }
  return 1;
}

int xq_interaction_check(const xq_interaction* op) {
  if (!op || !isa_known(op->isa) || op->samples < 0 || op->vectors < 0 || op->dim < 1) return XQ_BAD_ARGUMENT;
  if (op->samples && (!op->first || !op->out || (op->vectors && !op->in))) return XQ_BAD_ARGUMENT;
  const bool fits = op->first_stride >= op->dim && op->in_stride >= int64_t{op->vectors} * op->dim &&
                    op->out_stride >= op->dim + interaction_products(*op);
  return fits || op->samples <= 1 ? XQ_OK : XQ_BAD_SHAPE;
}

void xq_interaction_run(const xq_interaction* op, int64_t begin, int64_t end) {
  if (op->isa == XQ_ISA_REFERENCE) return interact_reference(*op, begin, end);
  float_loops_of(op->isa).interact(*op, begin, end);
}

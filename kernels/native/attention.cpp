// The attention calls of the C interface: heads, and ranges of queries where heads are few, are independent items.
#include <cpuid.h>

#include <cmath>
#include <limits>
#include <vector>

#include "row_tasks.h"

namespace xq {
namespace {

// What the CPU does with bfloat16. xq_enable_amx has been asked for the tiles themselves.
struct Bfloat16 {
  bool pairs = false, tiles = false;

  Bfloat16() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    pairs = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
#ifdef XQ_EMULATED
    tiles = pairs;
#else
    tiles = pairs && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);
#endif
  }
};

const AttentionKernel& kernel_of(int isa) {
  static const Bfloat16 has;
  if (isa == XQ_ISA_AMX_INT8 && has.tiles) return kAmxBf16Attention;
  if (isa >= XQ_ISA_AVX512_VNNI && has.pairs) return kAvx512Bf16Attention;
  return row_kernels_of(isa).attention;
}

int64_t query_parts(const xq_attention& op) {
  const int64_t heads = max64(op.batch * op.kv_heads, 1);
  return max64(1, min64(ceil_div(op.threads, heads), ceil_div(op.queries, kAttentionRows)));
}

void attention_reference(const HeadTask& t) {
  std::vector<double> shares(static_cast<size_t>(t.keys));
  for (int64_t head = 0; head < t.heads; ++head)
    for (int64_t m = t.query_begin; m < t.query_end; ++m) {
      const float* q = t.q + head * t.q_head + m * t.q_stride;
      float* out = t.out + head * t.size + m * t.out_stride;
      const int64_t cell = head * t.mask_head + m * t.mask_query;
      double most = -std::numeric_limits<double>::infinity(), sum = 0;
      for (int64_t k = 0; k < t.keys; ++k) {
        float s = 0;
        for (int64_t d = 0; d < t.size; ++d) s += q[d] * t.k[k * t.k_stride + d];
        s *= t.scale;
        if (t.mask && !t.mask_is_bool) s += static_cast<const float*>(t.mask)[cell + k];
        const bool hidden = (t.mask && t.mask_is_bool && !static_cast<const uint8_t*>(t.mask)[cell + k]) || (t.causal && k > m + t.past);
        shares[static_cast<size_t>(k)] = hidden ? -std::numeric_limits<double>::infinity() : s;
        most = std::fmax(most, shares[static_cast<size_t>(k)]);
      }
      // Of long double, as exp of double needs glibc 2.29, and wheels run from 2.28 on.
      for (double& s : shares)
        sum += s = std::isinf(most) && most < 0 && !std::isnan(s) ? 0.0 : static_cast<double>(std::exp(static_cast<long double>(s - most)));
      for (int64_t d = 0; d < t.size; ++d) {
        double v = 0;
        for (int64_t k = 0; k < t.keys; ++k) v += shares[static_cast<size_t>(k)] * t.v[k * t.v_stride + d];
        out[d] = static_cast<float>(sum == 0 ? 0 : v / sum);
      }
    }
}

}  // namespace
}  // namespace xq

using namespace xq;

int xq_attention_check(const xq_attention* op) {
  if (!op || op->isa < XQ_ISA_REFERENCE || op->isa > XQ_ISA_AMX_INT8 || op->threads < 1) return XQ_BAD_ARGUMENT;
  for (int64_t size : {op->batch, op->queries, op->keys, op->heads, op->kv_heads, op->size})
    if (size < 0) return XQ_BAD_ARGUMENT;
  if (op->kv_heads == 0 || op->heads % op->kv_heads) return XQ_BAD_SHAPE;
  if (!std::isfinite(op->scale)) return XQ_NOT_FINITE;
  if (op->past < 0 || (op->hidden && (op->mask || op->starts))) return XQ_BAD_ARGUMENT;
  if (op->batch * op->queries * op->heads * op->size == 0) return XQ_OK;
  if (!op->q || !op->out || (op->keys > 0 && (!op->k || !op->v))) return XQ_BAD_ARGUMENT;
  return XQ_OK;
}

int xq_attention_in_bfloat16(int isa) {
  return isa != XQ_ISA_REFERENCE && &kernel_of(isa) != &row_kernels_of(isa).attention;
}

int64_t xq_attention_items(const xq_attention* op) {
  if (op->queries * op->heads * op->size == 0) return 0;
  return op->batch * op->kv_heads * query_parts(*op);
}

size_t xq_attention_scratch(const xq_attention* op) {
  return op->isa == XQ_ISA_REFERENCE ? 0 : kernel_of(op->isa).scratch(op->keys, op->size);
}

void xq_attention_run(const xq_attention* op, int64_t begin, int64_t end, void* scratch) {
  const int64_t parts = query_parts(*op), group = op->heads / op->kv_heads;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t part = item % parts, kv = item / parts % op->kv_heads, n = item / parts / op->kv_heads, head = kv * group;
    // Where the batch begins, by the stride from batch to batch or by that from row to row.
    const auto first = [&](const int64_t stride[]) { return op->starts ? op->starts[n] * stride[1] : n * stride[0]; };
    const int64_t own = op->starts ? op->starts[n + 1] - op->starts[n] : 0;
    const int64_t queries = op->starts ? own : op->queries, tiles = ceil_div(queries, kAttentionRows);
    HeadTask t{};
    t.q = op->q + first(op->q_stride) + head * op->q_stride[2], t.q_stride = op->q_stride[1], t.q_head = op->q_stride[2];
    t.k = op->k + first(op->k_stride) + kv * op->k_stride[2], t.k_stride = op->k_stride[1];
    t.v = op->v + first(op->v_stride) + kv * op->v_stride[2], t.v_stride = op->v_stride[1];
    const int64_t hidden = op->hidden ? op->hidden[n] : 0;
    t.k += hidden * t.k_stride, t.v += hidden * t.v_stride;
    t.keys = (op->starts ? own : op->keys) - hidden, t.past = op->past - hidden, t.size = op->size, t.heads = group;
    t.query_begin = part * tiles / parts * kAttentionRows;
    t.query_end = min64((part + 1) * tiles / parts * kAttentionRows, queries);
    if (op->mask) {
      const int64_t cell = (op->starts ? op->starts[n] : n * op->mask_stride[0]) + head * op->mask_stride[1];
      t.mask = static_cast<const uint8_t*>(op->mask) + cell * (op->mask_is_bool ? 1 : 4);
      t.mask_is_bool = op->mask_is_bool, t.mask_head = op->mask_stride[1], t.mask_query = op->mask_stride[2];
    }
    t.causal = op->causal, t.scale = op->scale;
    t.out_stride = op->heads * op->size;
    t.out = op->out + (op->starts ? op->starts[n] : n * op->queries) * t.out_stride + head * op->size;
    op->isa == XQ_ISA_REFERENCE ? attention_reference(t) : kernel_of(op->isa).run(t, scratch);
  }
}

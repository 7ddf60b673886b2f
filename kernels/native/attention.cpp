// The attention calls of the C interface: heads, and ranges of queries where heads are few, are independent items.
#include <cpuid.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "row_tasks.h"

namespace xq {
namespace {

// What of bfloat16 is faster than floats on the CPU. xq_enable_amx has been asked for the tiles themselves.
struct Bfloat16 {
  bool pairs = false, tiles = false;

  Bfloat16() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool known = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
    // On Intel's cores attention takes 1.7 to 2.3 times as long by them as by floats, on AMD's 0.6 to 0.8 times.
    pairs = known && __get_cpuid(0, &a, &b, &c, &d) && b != signature_INTEL_ebx;
#ifdef XQ_EMULATED
    tiles = known;
#else
    tiles = known && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);
#endif
  }
};

const AttentionKernel& kernel_of(int isa) {
  static const Bfloat16 has;
  if (isa == XQ_ISA_AMX_INT8 && has.tiles) return kAmxBf16Attention;
  if (isa >= XQ_ISA_AVX512_VNNI && has.pairs) return kAvx512Bf16Attention;
  return row_kernels_of(isa).attention;
}

// Fewer queries are not worth making codes of the keys.
constexpr int64_t kFewestCodedQueries = 32;

// Attention by codes, where a level has it and nothing faster, and queries are many; null elsewhere.
const CodeAttention* codes_of(int isa, int64_t queries) {
  if (isa < XQ_ISA_AVX512_VNNI || queries < kFewestCodedQueries || &kernel_of(isa) == &kAmxBf16Attention) return nullptr;
  return &kAvx512VnniCodeAttention;
}

int64_t query_parts(const xq_attention& op) {
  const int64_t heads = max64(op.batch * op.kv_heads, 1);
  return max64(1, min64(ceil_div(op.threads, heads), ceil_div(op.queries, kAttentionRows)));
}

// So few queries a head multiply codes as they lie; more are worth making floats of them.
constexpr int64_t kFewQueries = 8;

// Of the scratch memory, what an ISA's kernel needs; keys and values that were codes lie behind it.
int64_t kernel_floats(const xq_attention& op) {
  if (op.isa == XQ_ISA_REFERENCE) return 0;
  size_t bytes = kernel_of(op.isa).scratch(op.keys, op.size);
  const CodeAttention* codes = codes_of(op.isa, op.queries);
  if (codes && op.keys >= codes->fewest_keys) bytes = std::max(bytes, codes->scratch(op.keys, op.size));
  return round_up(static_cast<int64_t>(bytes), 64) / 4;
}

bool multiplies_codes(const xq_attention& op) {
  return op.k_codes && op.isa != XQ_ISA_REFERENCE && op.queries <= kFewQueries;
}

void codes_to_floats(int isa, const CodeRowsTask& t) {
  if (isa != XQ_ISA_REFERENCE) return row_kernels_of(isa).codes.to_floats(t);
  for (int64_t row = 0; row < t.rows; ++row)
    for (int64_t d = 0; d < t.size; ++d)
      t.out[row * t.size + d] = static_cast<float>(t.codes[row * t.stride + d]) * t.scale[row];
}

// One head of keys and values of one element of the batch, and the queries of the heads that share it.
void attend_to_codes(const xq_attention& op, int64_t n, int64_t kv, int64_t query_begin, int64_t query_end, float* scores) {
  const int64_t group = op.heads / op.kv_heads, head = kv * group, hidden = op.hidden ? op.hidden[n] : 0;
  QueryTask<int8_t> t{};
  t.k = op.k_codes + n * op.k_stride[0] + kv * op.k_stride[2] + hidden * op.k_stride[1], t.k_stride = op.k_stride[1];
  t.v = op.v_codes + n * op.v_stride[0] + kv * op.v_stride[2] + hidden * op.v_stride[1], t.v_stride = op.v_stride[1];
  t.k_scale = op.k_scale + n * op.k_scale_stride[0] + kv * op.k_scale_stride[1] + hidden;
  t.v_scale = op.v_scale + n * op.v_scale_stride[0] + kv * op.v_scale_stride[1] + hidden;
  t.heads = group, t.size = op.size, t.scale = op.scale, t.q_head = op.q_stride[2];
  for (int64_t m = query_begin; m < query_end; ++m) {
    t.q = op.q + n * op.q_stride[0] + m * op.q_stride[1] + head * op.q_stride[2];
    t.out = op.out + ((n * op.queries + m) * op.heads + head) * op.size;
    t.keys = min64(op.past + m + 1, op.keys) - hidden;
    if (t.keys > 0) row_kernels_of(op.isa).codes.query(t, scores);
    else memset(t.out, 0, static_cast<size_t>(group * op.size) * sizeof(float));
  }
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
  const bool codes = op->k_codes || op->v_codes || op->k_scale || op->v_scale;
  if (codes && (op->mask || op->starts || !op->causal || op->k || op->v)) return XQ_BAD_ARGUMENT;
  const bool held = codes ? op->k_codes && op->v_codes && op->k_scale && op->v_scale : op->k && op->v;
  if (!op->q || !op->out || (op->keys > 0 && !held)) return XQ_BAD_ARGUMENT;
  return XQ_OK;
}

int xq_attention_in_bfloat16(int isa) {
  return isa != XQ_ISA_REFERENCE && &kernel_of(isa) != &row_kernels_of(isa).attention;
}

int64_t xq_attention_coded_keys(int isa) {
  const CodeAttention* codes = codes_of(isa, kFewestCodedQueries);
  return codes ? codes->fewest_keys : 0;
}

int64_t xq_attention_items(const xq_attention* op) {
  if (op->queries * op->heads * op->size == 0) return 0;
  return op->batch * op->kv_heads * query_parts(*op);
}

size_t xq_attention_scratch(const xq_attention* op) {
  if (multiplies_codes(*op)) return static_cast<size_t>(kHeadsTogether * round_up(op->keys, kAttentionRows)) * sizeof(float);
  const size_t floats = op->k_codes ? static_cast<size_t>(2 * op->keys * op->size) * sizeof(float) : 0;
  return floats + static_cast<size_t>(kernel_floats(*op)) * sizeof(float);
}

void xq_cache_codes(int isa, const float* x, int64_t size, int8_t* codes, float* scale) {
  if (isa != XQ_ISA_REFERENCE) return row_kernels_of(isa).codes.make(x, size, codes, scale);
  float most = 0x1p-119f;
  bool finite = true;
  for (int64_t d = 0; d < size; ++d) finite &= std::isfinite(x[d]), most = std::fmax(most, std::fabs(x[d]));
  *scale = finite ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
  const float inverse = 127.0f / most;
  for (int64_t d = 0; d < size; ++d) codes[d] = finite ? static_cast<int8_t>(std::nearbyint(x[d] * inverse)) : int8_t{0};
}

void xq_attention_run(const xq_attention* op, int64_t begin, int64_t end, void* scratch) {
  const int64_t parts = query_parts(*op), group = op->heads / op->kv_heads;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t part = item % parts, kv = item / parts % op->kv_heads, n = item / parts / op->kv_heads, head = kv * group;
    if (multiplies_codes(*op)) {
      attend_to_codes(*op, n, kv, 0, op->queries, static_cast<float*>(scratch));
      continue;
    }
    // Where the batch begins, by the stride from batch to batch or by that from row to row.
    const auto first = [&](const int64_t stride[]) { return op->starts ? op->starts[n] * stride[1] : n * stride[0]; };
    const int64_t own = op->starts ? op->starts[n + 1] - op->starts[n] : 0;
    const int64_t queries = op->starts ? own : op->queries, tiles = ceil_div(queries, kAttentionRows);
    HeadTask t{};
    t.q = op->q + first(op->q_stride) + head * op->q_stride[2], t.q_stride = op->q_stride[1], t.q_head = op->q_stride[2];
    const int64_t hidden = op->hidden ? op->hidden[n] : 0;
    t.keys = (op->starts ? own : op->keys) - hidden, t.past = op->past - hidden, t.size = op->size, t.heads = group;
    if (op->k_codes) {
      // Behind what the kernel needs, and for each item again: heads of a batch need no more memory than one.
      auto* floats = static_cast<float*>(scratch) + kernel_floats(*op);
      const auto turn = [&](const int8_t* codes, const int64_t (&stride)[3], const float* scale, const int64_t (&of_scale)[2]) {
        codes += n * stride[0] + kv * stride[2] + hidden * stride[1];
        const CodeRowsTask rows{codes, scale + n * of_scale[0] + kv * of_scale[1] + hidden, stride[1], t.keys, op->size, floats};
        codes_to_floats(op->isa, rows);
        floats += t.keys * op->size;
        return static_cast<const float*>(rows.out);
      };
      t.k = turn(op->k_codes, op->k_stride, op->k_scale, op->k_scale_stride);
      t.v = turn(op->v_codes, op->v_stride, op->v_scale, op->v_scale_stride);
      t.k_stride = t.v_stride = op->size;
    } else {
      t.k = op->k + first(op->k_stride) + kv * op->k_stride[2] + hidden * op->k_stride[1], t.k_stride = op->k_stride[1];
      t.v = op->v + first(op->v_stride) + kv * op->v_stride[2] + hidden * op->v_stride[1], t.v_stride = op->v_stride[1];
    }
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
    const CodeAttention* codes = codes_of(op->isa, queries);
    if (op->isa == XQ_ISA_REFERENCE) attention_reference(t);
    else if (!codes || !codes->run(t, scratch)) kernel_of(op->isa).run(t, scratch);
  }
}

// The calls of the C interface for one query a head: dispatch and the plain loops. Heads of keys are the items.
#include <cmath>
#include <initializer_list>
#include <limits>

#include "row_tasks.h"

namespace xq {
namespace {

void one_query_reference(const QueryTask<float>& t, float* scores) {
  for (int64_t head = 0; head < t.heads; ++head) {
    const float* q = t.q + head * t.q_head;
    float most = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int64_t k = 0; k < t.keys; ++k) {
      float dot = 0;
      for (int64_t d = 0; d < t.size; ++d) dot += q[d] * t.k[k * t.k_stride + d];
      scores[k] = dot * t.scale;
      most = std::fmax(most, scores[k]);
    }
    for (int64_t k = 0; k < t.keys; ++k) sum += scores[k] = std::exp(scores[k] - most);
    for (int64_t d = 0; d < t.size; ++d) {
      float value = 0;
      for (int64_t k = 0; k < t.keys; ++k) value += scores[k] * t.v[k * t.v_stride + d];
      t.out[head * t.size + d] = value / sum;
    }
  }
}

}  // namespace
}  // namespace xq

using namespace xq;

int xq_one_query_check(const xq_one_query* op) {
  if (!op || op->isa < XQ_ISA_REFERENCE || op->isa > XQ_ISA_AMX_INT8) return XQ_BAD_ARGUMENT;
  for (int64_t size : {op->batch, op->heads, op->size})
    if (size < 0) return XQ_BAD_ARGUMENT;
  if (op->keys < 1 || op->kv_heads < 1 || op->heads % op->kv_heads) return XQ_BAD_SHAPE;
  if (!std::isfinite(op->scale)) return XQ_NOT_FINITE;
  if (op->batch * op->heads * op->size == 0) return XQ_OK;
  return op->q && op->k && op->v && op->out ? XQ_OK : XQ_BAD_ARGUMENT;
}

size_t xq_one_query_scratch(const xq_one_query* op) {
  return static_cast<size_t>(kHeadsTogether * round_up(op->keys, kAttentionRows)) * sizeof(float);
}

int64_t xq_one_query_items(const xq_one_query* op) { return op->size == 0 ? 0 : op->batch * op->kv_heads; }

void xq_one_query_run(const xq_one_query* op, int64_t begin, int64_t end, void* scratch) {
  const int64_t group = op->heads / op->kv_heads;
  auto* scores = static_cast<float*>(scratch);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t n = item / op->kv_heads, kv = item % op->kv_heads, head = kv * group;
    QueryTask<float> t{};
    t.q = op->q + n * op->q_stride[0] + head * op->q_stride[1], t.q_head = op->q_stride[1];
    t.k = op->k + n * op->k_stride[0] + kv * op->k_stride[1], t.k_stride = op->k_stride[2];
    t.v = op->v + n * op->v_stride[0] + kv * op->v_stride[1], t.v_stride = op->v_stride[2];
    const int64_t hidden = op->hidden ? op->hidden[n] : 0;
    t.k += hidden * t.k_stride, t.v += hidden * t.v_stride;
    t.heads = group, t.keys = op->keys - hidden, t.size = op->size, t.scale = op->scale;
    t.out = op->out + (n * op->heads + head) * op->size;
    op->isa == XQ_ISA_REFERENCE ? one_query_reference(t, scores) : row_kernels_of(op->isa).one_query(t, scores);
  }
}

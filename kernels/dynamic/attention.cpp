// Attention as torch sees it: see x86quant/ops/attention.py.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>

#include "../runtime/native_cpu.h"
#include "../runtime/row_pack.h"
#include "row_codes.h"

namespace x86quant::dynamic {
namespace {

// Heads as the kernel reads them: the features of each adjacent.
at::Tensor heads_of(const at::Tensor& x) { return x.size(3) <= 1 || x.stride(3) == 1 ? x : x.contiguous(); }

void set_strides(const at::Tensor& x, int64_t strides[3]) {
  for (int i = 0; i < 3; ++i) strides[i] = x.stride(i);
}

// Operands: q [B, S, H, D], k and v [B, T, heads, D] in float32; mask bool or float32 [B or 1, H or 1, S or 1, T].
at::Tensor native_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::optional<at::Tensor>& mask, bool causal, double scale) {
  RECORD_FUNCTION("x86quant::attention", c10::ArrayRef<const c10::IValue>{});
  for (const at::Tensor* x : {&q, &k, &v})
    TORCH_CHECK_VALUE(x->device().is_cpu() && x->scalar_type() == at::kFloat && x->dim() == 4,
                      "x86quant::attention: q, k and v must be float32 on the CPU with 4 dimensions, got ",
                      x->scalar_type(), " ", x->sizes());
  TORCH_CHECK_VALUE(k.sizes() == v.sizes() && k.size(0) == q.size(0) && k.size(3) == q.size(3) && k.size(2) > 0 &&
                        q.size(2) % k.size(2) == 0,
                    "x86quant::attention: q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(), " do not fit each other");
  const at::Tensor queries = heads_of(q), keys = heads_of(k), values = heads_of(v);
  at::Tensor out = at::empty(q.sizes(), at::kFloat), cells;
  xq_attention op{};
  op.isa = native_isa();
  op.batch = q.size(0), op.queries = q.size(1), op.keys = k.size(1);
  op.heads = q.size(2), op.kv_heads = k.size(2), op.size = q.size(3);
  op.q = queries.const_data_ptr<float>(), op.k = keys.const_data_ptr<float>(), op.v = values.const_data_ptr<float>();
  set_strides(queries, op.q_stride), set_strides(keys, op.k_stride), set_strides(values, op.v_stride);
  if (mask) {
    const int64_t scores[4] = {op.batch, op.heads, op.queries, op.keys};
    bool fits = mask->device().is_cpu() && mask->dim() == 4 && mask->size(3) == op.keys;
    for (int i = 0; fits && i < 3; ++i) fits = mask->size(i) == 1 || mask->size(i) == scores[i];
    TORCH_CHECK_VALUE(fits && (mask->scalar_type() == at::kBool || mask->scalar_type() == at::kFloat),
                      "x86quant::attention: the mask must be bool or float32 of shape [", op.batch, " or 1, ", op.heads,
                      " or 1, ", op.queries, " or 1, ", op.keys, "], got ", mask->scalar_type(), " ", mask->sizes());
    cells = op.keys <= 1 || mask->stride(3) == 1 ? *mask : mask->contiguous();
    op.mask = cells.const_data_ptr();
    op.mask_is_bool = cells.scalar_type() == at::kBool;
    for (int i = 0; i < 3; ++i) op.mask_stride[i] = cells.size(i) == 1 ? 0 : cells.stride(i);
  }
  op.causal = causal, op.scale = static_cast<float>(scale);
  op.out = out.mutable_data_ptr<float>();
  runtime::run_attention(op);
  return out;
}

TORCH_LIBRARY_FRAGMENT(x86quant, m) {
  m.def("native_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale) -> Tensor",
        native_attention);
}

}  // namespace
}  // namespace x86quant::dynamic

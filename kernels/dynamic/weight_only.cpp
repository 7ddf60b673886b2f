// Float rows times int8 weights, for few rows.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../runtime/activation.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"

namespace x86quant::dynamic {
namespace {

// Fewer than these are not worth waking a thread for.
constexpr int64_t kFloatMultiplyAddsEach = 200'000;

// Operands have been checked: float rows (rows, in), int8 weight (out, in), float scale and bias.
at::Tensor weight_only_rows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale,
                            const std::optional<at::Tensor>& bias, std::string activation) {
  TORCH_CHECK_VALUE(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1) &&
                        scale.numel() == weight.size(0) && (!bias || bias->numel() == scale.numel()),
                    "x86quant: the operands of a weight-only linear do not fit each other");
  const at::Tensor in = x.contiguous(), codes = weight.contiguous(), scales = scale.contiguous();
  const at::Tensor shift = bias ? bias->contiguous() : at::Tensor();
  at::Tensor out = at::empty({x.size(0), weight.size(0)}, at::kFloat);
  xq_weight_only op{};
  op.in = in.const_data_ptr<float>();
  op.out = out.mutable_data_ptr<float>();
  op.weight = codes.const_data_ptr<int8_t>();
  op.scale = scales.const_data_ptr<float>();
  op.bias = bias ? shift.const_data_ptr<float>() : nullptr;
  op.rows = x.size(0);
  op.in_stride = op.in_features = weight.size(1);
  op.out_stride = op.out_features = weight.size(0);
  op.activation = runtime::activation_code(activation);
  op.isa = native_isa();
  succeed(xq_weight_only_check(&op));
  const int threads = runtime::useful_threads(weight.numel() * op.rows / kFloatMultiplyAddsEach);
  runtime::split(op.out_features, threads, [&](int64_t begin, int64_t end) {
    xq_weight_only_run(&op, begin, end);
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(x86quant, m) {
  m.def("weight_only_rows(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, str activation) -> "
        "Tensor", weight_only_rows);
}

}  // namespace
}  // namespace x86quant::dynamic

// The kernels "fbgemm" and "onednn": the stock dynamic linears. They quantize a whole tensor by one
// range, so they are right for one row only.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_make_per_channel_quantized_tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "../routed/stock.h"
#include "kernel.h"

namespace x86quant::dynamic {
namespace {

at::Tensor tensor_at(const void* data, at::IntArrayRef sizes, at::ScalarType type) {
  return at::from_blob(const_cast<void*>(data), sizes, type);
}

// In place.
void activate(at::Tensor& x, const std::string& activation) {
  if (activation == "relu") at::relu_(x);
  if (activation == "gelu") at::gelu_(x);
  if (activation == "gelu_tanh") at::gelu_(x, "tanh");
  if (activation == "silu") at::silu_(x);
  if (activation == "sigmoid") at::sigmoid_(x);
  if (activation == "tanh") at::tanh_(x);
}

class StockLinear final : public Kernel {
 public:
  StockLinear(const char* engine, const Description& d)
      : activation_(d.activation), in_(d.weights.in_features), out_(d.weights.out_features) {
    const runtime::RowWeights& w = d.weights;
    TORCH_CHECK(w.groups == 0, "x86quant: the stock linears take weights of one scale a row");
    const at::Tensor weight = at::_make_per_channel_quantized_tensor(
        tensor_at(w.weight, {out_, in_}, at::kChar), tensor_at(w.scale, {out_}, at::kFloat).to(at::kDouble),
        at::zeros({out_}, at::kLong), 0);
    std::optional<at::Tensor> bias;
    if (w.bias) bias = tensor_at(w.bias, {out_}, at::kFloat).clone();
    pack_ = stock_linear(engine_named(engine), weight, bias);
    bytes_ = weight.numel();
  }

  void run(const float* x, int64_t rows, int64_t, float* out) const override {
    TORCH_INTERNAL_ASSERT(rows == 1, "routed for one row");
    at::Tensor result = tensor_at(out, {1, out_}, at::kFloat);
    if (!finite(x)) {
      result.fill_(std::nanf(""));
      return;
    }
    at::Tensor y = pack_->apply_dynamic(tensor_at(x, {1, in_}, at::kFloat), /*reduce_range=*/false);
    activate(y, activation_);
    result.copy_(y);
  }

  int64_t bytes() const override { return bytes_; }

 private:
  bool finite(const float* values) const {
    float zero = 0;  // times zero, only NaN and infinity are not zero
    for (int64_t i = 0; i < in_; ++i) zero += values[i] * 0.0f;
    return zero == 0;
  }

  std::string activation_;
  LinearPack pack_;
  int64_t in_, out_, bytes_;
};

Make stock(const char* engine) {
  return [engine](const Description& d) { return std::make_shared<StockLinear>(engine, d); };
}

const Register fbgemm("fbgemm", stock("fbgemm"));
const Register onednn("onednn", stock("onednn"));

}  // namespace
}  // namespace x86quant::dynamic

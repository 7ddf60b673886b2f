// The kernels "fbgemm" and "onednn": the stock dynamic linears. They quantize a whole tensor by one
// range, so they are right for one row only.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_make_per_channel_quantized_tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "../routed/stock.h"
#include "kernel.h"

namespace x86quant::dynamic {
namespace {

class StockLinear final : public Kernel {
 public:
  StockLinear(const char* engine, const Description& d) : activation_(d.activation) {
    const at::Tensor weight = at::_make_per_channel_quantized_tensor(
        d.weights.weight(), d.weights.scale().to(at::kDouble), at::zeros({d.out_features()}, at::kLong), 0);
    pack_ = stock_linear(engine_named(engine), weight, d.weights.bias());
    bytes_ = d.weights.weight().numel();
  }

  void run(const at::Tensor& x, int64_t rows, int64_t, at::Tensor& out) const override {
    TORCH_INTERNAL_ASSERT(rows == 1, "routed for one row");
    at::Tensor row = x.reshape({1, -1});
    if (!finite(row)) {
      out.fill_(std::nanf(""));
      return;
    }
    at::Tensor y = pack_->apply_dynamic(std::move(row), /*reduce_range=*/false);
    activate(y, activation_);
    out.view({1, -1}).copy_(y);
  }

  int64_t bytes() const override { return bytes_; }

 private:
  static bool finite(const at::Tensor& row) {
    const float* values = row.const_data_ptr<float>();
    float zero = 0;  // times zero, only NaN and infinity are not zero
    for (int64_t i = 0; i < row.numel(); ++i) zero += values[i] * 0.0f;
    return zero == 0;
  }

  std::string activation_;
  LinearPack pack_;
  int64_t bytes_;
};

Make stock(const char* engine) {
  return [engine](const Description& d) { return std::make_shared<StockLinear>(engine, d); };
}

const Register fbgemm("fbgemm", stock("fbgemm"));
const Register onednn("onednn", stock("onednn"));

}  // namespace
}  // namespace x86quant::dynamic

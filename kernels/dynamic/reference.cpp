// The kernel "reference": the definition of the op (x86quant/ops/dynamic.py) in plain ATen.
#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "kernel.h"

namespace x86quant::dynamic {
namespace {

class ReferenceLinear final : public Kernel {
 public:
  explicit ReferenceLinear(const Description& d)
      : weight_(d.weight.to(at::kDouble).t().contiguous()),
        scale_(d.scale.clone()),
        bias_(d.bias ? d.bias->to(at::kDouble) : at::zeros({}, at::kDouble)),
        activation_(d.activation) {}

  void run(const at::Tensor& x, int64_t rows, int64_t, at::Tensor& out) const override {
    const at::Tensor in = at::constant_pad_nd(x.reshape({rows, weight_.size(0)}), {1, 0});
    const at::Tensor low = in.amin(1, true), high = in.amax(1, true);
    const at::Tensor wide = ((high.to(at::kDouble) - low.to(at::kDouble)) / 255.0).to(at::kFloat);
    const at::Tensor finite = low.isfinite().logical_and(high.isfinite());
    const at::Tensor scale = wide.clamp_min(std::numeric_limits<float>::min());
    const at::Tensor inverse = scale.reciprocal();
    const at::Tensor zp = (-low * inverse).round();
    const at::Tensor codes = ((in.slice(1, 1) * inverse).round() + zp).clamp(0, 255);
    const at::Tensor sums = (codes - zp).to(at::kDouble).mm(weight_).to(at::kFloat);
    at::Tensor y = sums.to(at::kDouble) * (scale * scale_).to(at::kDouble);
    y = at::where(finite, y + bias_, std::numeric_limits<double>::quiet_NaN()).to(at::kFloat);
    activate(y, activation_);
    out.view({rows, -1}).copy_(y);
  }

  int64_t bytes() const override { return static_cast<int64_t>(weight_.nbytes()); }

 private:
  at::Tensor weight_, scale_, bias_;  // not the caller's: a pack must not keep a model alive
  std::string activation_;
};

const Register reference("reference",
                         [](const Description& d) { return std::make_shared<ReferenceLinear>(d); });

}  // namespace
}  // namespace x86quant::dynamic

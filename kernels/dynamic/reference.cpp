// The kernel "reference": the definition of the op (x86quant/ops/dynamic.py) in plain ATen.
#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "kernel.h"

namespace x86quant::dynamic {
namespace {

class ReferenceLinear final : public Kernel {
 public:
  explicit ReferenceLinear(const Description& d)
      : weight_(codes_of(d.weights)),
        scale_(d.weights.has_groups() ? d.weights.scale().to(at::kFloat) : d.weights.scale().clone()),
        bias_(d.weights.bias() ? d.weights.bias()->to(at::kDouble) : at::zeros({}, at::kDouble)),
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
    at::Tensor y;
    if (scale_.dim() == 1) {
      const at::Tensor sums = (codes - zp).to(at::kDouble).mm(weight_).to(at::kFloat);
      y = sums.to(at::kDouble) * (scale * scale_).to(at::kDouble);
    } else {
      y = group_product(codes.to(at::kDouble), zp.to(at::kDouble)) * scale.to(at::kDouble);
    }
    y = at::where(finite, y + bias_, std::numeric_limits<double>::quiet_NaN()).to(at::kFloat);
    activate(y, activation_);
    out.view({rows, -1}).copy_(y);
  }

  int64_t bytes() const override { return static_cast<int64_t>(weight_.nbytes()); }

 private:
  // (in, out) in double, which holds every sum exactly.
  static at::Tensor codes_of(const Weights& weights) {
    at::Tensor codes = weights.weight();
    if (codes.scalar_type() == at::kByte)
      codes = at::stack({codes.bitwise_and(15), codes.bitwise_right_shift(4)}, -1).flatten(1).to(at::kChar) - 8;
    return codes.to(at::kDouble).t().contiguous();
  }

  // As x86quant/ops/groups.py says, before the row's scale.
  at::Tensor group_product(const at::Tensor& codes, const at::Tensor& zp) const {
    const int64_t groups = scale_.size(1), each = weight_.size(0) / groups;
    const auto fma = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
      return (a * b.to(at::kDouble) + c).to(at::kFloat).to(at::kDouble);
    };
    at::Tensor v = at::zeros({codes.size(0), weight_.size(1)}, at::kDouble), total = at::zeros({weight_.size(1)}, at::kDouble);
    for (int64_t g = 0; g < groups; ++g) {
      const at::Tensor x = codes.narrow(1, g * each, each), w = weight_.narrow(0, g * each, each);
      const auto number = [&](int64_t i) { return scale_.dim() == 3 ? scale_.select(2, i).select(1, g) : scale_.select(1, g); };
      v = fma(x.mm(w).to(at::kFloat).to(at::kDouble), number(0), v);
      total = total + number(0).to(at::kDouble) * w.sum(0);
      if (scale_.dim() < 3) continue;
      v = fma(x.sum(1, true), number(1), v);
      total = total + number(1).to(at::kDouble) * each;
    }
    return fma(-zp, total.to(at::kFloat), v);
  }

  at::Tensor weight_, scale_, bias_;  // not the caller's: a pack must not keep a model alive
  std::string activation_;
};

const Register reference("reference",
                         [](const Description& d) { return std::make_shared<ReferenceLinear>(d); });

}  // namespace
}  // namespace x86quant::dynamic

#include "row_weights.h"

#include <limits>

namespace x86quant::dynamic {
namespace {

bool is_number(int64_t size) { return size <= std::numeric_limits<int32_t>::max(); }

}  // namespace

Weights::Weights(const at::Tensor& weight, const at::Tensor& scale, const std::optional<at::Tensor>& bias)
    : weight_(weight.contiguous()), scale_(scale.contiguous()), bias_(bias ? bias->contiguous() : at::Tensor()) {
  const bool nibbles = weight.scalar_type() == at::kByte, groups = scale.dim() > 1, half = scale.scalar_type() == at::kHalf;
  bool fits = weight.is_cpu() && scale.is_cpu() && weight.dim() == 2 && scale.dim() >= 1 && scale.dim() <= 3 &&
              scale.size(0) == weight.size(0) && (groups ? nibbles || weight.scalar_type() == at::kChar : weight.scalar_type() == at::kChar) &&
              (scale.scalar_type() == at::kFloat || (groups && half)) && (scale.dim() < 3 || scale.size(2) == 2);
  if (bias) fits = fits && bias->is_cpu() && bias->scalar_type() == at::kFloat && bias->numel() == scale.size(0);
  const int64_t in = fits ? weight.size(1) * (nibbles ? 2 : 1) : 0;
  fits = fits && is_number(in) && is_number(weight.size(0)) && (!groups || is_number(scale.size(1)));
  TORCH_CHECK_VALUE(fits, "x86quant: the weights of a linear do not fit each other");
  view_.weight = weight_.const_data_ptr(), view_.scale = scale_.const_data_ptr();
  view_.bias = bias_.defined() ? bias_.const_data_ptr<float>() : nullptr;
  view_.in_features = in, view_.out_features = weight.size(0);
  if (!groups) return;
  view_.groups = static_cast<int32_t>(scale.size(1)), view_.bits = nibbles ? 4 : 8;
  view_.half = half, view_.offsets = scale.dim() == 3;
}

}  // namespace x86quant::dynamic

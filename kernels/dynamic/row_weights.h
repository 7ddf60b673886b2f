// The weights of a linear as torch holds them: see x86quant/ops/groups.py.
#pragma once

#include <ATen/core/Tensor.h>

#include "../runtime/row_pack.h"

namespace x86quant::dynamic {

// A linear's tensors, contiguous, which live as long as this does.
class Weights {
 public:
  // Throws if they do not fit each other.
  Weights(const at::Tensor& weight, const at::Tensor& scale, const std::optional<at::Tensor>& bias);

  int64_t in_features() const { return view_.in_features; }
  int64_t out_features() const { return view_.out_features; }
  bool has_groups() const { return view_.groups > 0; }
  const runtime::RowWeights& view() const { return view_; }
  const at::Tensor& weight() const { return weight_; }
  const at::Tensor& scale() const { return scale_; }
  std::optional<at::Tensor> bias() const { return bias_.defined() ? std::make_optional(bias_) : std::nullopt; }

 private:
  at::Tensor weight_, scale_, bias_;
  runtime::RowWeights view_{};
};

}  // namespace x86quant::dynamic

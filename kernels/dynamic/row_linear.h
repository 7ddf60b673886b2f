// Packed weights of products of row codes, and running what the native kernels do to rows: see x86quant/ops/rows.py.
#pragma once

#include <torch/custom_class.h>

#include <string>

#include "../runtime/memory.h"
#include "row_codes.h"

namespace x86quant::dynamic {

// Weights packed once: of one product, or of two whose results are multiplied.
class RowLinear final : public torch::CustomClassHolder {
 public:
  RowLinear(const at::Tensor& weight, const at::Tensor& scale, const std::optional<at::Tensor>& bias,
            const std::string& activation);

  void multiply_by(const at::Tensor& weight, const at::Tensor& scale, const std::optional<at::Tensor>& bias);

  int64_t in_features() const { return in_; }
  int64_t out_features() const { return out_; }
  int64_t bytes() const { return static_cast<int64_t>(packed_.size() + up_.size()); }

  // A call on so many rows, without its operands and results.
  xq_rows call(int64_t rows) const;

 private:
  runtime::Buffer pack(const at::Tensor& weight, const at::Tensor& scale, const std::optional<at::Tensor>& bias,
                       const std::string& activation) const;

  int isa_;
  int64_t in_, out_;
  runtime::Buffer packed_, up_;
};

// Runs a call that has its operands, on as many threads as it is worth. Without a product `in_features` is 0.
void run_rows(xq_rows& op, int64_t in_features);

}  // namespace x86quant::dynamic

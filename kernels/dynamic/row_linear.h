// What Python holds of packed weights of products of row codes: see x86quant/ops/rows.py.
#pragma once

#include <torch/custom_class.h>

#include "../runtime/row_pack.h"

namespace x86quant::dynamic {

struct RowLinear final : torch::CustomClassHolder {
  explicit RowLinear(runtime::RowPackPtr made) : pack(std::move(made)) {}
  runtime::RowPackPtr pack;
};

}  // namespace x86quant::dynamic

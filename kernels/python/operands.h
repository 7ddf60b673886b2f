// The operands of a linear, as Python gives them.
#pragma once

#include "../dynamic/row_weights.h"
#include "arguments.h"

namespace x86quant::python {

// Weight, scale and bias, kept contiguous.
struct Operands {
  Operands(const Tensor& weight, const Tensor& scale, const OptionalTensor& bias)
      : weight(weight.contiguous()), scale(scale.contiguous()), bias(contiguous(bias)) {}
  // From argument `first` on.
  Operands(const Arguments& a, Py_ssize_t first) : Operands(a.tensor(first), a.tensor(first + 1), a.optional(first + 2)) {}

  // What lives as long as this does.
  runtime::RowWeights weights() const {
    return dynamic::row_weights(weight.view(), scale.view(), bias ? std::make_optional(bias->view()) : std::nullopt);
  }

  Tensor weight, scale;
  OptionalTensor bias;
};

}  // namespace x86quant::python

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

  // The same for calls that unpack blocks of it where they have so many rows: see kernels/native/groups.h.
  runtime::RowWeights weights(const std::vector<int64_t>& unpack) const {
    X86QUANT_REQUIRE(unpack.size() == 2, "rows from which on, and up to which, blocks are unpacked are two numbers");
    runtime::RowWeights found = weights();
    found.unpack_from = static_cast<int32_t>(unpack[0]), found.unpack_to = static_cast<int32_t>(unpack[1]);
    return found;
  }

  Tensor weight, scale;
  OptionalTensor bias;
};

}  // namespace x86quant::python

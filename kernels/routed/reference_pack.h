// The kernel "reference" as packed weights: slow, exact, legal for every shape and CPU.
#pragma once

#include "stock.h"

namespace x86quant {

LinearPack reference_linear(const at::Tensor& weight, const std::optional<at::Tensor>& bias);

template <int N>
ConvPack<N> reference_conv(const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                           const ConvGeometry& geometry);

// conv(x) in real numbers, as float: what an op with an unusual epilogue starts from.
template <int N>
at::Tensor real_conv(const at::Tensor& qx, const at::Tensor& weight,
                     const std::optional<at::Tensor>& bias, const ConvGeometry& geometry);
at::Tensor real_linear(const at::Tensor& qx, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias);

}  // namespace x86quant

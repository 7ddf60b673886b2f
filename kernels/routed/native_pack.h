// The kernel "native" as packed weights: x86quant's own convolutions (kernels/native).
#pragma once

#include "stock.h"

namespace x86quant {

// Runs static convolutions; one output channel's scale or one for all; symmetric weights.
template <int N>
ConvPack<N> native_conv(const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                        const ConvGeometry& geometry);

}  // namespace x86quant

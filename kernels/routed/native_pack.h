// The kernel "native" as packed weights: x86quant's own convolutions (kernels/native).
#pragma once

#include "stock.h"

namespace x86quant {

// The instruction-set level the native kernels use, by its name in x86quant.hardware.isa.
void set_native_isa(const std::string& isa);
// An xq_isa.
int native_isa();

// Runs static convolutions; one output channel's scale or one for all; symmetric weights.
template <int N>
ConvPack<N> native_conv(const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                        const ConvGeometry& geometry);

}  // namespace x86quant

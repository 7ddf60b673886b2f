// The operands of a linear, checked: see x86quant/ops/groups.py.
#pragma once

#include <optional>

#include "../runtime/row_pack.h"
#include "../runtime/view.h"

namespace x86quant::dynamic {

// Of contiguous tensors, whose memory it points into. Throws if they do not fit each other.
runtime::RowWeights row_weights(const runtime::View& weight, const runtime::View& scale,
                                const std::optional<runtime::View>& bias);

}  // namespace x86quant::dynamic

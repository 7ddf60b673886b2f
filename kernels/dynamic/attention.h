// Running attention on as many of torch's threads as it is worth: see x86quant/ops/attention.py.
#pragma once

#include "../native/native_rows.h"

namespace x86quant::dynamic {

// Runs a call that has its operands and an address for its result.
void run_attention(xq_attention& op);

}  // namespace x86quant::dynamic

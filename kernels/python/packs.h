// What Python holds of packed weights.
#pragma once

#include "../runtime/conv_kernel.h"
#include "../runtime/row_pack.h"
#include "types.h"

namespace x86quant::python {

using ConvPackType = HolderType<runtime::PackedConvPtr>;
using RowPackType = HolderType<runtime::RowPackPtr>;

}  // namespace x86quant::python

// Memory for packed weights.
#pragma once

#include "memory.h"

namespace x86quant::runtime {

// Weights that are too small for a huge page of their own share some with those that are packed next, as the layers of
// a model are. Read one after another, once a run or once a token, they come at up to twice the speed of pages of
// 4 KiB, each of which is looked up anew (in a virtual machine twice), and asked for ahead by nothing that the CPU does
// by itself.
Buffer among_others(size_t size);

}  // namespace x86quant::runtime

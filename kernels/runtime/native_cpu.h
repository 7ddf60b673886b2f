// What the native kernels are told of this CPU.
#pragma once

#include <string>

#include "exported.h"

namespace x86quant {

// The instruction-set level, by its name in x86quant.hardware.isa, and one core's caches in bytes (0: unknown).
// Returns the level in use from now on: the one below AMX where this process may not use that.
std::string set_native_cpu(const std::string& isa, int64_t l1, int64_t l2);

// The same, and the caches: what the order of packed weights depends on.
struct NativeCpu {
  std::string level;
  int64_t l1, l2;
};
NativeCpu native_cpu();

// An xq_isa: the level to pack weights for.
X86QUANT_EXPORTED int native_isa();

// How many rows of floats, each of so many, take half of a core's L2: they are still there when they are read again.
int64_t rows_in_l2(int64_t floats);

// Nanoseconds of one thread for so many products that become so many outputs of a convolution or a linear layer:
// roughly, by rates that whole networks reach.
double product_nanoseconds(double multiply_adds, double outputs);

// Throws unless a native kernel accepted what it was given: an xq_status.
X86QUANT_EXPORTED void succeed(int status);

}  // namespace x86quant

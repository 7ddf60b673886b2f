// The CPU that this process runs on.
#pragma once

#include <string>

namespace x86quant::serving {

// Makes the native kernels use the level `isa`; if it is empty, that of X86QUANT_ISA, else the best there is. Returns
// the level in use. Throws a Failure where the CPU does not reach it.
std::string choose_level(const std::string& isa);

// CPUs that this process may use.
int allowed_cpus();

}  // namespace x86quant::serving

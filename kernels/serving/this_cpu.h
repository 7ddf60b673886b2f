// The CPU that this process runs on.
#pragma once

#include <cstdint>
#include <string>

namespace x86quant::serving {

// Makes the native kernels use the level `isa`; if it is empty, that of X86QUANT_ISA, else the best there is. Returns
// the level in use. Throws a Failure where the CPU does not reach it.
std::string choose_level(const std::string& isa);

// Bytes of one core's caches; 0 where unknown.
int64_t l1_bytes();
int64_t l2_bytes();

// CPUs that this process may use: those of its mask, no more than its quota rounded up.
int allowed_cpus();

}  // namespace x86quant::serving

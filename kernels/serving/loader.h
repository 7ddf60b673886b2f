// From a program file to programs that run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../runtime/program.h"

namespace x86quant::serving {

// All that a file says, packed for the level that the native kernels use now, by this thread's pool. Packed weights
// are looked for in `cache` first, and left there, unless it is empty.
std::vector<std::unique_ptr<runtime::Program>> load_programs(const std::string& path, const std::string& level,
                                                             const std::string& cache);

}  // namespace x86quant::serving

// How much of the CPUs' time the control groups of this process leave it.
#pragma once

#include <string>

namespace x86quant::serving {

// In CPUs, 0.5 for instance, as the files below `root` tell; 0 without a limit.
double cpu_quota(const std::string& root = "");

}  // namespace x86quant::serving

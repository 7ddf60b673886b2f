// Types of inputs and outputs: those of the C interface, by torch's names.
#pragma once

#include <iterator>
#include <string>

#include "x86quant/runtime.h"

namespace x86quant::serving {

// By number of x86quant_type.
inline constexpr const char* kTypeNames[] = {"float32", "uint8", "int32", "int64"};
static_assert(std::size(kTypeNames) == X86QUANT_INT64 + 1);

inline bool is_type(int32_t number) { return number >= 0 && number < static_cast<int32_t>(std::size(kTypeNames)); }

// -1: there is none of that name.
inline int32_t type_number(const std::string& name) {
  for (int32_t number = 0; is_type(number); ++number)
    if (name == kTypeNames[number]) return number;
  return -1;
}

}  // namespace x86quant::serving

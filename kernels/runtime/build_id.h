// A number that the linker makes of all that this library is, by which it knows what it wrote itself.
#pragma once

#include <cstddef>
#include <string>

namespace x86quant::runtime {

// Empty where the library has none.
std::string build_id();

// The one among `size` bytes of a program's notes; empty where there is none, or where a note says that it goes beyond.
std::string build_id_of_notes(const char* at, size_t size);

}  // namespace x86quant::runtime

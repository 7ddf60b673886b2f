// SHA-256: a digest by which files can be told apart that somebody has made to look alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace x86quant::serving {

// In 64 hexadecimal digits. By the CPU's instructions for it where there are some, at several times the speed.
std::string sha256(const uint8_t* data, size_t size);
// Without them: what the other way is tested against.
std::string sha256_portable(const uint8_t* data, size_t size);

}  // namespace x86quant::serving

// The checksum of zlib and PNG.
#pragma once

#include <cstddef>
#include <cstdint>

namespace x86quant::serving {

// Of `size` more bytes behind those whose checksum is `before`.
uint32_t crc32(const void* data, size_t size, uint32_t before = 0);

}  // namespace x86quant::serving

#include "crc32.h"

#include <array>
#include <cstring>

namespace x86quant::serving {
namespace {

constexpr int kAtOnce = 8;  // bytes

using Tables = std::array<std::array<uint32_t, 256>, kAtOnce>;

constexpr Tables tables() {
  Tables all{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xedb88320u : 0);
    all[0][byte] = value;
  }
  for (uint32_t byte = 0; byte < 256; ++byte)
    for (size_t i = 1; i < kAtOnce; ++i) all[i][byte] = all[i - 1][byte] >> 8 ^ all[0][all[i - 1][byte] & 0xff];
  return all;
}

constexpr Tables kTables = tables();

}  // namespace

uint32_t crc32(const void* data, size_t size, uint32_t before) {
  const auto* at = static_cast<const uint8_t*>(data);
  uint32_t crc = ~before;
  for (; size >= kAtOnce; size -= kAtOnce, at += kAtOnce) {
    uint32_t low, high;
    std::memcpy(&low, at, 4);
    std::memcpy(&high, at + 4, 4);
    low ^= crc;
    crc = kTables[7][low & 0xff] ^ kTables[6][low >> 8 & 0xff] ^ kTables[5][low >> 16 & 0xff] ^ kTables[4][low >> 24] ^
          kTables[3][high & 0xff] ^ kTables[2][high >> 8 & 0xff] ^ kTables[1][high >> 16 & 0xff] ^ kTables[0][high >> 24];
  }
  for (; size > 0; --size, ++at) crc = crc >> 8 ^ kTables[0][(crc ^ *at) & 0xff];
  return ~crc;
}

}  // namespace x86quant::serving

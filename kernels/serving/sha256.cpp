#include "sha256.h"

#include <cpuid.h>
#include <immintrin.h>

#include <cstring>

namespace x86quant::serving {
namespace {

constexpr size_t kBlock = 64;

alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t turned(uint32_t x, int by) { return x >> by | x << (32 - by); }

void add_blocks(uint32_t (&state)[8], const uint8_t* at, size_t blocks) {
  for (; blocks > 0; --blocks, at += kBlock) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      uint32_t word;
      std::memcpy(&word, at + 4 * i, sizeof(word));
      w[i] = __builtin_bswap32(word);
    }
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) + w[i - 7] + (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; ++i) {
      const uint32_t x = h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const uint32_t y = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + x, d = c, c = b, b = a, a = x + y;
    }
    const uint32_t after[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += after[i];
  }
}

// The instructions take the state as the words a b e f and c d g h, last one first.
__attribute__((target("sha,sse4.1"))) void add_blocks_by_instructions(uint32_t (&state)[8], const uint8_t* at, size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i first = _mm_setr_epi32(static_cast<int>(state[5]), static_cast<int>(state[4]), static_cast<int>(state[1]), static_cast<int>(state[0]));
  __m128i second = _mm_setr_epi32(static_cast<int>(state[7]), static_cast<int>(state[6]), static_cast<int>(state[3]), static_cast<int>(state[2]));
  for (; blocks > 0; --blocks, at += kBlock) {
    const __m128i first_before = first, second_before = second;
    __m128i w[4];
    for (int i = 0; i < 4; ++i) w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + i), swap);
    for (int i = 0; i < 16; ++i) {
      __m128i& now = w[i % 4];
      if (i >= 4) {
        const __m128i seventh = _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4);
        now = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(now, w[(i + 1) % 4]), seventh), w[(i + 3) % 4]);
      }
      const __m128i sum = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound) + i));
      second = _mm_sha256rnds2_epu32(second, first, sum);
      first = _mm_sha256rnds2_epu32(first, second, _mm_shuffle_epi32(sum, 0x0e));
    }
    first = _mm_add_epi32(first, first_before), second = _mm_add_epi32(second, second_before);
  }
  alignas(16) uint32_t words[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(words), first), _mm_store_si128(reinterpret_cast<__m128i*>(words) + 1, second);
  const uint32_t after[8] = {words[3], words[2], words[7], words[6], words[1], words[0], words[5], words[4]};
  std::memcpy(state, after, sizeof(after));
}

bool has_instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

std::string digest(const uint8_t* data, size_t size, void (*add)(uint32_t (&)[8], const uint8_t*, size_t)) {
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const size_t whole = size / kBlock * kBlock, rest = size - whole;
  add(state, data, whole / kBlock);
  // What is left, a bit, zeros, and the number of bits.
  uint8_t last[2 * kBlock] = {};
  if (rest > 0) std::memcpy(last, data + whole, rest);
  last[rest] = 0x80;
  const size_t padded = rest + 9 <= kBlock ? kBlock : 2 * kBlock;
  const uint64_t bits = __builtin_bswap64(uint64_t{size} * 8);
  std::memcpy(last + padded - sizeof(bits), &bits, sizeof(bits));
  add(state, last, padded / kBlock);
  std::string text;
  for (const uint32_t word : state)
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
  return text;
}

}  // namespace

std::string sha256(const uint8_t* data, size_t size) {
  static const auto add = has_instructions() ? add_blocks_by_instructions : add_blocks;
  return digest(data, size, add);
}

std::string sha256_portable(const uint8_t* data, size_t size) { return digest(data, size, add_blocks); }

}  // namespace x86quant::serving

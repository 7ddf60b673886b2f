// What products of bfloat16 read: operands rounded to it, two by two, as tiles of AMX and dot products alike take them.
#pragma once

#include "attention.h"

namespace {

template <class V>
struct Bfloat16Operands {
  using Share = uint16_t;  // bfloat16
  static constexpr bool kInPlace = false, kScaledValues = false;

  static int64_t padded(int64_t size) { return xq::round_up(size, 32); }
  static int64_t key_bytes(int64_t keys, int64_t size) { return keys * padded(size) * 2; }
  static int64_t value_bytes(int64_t keys, int64_t size) { return key_bytes(keys, size); }
  static int64_t query_bytes(int64_t size) { return xq::kAttentionRows * padded(size) * 2; }

  static __m512i rounded(__m512 low, __m512 high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)); }
  // 32 floats of a row, `count` of which are there.
  static __m512i row_at(const float* p, int64_t count) {
    if (count <= 0) return _mm512_setzero_si512();
    const __m512 low = V::load_floats(p, count);
    return rounded(low, count > 16 ? V::load_floats(p + 16, count - 16) : _mm512_setzero_ps());
  }

  // Tiles of 16 pairs of features by 16 keys; those of 16 keys follow one another.
  static void pack_keys(const xq::HeadTask& t, void* to) {
    auto* out = static_cast<uint8_t*>(to);
    for (int64_t n = 0; n < xq::round_up(t.keys, 32); n += 16)
      for (int64_t d = 0; d < padded(t.size); d += 32, out += 1024) {
        __m512i rows[16];
        unroll<16>([&](int i) XQ_INLINE {
          rows[i] = n + i < t.keys ? row_at(t.k + (n + i) * t.k_stride + d, t.size - d) : _mm512_setzero_si512();
        });
        transpose_words<V>(rows);
        unroll<16>([&](int i) XQ_INLINE { _mm512_storeu_si512(out + i * 64, rows[i]); });
      }
  }
  // Tiles of 16 pairs of keys by 16 features; those of 32 keys follow one another.
  static void pack_values(const xq::HeadTask& t, void* to) {
    auto* out = static_cast<uint8_t*>(to);
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t n = 0; n < t.keys; n += 32)
      for (int64_t d = 0; d < padded(t.size); d += 16, out += 1024)
        for (int i = 0; i < 16; ++i) {
          const auto at = [&](int64_t key) XQ_INLINE {
            return key < t.keys && d < t.size ? V::load_floats(t.v + key * t.v_stride + d, t.size - d) : _mm512_setzero_ps();
          };
          const __m512i two = rounded(at(n + 2 * i), at(n + 2 * i + 1));
          _mm512_storeu_si512(out + i * 64, _mm512_permutexvar_epi16(pairs, two));
        }
  }
  static QueryRows<uint8_t> queries(const xq::HeadTask& t, const float* q, int64_t q_stride, int64_t rows, void* to) {
    auto* out = static_cast<uint8_t*>(to);
    for (int64_t i = 0; i < xq::kAttentionRows; ++i)
      for (int64_t d = 0; d < padded(t.size); d += 32, out += 64)
        _mm512_storeu_si512(out, i < rows ? row_at(q + i * q_stride + d, t.size - d) : _mm512_setzero_si512());
    return {static_cast<const uint8_t*>(to), padded(t.size) * 2};
  }
  static float shares(const float* scores, int64_t keys, int64_t visible, float factor, float most, Share* to) {
    return shares_of<V, true>(scores, keys, visible, factor, most, [&](int64_t k, __m512 a, __m512 b) XQ_INLINE {
      _mm512_storeu_si512(to + k, rounded(a, b));
    });
  }
};

}  // namespace

// The products of attention on AMX tiles: operands rounded to bfloat16, sums in float32.
#pragma once

#include "amx.h"
#include "attention.h"

namespace {

template <class V>
struct TileProducts {
  using Share = uint16_t;  // bfloat16
  static constexpr bool kShort = true, kInPlace = false;

  static int64_t padded(int64_t size) { return xq::round_up(size, 32); }
  static int64_t key_bytes(int64_t keys, int64_t size) { return keys * padded(size) * 2; }
  static int64_t value_bytes(int64_t keys, int64_t size) { return key_bytes(keys, size); }
  static int64_t query_bytes(int64_t size) { return xq::kAttentionRows * padded(size) * 2; }
  static void begin() {
    const TileConfig config;
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }

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

  // Tiles 0 to 3: 32 rows by 32 columns of sums. b0 and b1 are the tiles of the two halves of the columns.
  static void multiply(const uint8_t* a, int64_t lda, bool low_rows, const uint8_t* b0, const uint8_t* b1, int64_t b_step,
                       int64_t steps) {
    for (int64_t i = 0; i < steps; ++i, a += 64, b0 += b_step, b1 += b_step) {
      _tile_loadd(4, a, lda);
      _tile_loadd(6, b0, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b1, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (low_rows) continue;
      _tile_loadd(5, a + 16 * lda, lda);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  static void store(float* c, int64_t ldc, bool low_rows) {
    _tile_stored(0, c, ldc * 4);
    _tile_stored(1, c + 16, ldc * 4);
    if (low_rows) return;
    _tile_stored(2, c + 16 * ldc, ldc * 4);
    _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
  }
  static void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  static void scores(const xq::HeadTask& t, QueryRows<uint8_t> q, int64_t rows, const void* k, int64_t first, int64_t keys,
                     float* out, int64_t stride) {
    const int64_t width = padded(t.size), tiles = width / 32;
    const auto* b = static_cast<const uint8_t*>(k) + first * width * 2;
    for (int64_t c = 0; c < keys; c += 32, b += 2 * tiles * 1024) {
      clear();
      multiply(q.at, q.stride, rows <= 16, b, b + tiles * 1024, 1024, tiles);
      store(out + c, stride, rows <= 16);
    }
  }
  static void put(Share* to, __m512 a, __m512 b) { _mm512_storeu_si512(to, rounded(a, b)); }
  static void values(const xq::HeadTask& t, const Share* shares, int64_t stride, int64_t rows, const void* v, int64_t first,
                     int64_t keys, float* out, bool add) {
    const int64_t width = padded(t.size);
    const auto* b = static_cast<const uint8_t*>(v) + first * width * 2;
    for (int64_t d = 0; d < width; d += 32, b += 2048) {
      float* c = out + d;
      clear();
      if (add) {
        _tile_loadd(0, c, width * 4);
        _tile_loadd(1, c + 16, width * 4);
        if (rows > 16) {
          _tile_loadd(2, c + 16 * width, width * 4);
          _tile_loadd(3, c + 16 * width + 16, width * 4);
        }
      }
      multiply(reinterpret_cast<const uint8_t*>(shares), stride * 2, rows <= 16, b, b + 1024, width * 64, xq::ceil_div(keys, 32));
      store(c, width, rows <= 16);
    }
  }
};

}  // namespace

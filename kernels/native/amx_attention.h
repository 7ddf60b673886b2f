// The products of attention on AMX tiles: operands rounded to bfloat16, sums in float32.
#pragma once

#include "amx.h"
#include "bf16_operands.h"

namespace {

template <class V>
struct TileProducts : Bfloat16Operands<V> {
  using Share = typename Bfloat16Operands<V>::Share;
  using Bfloat16Operands<V>::padded;

  static void begin() {
    const TileConfig config;
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }

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
  static void values(const xq::HeadTask& t, const Share* shares, int64_t stride, int64_t rows, const void* v, int64_t first,
                     int64_t keys, float* out, const float* before) {
    const int64_t width = padded(t.size);
    const auto* b = static_cast<const uint8_t*>(v) + first * width * 2;
    for (int64_t d = 0; d < width; d += 32, b += 2048) {
      float* c = out + d;
      clear();
      if (before) {
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < 32; i += 16) V::store_floats(c + r * width + i, V::mul(V::loadf(c + r * width + i), V::setf(before[r])), 16);
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

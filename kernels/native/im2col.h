// im2row for convolutions with few input channels: each output pixel's taps side by side, a row of the GEMM.
#pragma once

#include <immintrin.h>

#include "internal.h"

namespace {

// Copies whole registers, so up to 31 bytes too many; pieces are written in ascending order.
template <int VECTORS>
inline void copy_piece(uint8_t* to, const uint8_t* from) {
  for (int i = 0; i < VECTORS; ++i)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + i,
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i));
}

template <int VECTORS>
void im2col_rows(const xq::Im2colTask& t) {
  uint8_t* to = t.to;
  for (int64_t y = 0; y < t.rows; ++y)
    for (int64_t x = 0; x < t.width; ++x, to += t.lda) {
      const uint8_t* from = t.from + y * t.from_row + x * t.from_pixel;
      uint8_t* at = to;
      for (int64_t i = 0; i < t.pieces; ++i, at += t.piece) copy_piece<VECTORS>(at, from + t.offsets[i]);
    }
}

inline void im2col(const xq::Im2colTask& t) {
  if (t.piece <= 32) return im2col_rows<1>(t);
  if (t.piece <= 64) return im2col_rows<2>(t);
  im2col_rows<8>(t);  // no more than 16 channels by 16 columns: longer runs are cut by the caller
}

}  // namespace

// The products of attention by dot products of pairs of bfloat16, for AVX-512 that has them; sums in float32.
#pragma once

#include "bf16_operands.h"

namespace {

// C[ROWS][32 columns] = A B, or A B + before C, by rows. A's rows are pairs of bfloat16; 16 pairs of rows of B's left and right half of the
// columns follow one another, the next 16 of each `b_step` bytes later.
template <class V, int ROWS>
XQ_INLINE inline void pair_product_tile(int64_t pairs, const uint16_t* a, int64_t lda, const uint8_t* left,
                                        const uint8_t* right, int64_t b_step, float* c, int64_t ldc, const float* before) {
  __m512 acc[2 * ROWS];
  unroll<2 * ROWS>([&](int i) XQ_INLINE { 
    acc[i] = before ? V::mul(V::loadf(c + i / 2 * ldc + i % 2 * 16), V::setf(before[i / 2])) : V::setf(0);
  });
  for (int64_t p = 0; p < pairs; p += 16, left += b_step, right += b_step)
    for (int64_t i = 0; i < 16; ++i, a += 2) {
      const auto b0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(left + i * 64));
      const auto b1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(right + i * 64));
      unroll<ROWS>([&](int r) XQ_INLINE {
        int32_t pair;
        memcpy(&pair, a + r * lda, sizeof pair);
        const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        // As asm, without copies of the sums that GCC 12 makes of the intrinsics.
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc[2 * r]) : "v"(b0), "v"(x));
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc[2 * r + 1]) : "v"(b1), "v"(x));
      });
    }
  unroll<2 * ROWS>([&](int i) XQ_INLINE { V::store_floats(c + i / 2 * ldc + i % 2 * 16, acc[i], 16); });
}

template <class V>
struct PairProducts : Bfloat16Operands<V> {
  using Share = typename Bfloat16Operands<V>::Share;
  using Bfloat16Operands<V>::padded;

  static void begin() {}
  static void end() {}

  static void scores(const xq::HeadTask& t, QueryRows<uint8_t> q, int64_t rows, const void* k, int64_t first, int64_t keys,
                     float* out, int64_t stride) {
    const int64_t width = padded(t.size), half = width * 32;  // bytes of 16 keys
    const auto* a = reinterpret_cast<const uint16_t*>(q.at);
    const auto* b = static_cast<const uint8_t*>(k) + first * width * 2;
    for (int64_t c = 0; c < keys; c += 32, b += 2 * half)
      each_tile<kRows>(rows, [&](int64_t r, auto count) XQ_INLINE {
        pair_product_tile<V, count()>(width / 2, a + r * width, width, b, b + half, 1024, out + r * stride + c, stride, nullptr);
      });
  }
  static void values(const xq::HeadTask& t, const Share* shares, int64_t stride, int64_t rows, const void* v, int64_t first,
                     int64_t keys, float* out, const float* before) {
    const int64_t width = padded(t.size), pairs = xq::ceil_div(keys, 32) * 16;
    const auto* b = static_cast<const uint8_t*>(v) + first * width * 2;
    for (int64_t d = 0; d < width; d += 32, b += 2048)
      each_tile<kRows>(rows, [&](int64_t r, auto count) XQ_INLINE {
        pair_product_tile<V, count()>(pairs, shares + r * stride, stride, b, b + 1024, width * 64, out + r * width + d, width,
                                      before ? before + r : nullptr);
      });
  }

 private:
  static constexpr int kRows = 8;  // which hide the latency of sums, and leave registers for operands
};

}  // namespace

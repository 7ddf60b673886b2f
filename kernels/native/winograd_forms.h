// The two forms of Winograd's algorithm that winograd.h runs, for 3 x 3 taps: how an input tile and the products of its
// positions are transformed. Both are whole numbers all the way; what they are multiples of is divided out at the end.
#pragma once

#include "internal.h"
#include "unroll.h"

namespace {

// F(2 x 2, 3 x 3): 16 products for 4 pixels. The input's transform fits 11 bits, the weights' 12 (twice the true one
// along each axis), sums are four times the true ones.
struct WinogradOf2 {
  static constexpr int kOut = 2, kIn = 4;

  // B' d along one axis; 16-bit vectors.
  XQ_INLINE static void input(const __m256i d[4], __m256i to[4]) {
    to[0] = _mm256_sub_epi16(d[0], d[2]), to[1] = _mm256_add_epi16(d[1], d[2]);
    to[2] = _mm256_sub_epi16(d[2], d[1]), to[3] = _mm256_sub_epi16(d[1], d[3]);
  }
  // A' m along one axis; 32-bit vectors.
  template <class V>
  XQ_INLINE static void output(const typename V::I m[4], typename V::I to[2]) {
    to[0] = V::add32(V::add32(m[0], m[1]), m[2]), to[1] = V::sub32(V::sub32(m[1], m[2]), m[3]);
  }
  template <class V>
  XQ_INLINE static typename V::I sum(typename V::I v) {
    return V::template right32<2>(v);
  }
};

// F(4 x 4, 3 x 3): 36 products for 16 pixels. The input's transform reaches 50 * 255, which 15 bits hold; of the
// weights' (24 times the true one along each axis, 12 times at the last place) 144 * 128 fits 16. Sums are 576 times
// the true ones, and may have left int32: what is true modulo 2^32 of them times the inverse of 9 is 64 times the true
// sum, exact where that fits (xq::kWinogradReach).
struct WinogradOf4 {
  static constexpr int kOut = 4, kIn = 6;

  XQ_INLINE static void input(const __m256i d[6], __m256i to[6]) {
    const auto four = [](__m256i v) XQ_INLINE { return _mm256_slli_epi16(v, 2); };
    const auto two = [](__m256i v) XQ_INLINE { return _mm256_add_epi16(v, v); };
    const __m256i p = _mm256_sub_epi16(d[4], four(d[2])), q = _mm256_sub_epi16(d[3], four(d[1]));
    const __m256i r = _mm256_sub_epi16(d[4], d[2]), s = two(_mm256_sub_epi16(d[3], d[1]));
    to[0] = _mm256_add_epi16(four(d[0]), _mm256_sub_epi16(p, d[2]));
    to[1] = _mm256_add_epi16(p, q), to[2] = _mm256_sub_epi16(p, q);
    to[3] = _mm256_add_epi16(r, s), to[4] = _mm256_sub_epi16(r, s);
    to[5] = _mm256_sub_epi16(_mm256_sub_epi16(d[5], d[3]), two(s));
  }
  template <class V>
  XQ_INLINE static void output(const typename V::I m[6], typename V::I to[4]) {
    using I = typename V::I;
    const auto two = [](I v) XQ_INLINE { return V::add32(v, v); };
    const I a = V::add32(m[1], m[2]), b = V::sub32(m[1], m[2]);
    const I c = V::add32(m[3], m[4]), d = two(V::sub32(m[3], m[4]));
    to[0] = V::add32(V::add32(m[0], a), c), to[1] = V::add32(b, d);
    to[2] = V::add32(a, V::template left32<2>(c));
    to[3] = V::add32(b, V::add32(V::template left32<2>(d), two(m[5])));
  }
  template <class V>
  XQ_INLINE static typename V::I sum(typename V::I v) {
    return V::template right32<6>(V::mul32(v, V::set32(954437177)));  // 9 * 954437177 = 2 * 2^32 + 1
  }
};

}  // namespace

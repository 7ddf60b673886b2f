// The instructions of AVX-VNNI where the library is built to emulate them (XQ_EMULATED), on any CPU with AVX2.
#pragma once

#ifdef XQ_EMULATED

namespace {

// Bytes are widened to 16 bits, where no product of two overflows a sum of two in 32.
inline __m256i emulated_dpbusd_256(__m256i sums, __m256i a, __m256i w) {
  const __m256i low = _mm256_set1_epi16(0xff);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(w, 8));
  return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
}

inline __m256i emulated_dpwssd_256(__m256i sums, __m256i a, __m256i w) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, w));
}

}  // namespace

#undef _mm256_dpbusd_avx_epi32
#undef _mm256_dpwssd_avx_epi32
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd_256
#define _mm256_dpwssd_avx_epi32 emulated_dpwssd_256

#endif  // XQ_EMULATED

// Vectors of 8 and of 16 floats, with what lookups, interactions and gates need. A file that has set its target
// includes this and uses the one that it was compiled for.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

#if defined(XQ_FLOATS_AVX512)

struct Lanes {
  using F = __m512;
  static constexpr int kLanes = 16;
  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static F load_some(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first(count), p); }
  static void store_some(float* p, F v, int64_t count) { _mm512_mask_storeu_ps(p, first(count), v); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F ratio(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where one is NaN
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  // The floats of kLanes codes of BITS bits; those of 32 are floats.
  template <int BITS>
  static F codes(const uint8_t* p) {
    if constexpr (BITS == 32) return _mm512_loadu_ps(p);
    if constexpr (BITS == 8)
      return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    // Few codes are looked up among their floats, by their lowest four bits: no mask, no conversion.
    if constexpr (BITS == 4) {
      const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
      const __m512i both = _mm512_mul_epu32(bytes, _mm512_set1_epi64((1 << 28) + 1));
      return _mm512_permutexvar_ps(both, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    }
    int32_t four;
    memcpy(&four, p, 4);
    const __m512i shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi32(four), shifts),
                                 _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3));
  }
};

#else

struct Lanes {
  using F = __m256;
  static constexpr int kLanes = 8;
  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static __m256i first(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static F load_some(const float* p, int64_t count) { return _mm256_maskload_ps(p, first(count)); }
  static void store_some(float* p, F v, int64_t count) { _mm256_maskstore_ps(p, first(count), v); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F ratio(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  template <int BITS>
  static F codes(const uint8_t* p) {
    if constexpr (BITS == 32) {
      return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    } else if constexpr (BITS == 8) {
      return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    } else {
      uint32_t some = 0;
      memcpy(&some, p, BITS);
      const __m256i shifts = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(BITS));
      const __m256i shifted = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(some)), shifts);
      return _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32((1 << BITS) - 1)));
    }
  }
};

#endif

}  // namespace

// 256-bit vectors behind the same interface as vec512.h. Masked bytes go through a buffer.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

template <bool VNNI>
struct Vec256 {
  using I = __m256i;
  using F = __m256;
  static constexpr int kLanes = 8;
  static constexpr bool kVnni = VNNI;
  static constexpr int kRows = VNNI ? 6 : 4;
  static constexpr int kGroupedRows = VNNI ? 4 : 2;
  static constexpr int kStripPixels = VNNI ? 2 : 2;

  static I load(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
  static void store(void* p, I v) { _mm256_storeu_si256(static_cast<I*>(p), v); }
  static F loadf(const float* p) { return _mm256_loadu_ps(p); }
  static F setf(float v) { return _mm256_set1_ps(v); }
  static I set32(int v) { return _mm256_set1_epi32(v); }
  static I set16(int v) { return _mm256_set1_epi16(static_cast<short>(v)); }
  static I set8(int v) { return _mm256_set1_epi8(static_cast<char>(v)); }
  static I quad(const uint8_t* p) {
    int v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
  }

  static I dot(I acc, I a, I w) {
    if constexpr (VNNI) {
      return _mm256_dpbusd_avx_epi32(acc, a, w);
    } else {
      const I even = _mm256_and_si256(a, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(a, 8);
      const I weven = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8), wodd = _mm256_srai_epi16(w, 8);
      acc = _mm256_add_epi32(acc, _mm256_madd_epi16(even, weven));
      return _mm256_add_epi32(acc, _mm256_madd_epi16(odd, wodd));
    }
  }

  // The same in fewer steps, for weights whose pairs of products fit int16.
  static I dot_safe(I acc, I a, I w) {
    const I pairs = _mm256_maddubs_epi16(a, w);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }

  static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
  static I to_int(F v) { return _mm256_cvtps_epi32(v); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static I sub32(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I add32(I a, I b) { return _mm256_add_epi32(a, b); }
  static I max8(I a, I b) { return _mm256_max_epu8(a, b); }
  static I min8(I a, I b) { return _mm256_min_epu8(a, b); }

  static I narrow(const I v[4], I zp16) {
    const I a = _mm256_adds_epi16(_mm256_packs_epi32(v[0], v[1]), zp16);
    const I b = _mm256_adds_epi16(_mm256_packs_epi32(v[2], v[3]), zp16);
    return _mm256_packus_epi16(a, b);
  }
  static void widen(I bytes, I v[4]) {
    const I zero = _mm256_setzero_si256();
    const I a = _mm256_unpacklo_epi8(bytes, zero), b = _mm256_unpackhi_epi8(bytes, zero);
    v[0] = _mm256_unpacklo_epi16(a, zero), v[1] = _mm256_unpackhi_epi16(a, zero);
    v[2] = _mm256_unpacklo_epi16(b, zero), v[3] = _mm256_unpackhi_epi16(b, zero);
  }
  template <int VECS>
  static I pixels_apart(I v) {
    if constexpr (VECS == 2) return _mm256_permute4x64_epi64(v, 0xd8);
    if constexpr (VECS == 1) return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    return v;
  }
  template <int VECS>
  static I pixels_woven(I v) {
    if constexpr (VECS == 1) return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    return pixels_apart<VECS>(v);
  }

  template <int VECS>
  static void store_pixels(uint8_t* to, int64_t stride, I v, int pixels, int count) {
    constexpr int kWidth = VECS * kLanes;
    alignas(32) uint8_t bytes[32];
    if (VECS == 4 && count >= kWidth) return store(to, v);
    store(bytes, v);
    for (int i = 0; i < pixels; ++i) {
      if (count >= kWidth) memcpy(to + i * stride, bytes + i * kWidth, kWidth);
      else memcpy(to + i * stride, bytes + i * kWidth, static_cast<size_t>(count));
    }
  }
  template <int VECS>
  static I load_pixels(const uint8_t* from, int64_t stride, int pixels, int count) {
    constexpr int kWidth = VECS * kLanes;
    if (VECS == 4 && count >= kWidth) return load(from);
    alignas(32) uint8_t bytes[32] = {};
    for (int i = 0; i < pixels; ++i) {
      if (count >= kWidth) memcpy(bytes + i * kWidth, from + i * stride, kWidth);
      else memcpy(bytes + i * kWidth, from + i * stride, static_cast<size_t>(count));
    }
    return load(bytes);
  }

  static I look_up(const uint8_t* table, I at) {
    alignas(32) uint8_t bytes[32];
    store(bytes, at);
    for (uint8_t& b : bytes) b = table[b];
    return load(bytes);
  }

  static void weave4(const uint8_t* const row[4], int count, I v[4]) {
    const I a = load_pixels<4>(row[0], 0, 1, count), b = load_pixels<4>(row[1], 0, 1, count);
    const I c = load_pixels<4>(row[2], 0, 1, count), d = load_pixels<4>(row[3], 0, 1, count);
    const I ab0 = _mm256_unpacklo_epi8(a, b), ab1 = _mm256_unpackhi_epi8(a, b);
    const I cd0 = _mm256_unpacklo_epi8(c, d), cd1 = _mm256_unpackhi_epi8(c, d);
    v[0] = _mm256_unpacklo_epi16(ab0, cd0), v[1] = _mm256_unpackhi_epi16(ab0, cd0);
    v[2] = _mm256_unpacklo_epi16(ab1, cd1), v[3] = _mm256_unpackhi_epi16(ab1, cd1);
  }
  static __m128i load8(const uint8_t* p, int count) {
    uint64_t bytes = 0;
    if (count >= 8) memcpy(&bytes, p, 8);
    else memcpy(&bytes, p, static_cast<size_t>(count));
    return _mm_cvtsi64_si128(static_cast<long long>(bytes));
  }
  static I weave1(const uint8_t* const row[4], int count) {
    const __m128i ab = _mm_unpacklo_epi8(load8(row[0], count), load8(row[1], count));
    const __m128i cd = _mm_unpacklo_epi8(load8(row[2], count), load8(row[3], count));
    return _mm256_set_m128i(_mm_unpackhi_epi16(ab, cd), _mm_unpacklo_epi16(ab, cd));
  }
  template <int BYTES>
  static I load_quads(const uint8_t* from) {
    if constexpr (BYTES == 8) return _mm256_castsi128_si256(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static I pick_quads(I pixel, I at) { return _mm256_permutevar8x32_epi32(pixel, at); }
};

}  // namespace

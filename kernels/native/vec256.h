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
  static constexpr int kRows = 6;
  static constexpr int kWinogradRows = 6;
  static constexpr int kGroupedRows = VNNI ? 4 : 6;
  static constexpr int kStripPixels = VNNI ? 2 : 2;

  static I load(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
  static void store(void* p, I v) { _mm256_storeu_si256(static_cast<I*>(p), v); }
  static F loadf(const float* p) { return _mm256_loadu_ps(p); }
  static I as_bits(F v) { return _mm256_castps_si256(v); }
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

  // Two such for weights whose four products a lane fit int16 together.
  static I dot_couple(I acc, I a, I wa, I b, I wb) {
    const I quads = _mm256_add_epi16(_mm256_maddubs_epi16(a, wa), _mm256_maddubs_epi16(b, wb));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(quads, _mm256_set1_epi16(1)));
  }

  // Each 16 bytes in the order given for them; `window` makes it the same for all.
  static I shuffle_windows(I v, I from) { return _mm256_shuffle_epi8(v, from); }
  static I window(const uint8_t* places) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(places)));
  }

  // Pairs of int16 products onto int32.
  static I dot16(I acc, I a, I w) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, w)); }
  static I quarter(I v) { return _mm256_srai_epi32(v, 2); }

  static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
  static I to_int(F v) { return _mm256_cvtps_epi32(v); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F if_greater(F a, F b, F x, F y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
  static float total(F v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  static I widen_signed(const int8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static float least(F v) {
    __m128 half = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_min_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_min_ss(half, _mm_movehdup_ps(half)));
  }
  static float greatest(F v) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }
  static bool any_nan(F v) { return _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)) != 0; }
  template <int VECS>
  static void channels_in_order(F v[VECS]) {
    if constexpr (VECS == 2) {
      const F a = v[0], b = v[1];
      v[0] = _mm256_permute2f128_ps(a, b, 0x20), v[1] = _mm256_permute2f128_ps(a, b, 0x31);
    }
  }
  // 2^n for n from -126 to 127, 0 for -127.
  static F power_of_two(I n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, set32(127)), 23)); }
  static I sub32(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I mul32(I a, I b) { return _mm256_mullo_epi32(a, b); }
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
  // Bytes added to 16-bit sums, and such sums to int32 in the order of widen.
  static void add_wide(I bytes, I& low, I& high) {
    const I zero = _mm256_setzero_si256();
    low = _mm256_add_epi16(low, _mm256_unpacklo_epi8(bytes, zero));
    high = _mm256_add_epi16(high, _mm256_unpackhi_epi8(bytes, zero));
  }
  static void add_quads(I low, I high, I v[4]) {
    const I zero = _mm256_setzero_si256();
    v[0] = add32(v[0], _mm256_unpacklo_epi16(low, zero)), v[1] = add32(v[1], _mm256_unpackhi_epi16(low, zero));
    v[2] = add32(v[2], _mm256_unpacklo_epi16(high, zero)), v[3] = add32(v[3], _mm256_unpackhi_epi16(high, zero));
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

  // memcpy of less than WIDTH bytes without a call.
  template <int WIDTH>
  static void copy_some(uint8_t* to, const uint8_t* from, int count) {
    if (WIDTH > 16 && count & 16) memcpy(to, from, 16), to += 16, from += 16;
    if (WIDTH > 8 && count & 8) memcpy(to, from, 8), to += 8, from += 8;
    if (count & 4) memcpy(to, from, 4), to += 4, from += 4;
    if (count & 2) memcpy(to, from, 2), to += 2, from += 2;
    if (count & 1) *to = *from;
  }
  template <int VECS>
  static void store_pixels(uint8_t* to, int64_t stride, I v, int pixels, int count) {
    constexpr int kWidth = VECS * kLanes;
    alignas(32) uint8_t bytes[32];
    if (VECS == 4 && count >= kWidth) return store(to, v);
    if (VECS == 2 && count >= kWidth && pixels == 2) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(v));
      return _mm_storeu_si128(reinterpret_cast<__m128i*>(to + stride), _mm256_extracti128_si256(v, 1));
    }
    store(bytes, v);
    for (int i = 0; i < pixels; ++i) {
      if (count >= kWidth) memcpy(to + i * stride, bytes + i * kWidth, kWidth);
      else copy_some<kWidth>(to + i * stride, bytes + i * kWidth, count);
    }
  }
  template <int VECS>
  static I load_pixels(const uint8_t* from, int64_t stride, int pixels, int count) {
    constexpr int kWidth = VECS * kLanes;
    if (VECS == 4 && count >= kWidth) return load(from);
    if (VECS == 2 && count >= kWidth && pixels == 2) {
      // Not through the buffer: a load of two stores waits for both.
      const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + stride));
      return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    }
    alignas(32) uint8_t bytes[32] = {};
    for (int i = 0; i < pixels; ++i) {
      if (count >= kWidth) memcpy(bytes + i * kWidth, from + i * stride, kWidth);
      else copy_some<kWidth>(bytes + i * kWidth, from + i * stride, count);
    }
    return load(bytes);
  }

  static I look_up(const uint8_t* table, I at) {
    alignas(32) uint8_t bytes[32];
    store(bytes, at);
    for (uint8_t& b : bytes) b = table[b];
    return load(bytes);
  }

  // As in vec512.h, without VBMI.
  struct Table {
    I rows[16];
    explicit Table(const uint8_t* table) {
      __m128i before = _mm_setzero_si128();
      for (int i = 0; i < 16; ++i) {
        const __m128i now = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table) + i);
        rows[i] = _mm256_broadcastsi128_si256(i % 8 ? _mm_xor_si128(now, before) : now);
        before = now;
      }
    }
    I look_up(I at) const {
      const I flipped = _mm256_xor_si256(at, _mm256_set1_epi8(-128));
      I found = _mm256_setzero_si256();
      for (int i = 0; i < 8; ++i) {
        const I step = _mm256_set1_epi8(static_cast<char>(16 * i));
        const I low = _mm256_shuffle_epi8(rows[i], _mm256_subs_epi8(at, step));
        const I high = _mm256_shuffle_epi8(rows[i + 8], _mm256_subs_epi8(flipped, step));
        found = _mm256_xor_si256(found, _mm256_xor_si256(low, high));
      }
      return found;
    }
  };

  static I first_lanes(int64_t count) {
    const I lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count < 8 ? static_cast<int>(count) : 8), lane);
  }
  static F load_floats(const void* p, int64_t count) {
    const float* f = static_cast<const float*>(p);
    return count >= 8 ? _mm256_loadu_ps(f) : _mm256_maskload_ps(f, first_lanes(count));
  }
  static F first_floats(F v, int64_t count) { return _mm256_and_ps(v, _mm256_castsi256_ps(first_lanes(count))); }
  static void store_floats(void* p, F v, int64_t count) {
    float* f = static_cast<float*>(p);
    if (count >= 8) _mm256_storeu_ps(f, v);
    else _mm256_maskstore_ps(f, first_lanes(count), v);
  }
  static I widen_at(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static I narrow_in_order(const I v[4], I zp16) { return pixels_apart<1>(narrow(v, zp16)); }

  static I add_sums(I acc, I bytes) {
    return _mm256_add_epi64(acc, _mm256_sad_epu8(bytes, _mm256_setzero_si256()));
  }
  static I add_squares(I acc, I bytes) {
    const I zero = _mm256_setzero_si256();
    const I a = _mm256_unpacklo_epi8(bytes, zero), b = _mm256_unpackhi_epi8(bytes, zero);
    return _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(a, a), _mm256_madd_epi16(b, b)));
  }
  static void totals(I sums, I squares, int64_t* sum, int64_t* square) {
    squares = _mm256_add_epi64(_mm256_and_si256(squares, _mm256_set1_epi64x(0xffffffff)), _mm256_srli_epi64(squares, 32));
    const I both = _mm256_add_epi64(_mm256_unpacklo_epi64(sums, squares), _mm256_unpackhi_epi64(sums, squares));
    const __m128i total = _mm_add_epi64(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    *sum = _mm_cvtsi128_si64(total), *square = _mm_extract_epi64(total, 1);
  }

  static I transpose_bytes(I v) {
    return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                      0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
  }
  static void transpose_quads(I v[4]) {
    const I a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
    const I c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm256_unpacklo_epi64(a, c), v[1] = _mm256_unpackhi_epi64(a, c);
    v[2] = _mm256_unpacklo_epi64(b, d), v[3] = _mm256_unpackhi_epi64(b, d);
  }
  static void store_lanes(uint8_t* to, int64_t stride, I v, int pixels, int count) {
    store_pixels<2>(to, stride, v, pixels, count);
  }
  static I load_lanes(const uint8_t* from, int64_t stride, int pixels, int count) {
    return load_pixels<2>(from, stride, pixels, count);
  }
  static I join_triples(I v) {
    const __m128i order = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    v = _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(order));
    return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 7, 7));
  }
  static void store_triples(uint8_t* p, I v) {
    _mm256_maskstore_epi32(reinterpret_cast<int*>(p), first_lanes(6), v);
  }
  static void interleave(I a, I b, I v[2]) {
    const I low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
    v[0] = _mm256_permute2x128_si256(low, high, 0x20), v[1] = _mm256_permute2x128_si256(low, high, 0x31);
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
  // BYTES of a pixel where shuffle_windows finds them for every lane of a block.
  template <int BYTES>
  static I spread(const uint8_t* from) {
    if constexpr (BYTES == 8) return _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static I pick_quads(I pixel, I at) { return _mm256_permutevar8x32_epi32(pixel, at); }
};

}  // namespace

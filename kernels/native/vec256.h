// 256-bit vectors behind the same interface as vec512.h. Masked bytes go through a buffer.
#pragma once

#include <immintrin.h>

#define XQ_INTEGERS __m256i
#define XQ_FLOATS __m256
#define XQ_MM(name) _mm256_##name
#define XQ_SI(name) _mm256_##name##_si256
#define XQ_BITS _mm256_castps_si256
#define XQ_FROM_BITS _mm256_castsi256_ps
#define XQ_REPEAT_128 _mm256_broadcastsi128_si256
#define XQ_XOR_3(a, b, c) _mm256_xor_si256(a, _mm256_xor_si256(b, c))
#include "vec.h"

namespace {

template <bool VNNI>
struct Vec256 : VecCommon {
  static constexpr bool kVnni = VNNI;
  static constexpr int kRows = 6;
  static constexpr bool kFitRows = false;
  static constexpr int kWinogradRows = 6;
  static constexpr int kGroupedRows = VNNI ? 4 : 6;
  static constexpr int kStripPixels = VNNI ? 2 : 3;
  static constexpr bool kWideStrips = !VNNI;

  static I dot(I acc, I a, I w) {
    if constexpr (VNNI) return _mm256_dpbusd_avx_epi32(acc, a, w);
    return dot_wide(acc, a, w);
  }
  static I dot16(I acc, I a, I w) {
    if constexpr (VNNI) return _mm256_dpwssd_avx_epi32(acc, a, w);
    return VecCommon::dot16(acc, a, w);
  }

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
  // Bytes that are no whole vector, by loads that overlap: one that waits for narrower stores to a
  // buffer costs more than all of them.
  static uint64_t load_few(const uint8_t* p, int count) {
    if (count >= 8) return word<uint64_t>(p);
    if (count >= 4) return word<uint32_t>(p) | uint64_t{word<uint32_t>(p + count - 4)} << 8 * (count - 4);
    if (count >= 2) return word<uint16_t>(p) | uint64_t{word<uint16_t>(p + count - 2)} << 8 * (count - 2);
    return count == 1 ? *p : 0;
  }
  static __m128i load_some(const uint8_t* p, int count) {
    if (count >= 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const uint64_t high = count > 8 ? word<uint64_t>(p + count - 8) >> 8 * (16 - count) : 0;
    return _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(load_few(p, count)));
  }
  // The last of 16 bytes, moved to the front; zeros behind.
  static __m128i load_last(const uint8_t* end, int count) {
    alignas(32) static constexpr uint8_t kMoves[32] = {
        0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    10,   11,   12,   13,   14,   15,
        0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80};
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(end - 16));
    return _mm_shuffle_epi8(bytes, _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMoves + 16 - count)));
  }
  template <class W>
  static W word(const uint8_t* p) {
    W value;
    memcpy(&value, p, sizeof value);
    return value;
  }

  template <int VECS>
  static I load_pixels(const uint8_t* from, int64_t stride, int pixels, int count) {
    if constexpr (VECS == 4) {
      if (count >= 32) return load(from);
      const __m128i low = load_some(from, count);
      return _mm256_set_m128i(count > 16 ? load_last(from + count, count - 16) : _mm_setzero_si128(), low);
    }
    if constexpr (VECS == 2) {
      const __m128i low = load_some(from, count);
      return _mm256_set_m128i(pixels == 2 ? load_some(from + stride, count) : _mm_setzero_si128(), low);
    }
    const auto pixel = [=](int i) {
      return i < pixels ? static_cast<int64_t>(load_few(from + i * stride, count)) : 0;
    };
    return _mm256_set_epi64x(pixel(3), pixel(2), pixel(1), pixel(0));
  }

  template <int VECS>
  static void bytes_to_floats(const uint8_t* from, int64_t stride, int pixels, int count, F offset, F v[4]) {
    if (VECS == 2 && count >= 16) {
      for (int i = 0; i < 2; ++i) {
        const uint8_t* pixel = i < pixels ? from + i * stride : from;
        const I words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pixel)));
        v[2 * i] = low_words_to_floats(words, offset), v[2 * i + 1] = high_words_to_floats(words, offset);
      }
      return;
    }
    I bytes[4];
    widen(pixels_woven<VECS>(load_pixels<VECS>(from, stride, pixels, count)), bytes);
    for (int i = 0; i < 4; ++i) v[i] = sub(to_float(bytes[i]), sub(offset, setf(kByteFloats)));
  }

  using Table = ShuffleTable;
  static I look_up(const uint8_t* placed, I at) { return ShuffleTable::look_up_placed(placed, at); }

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
  // The 128-bit lanes of two vectors, transposed.
  static void transpose_lanes(I v[2]) {
    const I low = _mm256_permute2x128_si256(v[0], v[1], 0x20);
    v[1] = _mm256_permute2x128_si256(v[0], v[1], 0x31), v[0] = low;
  }
  static I widen_at(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static I narrow_in_order(const I v[4], I zp16) { return pixels_apart<1>(narrow(v, zp16)); }

  static void totals(I sums, I squares, int64_t* sum, int64_t* square) {
    const I both = totals_by_turns(sums, squares);
    const __m128i total = _mm_add_epi64(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    *sum = _mm_cvtsi128_si64(total), *square = _mm_extract_epi64(total, 1);
  }
  static void store_lanes(uint8_t* to, int64_t stride, I v, int pixels, int count) {
    store_pixels<2>(to, stride, v, pixels, count);
  }
  static I load_lanes(const uint8_t* from, int64_t stride, int pixels, int count) {
    return load_pixels<2>(from, stride, pixels, count);
  }
  static I join_triples(I v) {
    return _mm256_permutevar8x32_epi32(join_triples_apart(v), _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 7, 7));
  }
  static void store_triples(uint8_t* p, I v) {
    _mm256_maskstore_epi32(reinterpret_cast<int*>(p), first_lanes(6), v);
  }
  static void interleave(I a, I b, I v[2]) {
    const I low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
    v[0] = _mm256_permute2x128_si256(low, high, 0x20), v[1] = _mm256_permute2x128_si256(low, high, 0x31);
  }

  static void weave4(const uint8_t* const row[4], int count, I v[4]) {
    weave(load_pixels<4>(row[0], 0, 1, count), load_pixels<4>(row[1], 0, 1, count),
          load_pixels<4>(row[2], 0, 1, count), load_pixels<4>(row[3], 0, 1, count), v);
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

  // The floats of kLanes codes of BITS bits, as rows of embedding tables hold them; those of 32 are floats.
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

}  // namespace

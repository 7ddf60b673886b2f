// 512-bit vectors behind the interface that dense.h, depthwise.h and grouped.h are written to.
// Include from a file that has set its target; VNNI and VBMI say what that target has.
#pragma once

#include <immintrin.h>

#include <type_traits>

#define XQ_INTEGERS __m512i
#define XQ_FLOATS __m512
#define XQ_MM(name) _mm512_##name
#define XQ_SI(name) _mm512_##name##_si512
#define XQ_BITS _mm512_castps_si512
#define XQ_FROM_BITS _mm512_castsi512_ps
#define XQ_REPEAT_128 _mm512_broadcast_i32x4
#define XQ_XOR_3(a, b, c) _mm512_ternarylogic_epi32(a, b, c, 0x96)
#include "vec.h"

namespace {

template <bool VNNI, bool VBMI>
struct Vec512 : VecCommon {
  static constexpr bool kVnni = VNNI;
  static constexpr int kRows = VNNI ? 14 : 8;  // pixels of a register block, two vectors each
  static constexpr bool kFitRows = VNNI;       // whether tiles keep to rows of the image
  static constexpr int kWinogradRows = VNNI ? 14 : 12;
  static constexpr int kGroupedRows = VNNI ? 8 : 4;
  static constexpr int kStripPixels = VNNI ? 6 : 3;
  static constexpr bool kWideStrips = false;

  // acc + sum over 4 bytes of u8 a times s8 w, exactly.
  static I dot(I acc, I a, I w) {
    if constexpr (VNNI) return _mm512_dpbusd_epi32(acc, a, w);
    return dot_wide(acc, a, w);
  }
  static I dot16(I acc, I a, I w) {
    if constexpr (VNNI) return _mm512_dpwssd_epi32(acc, a, w);
    return VecCommon::dot16(acc, a, w);
  }

  // Half a vector: what comes from memory comes sooner by such loads; see README.md.
  struct Half {
    using I = __m256i;
    static I load(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
    static I dot(I acc, I a, I w) { return _mm256_dpbusd_epi32(acc, a, w); }
    static I add32(I a, I b) { return _mm256_add_epi32(a, b); }
    static I quad(const uint8_t* p) {
      int v;
      memcpy(&v, p, 4);
      return _mm256_set1_epi32(v);
    }
  };
  static I join(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }

  // Where a > b, x, else y; so y where a or b is NaN.
  static F if_greater(F a, F b, F x, F y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x); }
  static float total(F v) { return _mm512_reduce_add_ps(v); }
  static I widen_signed(const int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static float least(F v) { return _mm512_reduce_min_ps(v); }
  static float greatest(F v) { return _mm512_reduce_max_ps(v); }
  static bool any_nan(F v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }
  // narrow() leaves 4 / VECS pixels interleaved by 128-bit lane: take them apart, and back.
  template <int VECS>
  static I pixels_apart(I v) {
    if constexpr (VECS == 2) return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), v);
    if constexpr (VECS == 1) return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
    return v;
  }
  template <int VECS>
  static I pixels_woven(I v) {
    if constexpr (VECS == 2) return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), v);
    return pixels_apart<VECS>(v);  // for one vector it is its own inverse
  }

  template <int VECS>
  static void store_pixels(uint8_t* to, int64_t stride, I v, int pixels, int count) {
    const uint64_t keep = count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
    if constexpr (VECS == 4) {
      _mm512_mask_storeu_epi8(to, keep, v);
    } else if constexpr (VECS == 2) {
      const auto mask = static_cast<__mmask32>(keep);
      _mm256_mask_storeu_epi8(to, mask, _mm512_castsi512_si256(v));
      if (pixels > 1) _mm256_mask_storeu_epi8(to + stride, mask, _mm512_extracti64x4_epi64(v, 1));
    } else {
      const auto mask = static_cast<__mmask16>(keep);
      _mm_mask_storeu_epi8(to, mask, _mm512_castsi512_si128(v));
      if (pixels > 1) _mm_mask_storeu_epi8(to + stride, mask, _mm512_extracti32x4_epi32(v, 1));
      if (pixels > 2) _mm_mask_storeu_epi8(to + 2 * stride, mask, _mm512_extracti32x4_epi32(v, 2));
      if (pixels > 3) _mm_mask_storeu_epi8(to + 3 * stride, mask, _mm512_extracti32x4_epi32(v, 3));
    }
  }
  template <int VECS>
  static I load_pixels(const uint8_t* from, int64_t stride, int pixels, int count) {
    const uint64_t keep = count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
    if constexpr (VECS == 4) return _mm512_maskz_loadu_epi8(keep, from);
    if constexpr (VECS == 2) {
      const auto mask = static_cast<__mmask32>(keep);
      I v = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(mask, from));
      return pixels > 1 ? _mm512_inserti64x4(v, _mm256_maskz_loadu_epi8(mask, from + stride), 1) : v;
    }
    const auto mask = static_cast<__mmask16>(keep);
    I v = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(mask, from));
    if (pixels > 1) v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi8(mask, from + stride), 1);
    if (pixels > 2) v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi8(mask, from + 2 * stride), 2);
    if (pixels > 3) v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi8(mask, from + 3 * stride), 3);
    return v;
  }

  // Bytes of 4 / VECS pixels as floats less offset - kByteFloats, in the order of sums.
  template <int VECS>
  static void bytes_to_floats(const uint8_t* from, int64_t stride, int pixels, int count, F offset, F v[4]) {
    const uint64_t keep = count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
    if constexpr (VECS == 2) {
      for (int i = 0; i < 2; ++i) {
        const uint8_t* pixel = i < pixels ? from + i * stride : from;
        const I words = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(static_cast<__mmask32>(keep), pixel));
        v[2 * i] = low_words_to_floats(words, offset), v[2 * i + 1] = high_words_to_floats(words, offset);
      }
    } else {
      I bytes[4];
      widen(pixels_woven<VECS>(load_pixels<VECS>(from, stride, pixels, count)), bytes);
      for (int i = 0; i < 4; ++i) v[i] = sub(to_float(bytes[i]), sub(offset, setf(kByteFloats)));
    }
  }

  struct VbmiTable {
    I rows[4];
    explicit VbmiTable(const uint8_t* table) {
      for (int i = 0; i < 4; ++i) rows[i] = load(table + 64 * i);
    }
    I look_up(I at) const {
      const I low = _mm512_permutex2var_epi8(rows[0], at, rows[1]);
      const I high = _mm512_permutex2var_epi8(rows[2], at, rows[3]);
      return _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high);
    }
  };
  using Table = std::conditional_t<VBMI, VbmiTable, ShuffleTable>;
  // In a table that lies as xq::place_lut writes it.
  static I look_up(const uint8_t* placed, I at) {
    if constexpr (VBMI) return VbmiTable(placed).look_up(at);
    return ShuffleTable::look_up_placed(placed, at);
  }

  // Up to kLanes floats; the rest is 0.
  static F load_floats(const void* p, int64_t count) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1), p);
  }
  // v in the first `count` lanes, else 0.
  static F first_floats(F v, int64_t count) {
    return _mm512_maskz_mov_ps(static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1), v);
  }
  static void store_floats(void* p, F v, int64_t count) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1), v);
  }
  // Bytes in memory as int32 in their order, and back; widen and narrow are not in order.
  static I widen_at(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I narrow_in_order(const I v[4], I zp16) { return pixels_apart<1>(narrow(v, zp16)); }

  static void totals(I sums, I squares, int64_t* sum, int64_t* square) {
    const I both = totals_by_turns(sums, squares);
    const __m256i half = _mm256_add_epi64(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    const __m128i total = _mm_add_epi64(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    *sum = _mm_cvtsi128_si64(total), *square = _mm_extract_epi64(total, 1);
  }
  // 128-bit lanes to and from `pixels` (up to 4) places, `count` (up to 16) bytes each.
  static void store_lanes(uint8_t* to, int64_t stride, I v, int pixels, int count) {
    store_pixels<1>(to, stride, v, pixels, count);
  }
  static I load_lanes(const uint8_t* from, int64_t stride, int pixels, int count) {
    return load_pixels<1>(from, stride, pixels, count);
  }
  // The first 3 bytes of each quad, joined.
  static I join_triples(I v) {
    const I order = _mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 15, 15, 15, 15);
    return _mm512_permutexvar_epi32(order, join_triples_apart(v));
  }
  static void store_triples(uint8_t* p, I v) { _mm512_mask_storeu_epi32(p, 0xfff, v); }
  // a's and b's bytes by turns.
  static void interleave(I a, I b, I v[2]) {
    const I low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
    v[0] = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high);
    v[1] = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), high);
  }

  // The 128-bit lanes of four vectors, transposed.
  static void transpose_lanes(I v[4]) {
    const I a = _mm512_shuffle_i32x4(v[0], v[1], 0x88), b = _mm512_shuffle_i32x4(v[0], v[1], 0xdd);
    const I c = _mm512_shuffle_i32x4(v[2], v[3], 0x88), d = _mm512_shuffle_i32x4(v[2], v[3], 0xdd);
    v[0] = _mm512_shuffle_i32x4(a, c, 0x88), v[2] = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[1] = _mm512_shuffle_i32x4(b, d, 0x88), v[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }

  // Bytes of 4 rows, transposed, as `weave` does.
  static void weave4(const uint8_t* const row[4], int count, I v[4]) {
    weave(load_pixels<4>(row[0], 0, 1, count), load_pixels<4>(row[1], 0, 1, count),
          load_pixels<4>(row[2], 0, 1, count), load_pixels<4>(row[3], 0, 1, count), v);
  }
  // The same for one vector of channels in natural order.
  static I weave1(const uint8_t* const row[4], int count) {
    const auto keep = static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1);
    I v = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(keep, row[0]));
    v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi8(keep, row[1]), 1);
    v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi8(keep, row[2]), 2);
    v = _mm512_inserti32x4(v, _mm_maskz_loadu_epi8(keep, row[3]), 3);
    v = pixels_apart<1>(v);
    return transpose_bytes(v);
  }
  // The first BYTES bytes; then lane i of a result is the quad at byte 4 * at[i] of them.
  template <int BYTES>
  static I load_quads(const uint8_t* from) {
    if constexpr (BYTES == 16) return _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  // BYTES of a pixel where shuffle_windows finds them for every lane of a block.
  template <int BYTES>
  static I spread(const uint8_t* from) {
    const I at = BYTES == 16 ? _mm512_setr_epi64(0, 0, 0, 0, 1, 1, 1, 1) : _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3);
    return _mm512_permutexvar_epi64(at, load_quads<BYTES>(from));
  }
  static I pick_quads(I pixel, I at) { return _mm512_permutexvar_epi32(at, pixel); }

  // The floats of kLanes codes of BITS bits, as rows of embedding tables hold them; those of 32 are floats.
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

}  // namespace

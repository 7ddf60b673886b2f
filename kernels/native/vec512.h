// 512-bit vectors behind the interface that dense.h, depthwise.h and grouped.h are written to.
// Include from a file that has set its target; VNNI and VBMI say what that target has.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

template <bool VNNI, bool VBMI>
struct Vec512 {
  using I = __m512i;
  using F = __m512;
  static constexpr int kLanes = 16;     // int32s
  static constexpr bool kVnni = VNNI;
  static constexpr int kRows = VNNI ? 12 : 8;  // pixels of a register block, two vectors each
  static constexpr int kWinogradRows = 12;
  static constexpr int kGroupedRows = VNNI ? 8 : 4;
  static constexpr int kStripPixels = VNNI ? 6 : 3;

  static I load(const void* p) { return _mm512_loadu_si512(p); }
  static void store(void* p, I v) { _mm512_storeu_si512(p, v); }
  static F loadf(const float* p) { return _mm512_loadu_ps(p); }
  static I as_bits(F v) { return _mm512_castps_si512(v); }
  static F setf(float v) { return _mm512_set1_ps(v); }
  static I set32(int v) { return _mm512_set1_epi32(v); }
  static I set16(int v) { return _mm512_set1_epi16(static_cast<short>(v)); }
  static I set8(int v) { return _mm512_set1_epi8(static_cast<char>(v)); }
  static I quad(const uint8_t* p) {
    int v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
  }

  // acc + sum over 4 bytes of u8 a times s8 w, exactly.
  static I dot(I acc, I a, I w) {
    if constexpr (VNNI) {
      return _mm512_dpbusd_epi32(acc, a, w);
    } else {
      const I even = _mm512_and_si512(a, _mm512_set1_epi16(0xff)), odd = _mm512_srli_epi16(a, 8);
      const I weven = _mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8), wodd = _mm512_srai_epi16(w, 8);
      acc = _mm512_add_epi32(acc, _mm512_madd_epi16(even, weven));
      return _mm512_add_epi32(acc, _mm512_madd_epi16(odd, wodd));
    }
  }

  // The same in fewer steps, for weights whose pairs of products fit int16.
  static I dot_safe(I acc, I a, I w) {
    const I pairs = _mm512_maddubs_epi16(a, w);
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }

  // Two such for weights whose four products a lane fit int16 together.
  static I dot_couple(I acc, I a, I wa, I b, I wb) {
    const I quads = _mm512_add_epi16(_mm512_maddubs_epi16(a, wa), _mm512_maddubs_epi16(b, wb));
    return _mm512_add_epi32(acc, _mm512_madd_epi16(quads, _mm512_set1_epi16(1)));
  }

  // Each 16 bytes in the order given for them; `window` makes it the same for all.
  static I shuffle_windows(I v, I from) { return _mm512_shuffle_epi8(v, from); }
  static I window(const uint8_t* places) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(places)));
  }

  // Pairs of int16 products onto int32.
  static I dot16(I acc, I a, I w) { return _mm512_add_epi32(acc, _mm512_madd_epi16(a, w)); }
  static I quarter(I v) { return _mm512_srai_epi32(v, 2); }

  static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  static I to_int(F v) { return _mm512_cvtps_epi32(v); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  // Where a > b, x, else y; so y where a or b is NaN.
  static F if_greater(F a, F b, F x, F y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x); }
  static float total(F v) { return _mm512_reduce_add_ps(v); }
  static I widen_signed(const int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static float least(F v) { return _mm512_reduce_min_ps(v); }
  static float greatest(F v) { return _mm512_reduce_max_ps(v); }
  static bool any_nan(F v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }
  // Vectors in the order of channel_of to channels in order.
  template <int VECS>
  static void channels_in_order(F v[VECS]) {
    if constexpr (VECS == 2) {
      const I low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
      const I high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
      const F a = v[0], b = v[1];
      v[0] = _mm512_permutex2var_ps(a, low, b), v[1] = _mm512_permutex2var_ps(a, high, b);
    }
  }
  // 2^n for n from -126 to 127, 0 for -127.
  static F power_of_two(I n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, set32(127)), 23)); }
  static I sub32(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I mul32(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I add32(I a, I b) { return _mm512_add_epi32(a, b); }
  static I max8(I a, I b) { return _mm512_max_epu8(a, b); }
  static I min8(I a, I b) { return _mm512_min_epu8(a, b); }

  // Four vectors of int32 plus a zero point as bytes, in the order of channel_of within 128 bits.
  static I narrow(const I v[4], I zp16) {
    const I a = _mm512_adds_epi16(_mm512_packs_epi32(v[0], v[1]), zp16);
    const I b = _mm512_adds_epi16(_mm512_packs_epi32(v[2], v[3]), zp16);
    return _mm512_packus_epi16(a, b);
  }
  static void widen(I bytes, I v[4]) {
    const I zero = _mm512_setzero_si512();
    const I a = _mm512_unpacklo_epi8(bytes, zero), b = _mm512_unpackhi_epi8(bytes, zero);
    v[0] = _mm512_unpacklo_epi16(a, zero), v[1] = _mm512_unpackhi_epi16(a, zero);
    v[2] = _mm512_unpacklo_epi16(b, zero), v[3] = _mm512_unpackhi_epi16(b, zero);
  }
  // Bytes added to 16-bit sums, and such sums to int32 in the order of widen.
  static void add_wide(I bytes, I& low, I& high) {
    const I zero = _mm512_setzero_si512();
    low = _mm512_add_epi16(low, _mm512_unpacklo_epi8(bytes, zero));
    high = _mm512_add_epi16(high, _mm512_unpackhi_epi8(bytes, zero));
  }
  static void add_quads(I low, I high, I v[4]) {
    const I zero = _mm512_setzero_si512();
    v[0] = add32(v[0], _mm512_unpacklo_epi16(low, zero)), v[1] = add32(v[1], _mm512_unpackhi_epi16(low, zero));
    v[2] = add32(v[2], _mm512_unpacklo_epi16(high, zero)), v[3] = add32(v[3], _mm512_unpackhi_epi16(high, zero));
  }
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

  static I look_up(const uint8_t* table, I at) {
    if constexpr (VBMI) {
      const I t0 = load(table), t1 = load(table + 64), t2 = load(table + 128), t3 = load(table + 192);
      const I low = _mm512_permutex2var_epi8(t0, at, t1), high = _mm512_permutex2var_epi8(t2, at, t3);
      return _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high);
    } else {
      alignas(64) uint8_t bytes[64];
      store(bytes, at);
      for (uint8_t& b : bytes) b = table[b];
      return load(bytes);
    }
  }

  // A table of 256 bytes, kept in registers where they are plenty. Without VBMI, 16 shuffles look a byte
  // up in 16 bytes each: row i answers for all bytes from 16 i on, so it holds the difference to row
  // i - 1. Subtracting with saturation makes an index negative, which a shuffle answers with 0, below
  // its row; the upper half of the table is looked up with the sign flipped.
  struct Table {
    I rows[VBMI ? 4 : 16];
    explicit Table(const uint8_t* table) {
      if constexpr (VBMI) {
        for (int i = 0; i < 4; ++i) rows[i] = load(table + 64 * i);
      } else {
        __m128i before = _mm_setzero_si128();
        for (int i = 0; i < 16; ++i) {
          const __m128i now = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table) + i);
          rows[i] = _mm512_broadcast_i32x4(i % 8 ? _mm_xor_si128(now, before) : now);
          before = now;
        }
      }
    }
    I look_up(I at) const {
      if constexpr (VBMI) {
        const I low = _mm512_permutex2var_epi8(rows[0], at, rows[1]);
        const I high = _mm512_permutex2var_epi8(rows[2], at, rows[3]);
        return _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high);
      } else {
        const I flipped = _mm512_xor_si512(at, _mm512_set1_epi8(-128));
        I found = _mm512_setzero_si512();
        for (int i = 0; i < 8; ++i) {
          const I step = _mm512_set1_epi8(static_cast<char>(16 * i));
          const I low = _mm512_shuffle_epi8(rows[i], _mm512_subs_epi8(at, step));
          const I high = _mm512_shuffle_epi8(rows[i + 8], _mm512_subs_epi8(flipped, step));
          found = _mm512_ternarylogic_epi32(found, low, high, 0x96);
        }
        return found;
      }
    }
  };

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

  // Sums of bytes and of their squares, 64-bit and 32-bit lanes.
  static I add_sums(I acc, I bytes) {
    return _mm512_add_epi64(acc, _mm512_sad_epu8(bytes, _mm512_setzero_si512()));
  }
  static I add_squares(I acc, I bytes) {
    const I zero = _mm512_setzero_si512();
    const I a = _mm512_unpacklo_epi8(bytes, zero), b = _mm512_unpackhi_epi8(bytes, zero);
    return _mm512_add_epi32(acc, _mm512_add_epi32(_mm512_madd_epi16(a, a), _mm512_madd_epi16(b, b)));
  }
  static void totals(I sums, I squares, int64_t* sum, int64_t* square) {
    squares = _mm512_add_epi64(_mm512_and_si512(squares, _mm512_set1_epi64(0xffffffff)), _mm512_srli_epi64(squares, 32));
    const I both = _mm512_add_epi64(_mm512_unpacklo_epi64(sums, squares), _mm512_unpackhi_epi64(sums, squares));
    const __m256i half = _mm256_add_epi64(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    const __m128i total = _mm_add_epi64(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    *sum = _mm_cvtsi128_si64(total), *square = _mm_extract_epi64(total, 1);
  }

  // Within each 128 bits: 4 × 4 bytes, and 4 × 4 quads over four vectors, transposed.
  static I transpose_bytes(I v) {
    return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(_mm_setr_epi8(
                                      0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
  }
  static void transpose_quads(I v[4]) {
    const I a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    const I c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm512_unpacklo_epi64(a, c), v[1] = _mm512_unpackhi_epi64(a, c);
    v[2] = _mm512_unpacklo_epi64(b, d), v[3] = _mm512_unpackhi_epi64(b, d);
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
    const __m128i order = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    v = _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(order));
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 15, 15, 15, 15), v);
  }
  static void store_triples(uint8_t* p, I v) { _mm512_mask_storeu_epi32(p, 0xfff, v); }
  // a's and b's bytes by turns.
  static void interleave(I a, I b, I v[2]) {
    const I low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
    v[0] = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high);
    v[1] = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), high);
  }

  // Bytes of 4 rows, transposed: v[i] holds 4 bytes a channel, channels ordered as channel_of(4).
  static void weave4(const uint8_t* const row[4], int count, I v[4]) {
    const uint64_t keep = count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
    const I a = _mm512_maskz_loadu_epi8(keep, row[0]), b = _mm512_maskz_loadu_epi8(keep, row[1]);
    const I c = _mm512_maskz_loadu_epi8(keep, row[2]), d = _mm512_maskz_loadu_epi8(keep, row[3]);
    const I ab0 = _mm512_unpacklo_epi8(a, b), ab1 = _mm512_unpackhi_epi8(a, b);
    const I cd0 = _mm512_unpacklo_epi8(c, d), cd1 = _mm512_unpackhi_epi8(c, d);
    v[0] = _mm512_unpacklo_epi16(ab0, cd0), v[1] = _mm512_unpackhi_epi16(ab0, cd0);
    v[2] = _mm512_unpacklo_epi16(ab1, cd1), v[3] = _mm512_unpackhi_epi16(ab1, cd1);
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
};

}  // namespace

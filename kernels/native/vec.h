// What vectors of 256 and of 512 bits do alike. vec256.h and vec512.h include it, each with its own intrinsics
// behind two macros, and add what differs: XQ_MM(add_epi32) and XQ_SI(and) stand for _mm256_add_epi32 and
// _mm256_and_si256, or for _mm512_add_epi32 and _mm512_and_si512. A file of one instruction set has one of them.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "unroll.h"

namespace {

struct VecCommon {
  using I = XQ_INTEGERS;
  using F = XQ_FLOATS;
  static constexpr int kLanes = sizeof(F) / sizeof(float);

  static I load(const void* p) { return XQ_SI(loadu)(static_cast<const I*>(p)); }
  static void store(void* p, I v) { XQ_SI(storeu)(static_cast<I*>(p), v); }
  static F loadf(const float* p) { return XQ_MM(loadu_ps)(p); }
  static I as_bits(F v) { return XQ_BITS(v); }
  static F setf(float v) { return XQ_MM(set1_ps)(v); }
  static I set32(int v) { return XQ_MM(set1_epi32)(v); }
  static I set16(int v) { return XQ_MM(set1_epi16)(static_cast<short>(v)); }
  static I set8(int v) { return XQ_MM(set1_epi8)(static_cast<char>(v)); }
  static I quad(const uint8_t* p) {
    int v;
    memcpy(&v, p, 4);
    return set32(v);
  }

  // acc + sum over 4 bytes of u8 a times s8 w, exactly, without VNNI.
  static I dot_wide(I acc, I a, I w) {
    const I even = even_bytes(a), odd = odd_bytes(a);
    const I weven = XQ_MM(srai_epi16)(XQ_MM(slli_epi16)(w, 8), 8), wodd = XQ_MM(srai_epi16)(w, 8);
    acc = add32(acc, XQ_MM(madd_epi16)(even, weven));
    return add32(acc, XQ_MM(madd_epi16)(odd, wodd));
  }
  // The same in fewer steps, for weights whose pairs of products fit int16.
  static I dot_safe(I acc, I a, I w) { return dot16(acc, XQ_MM(maddubs_epi16)(a, w), set16(1)); }
  // Two such for weights whose four products a lane fit int16 together.
  static I dot_couple(I acc, I a, I wa, I b, I wb) {
    return dot16(acc, XQ_MM(add_epi16)(XQ_MM(maddubs_epi16)(a, wa), XQ_MM(maddubs_epi16)(b, wb)), set16(1));
  }
  // u8 a times s8 w in pairs that fit int16, and sums of such.
  static I multiply_pairs(I a, I w) { return XQ_MM(maddubs_epi16)(a, w); }
  static I add16(I a, I b) { return XQ_MM(add_epi16)(a, b); }
  static I multiply16(I a, I b) { return XQ_MM(madd_epi16)(a, b); }
  static I sub8(I a, I b) { return XQ_MM(sub_epi8)(a, b); }
  // Bytes as 16 bits.
  static I even_bytes(I v) { return XQ_SI(and)(v, set16(0xff)); }
  static I odd_bytes(I v) { return XQ_MM(srli_epi16)(v, 8); }
  // An int32 as the pair of int16 whose products with `times` of a number from 0 to 255 add up to minus its product with
  // the number. It must not leave 23 bits.
  static I factors(I v) { return XQ_MM(slli_epi32)(XQ_MM(srai_epi32)(v, 7), 16) | (v & set32(127)); }
  static I times(int32_t v) { return set32(static_cast<int32_t>(static_cast<uint32_t>(-v * 128) << 16 | (static_cast<uint32_t>(-v) & 0xffff))); }
  // Pairs of int16 products onto int32.
  static I dot16(I acc, I a, I w) { return add32(acc, XQ_MM(madd_epi16)(a, w)); }

  // The same 16 bytes in every 128-bit lane.
  static I repeat(__m128i v) { return XQ_REPEAT_128(v); }
  // Each 16 bytes in the order given for them; `window` makes it the same for all.
  static I shuffle_windows(I v, I from) { return XQ_MM(shuffle_epi8)(v, from); }
  static I exclusive_or(I a, I b) { return XQ_SI(xor)(a, b); }
  static I both(I a, I b) { return XQ_SI(and)(a, b); }
  template <int BITS>
  static I right16(I v) { return XQ_MM(srli_epi16)(v, BITS); }
  static I window(const uint8_t* places) { return repeat(_mm_loadu_si128(reinterpret_cast<const __m128i*>(places))); }

  template <int BITS>
  static I left32(I v) { return XQ_MM(slli_epi32)(v, BITS); }
  template <int BITS>
  static I right32(I v) { return XQ_MM(srai_epi32)(v, BITS); }
  static F to_float(I v) { return XQ_MM(cvtepi32_ps)(v); }
  static I to_int(F v) { return XQ_MM(cvtps_epi32)(v); }
  static F fma(F a, F b, F c) { return XQ_MM(fmadd_ps)(a, b, c); }
  static F add(F a, F b) { return XQ_MM(add_ps)(a, b); }
  static F sub(F a, F b) { return XQ_MM(sub_ps)(a, b); }
  static F mul(F a, F b) { return XQ_MM(mul_ps)(a, b); }
  static F min(F a, F b) { return XQ_MM(min_ps)(a, b); }
  static F max(F a, F b) { return XQ_MM(max_ps)(a, b); }
  static F div(F a, F b) { return XQ_MM(div_ps)(a, b); }
  // A float whose exponent is the low 8 bits of v: 2^(n - 127) for n from 1 on, 0 for 0.
  static F exponent_bits(F v) { return XQ_FROM_BITS(XQ_MM(slli_epi32)(XQ_BITS(v), 23)); }
  static I sub32(I a, I b) { return XQ_MM(sub_epi32)(a, b); }
  static I mul32(I a, I b) { return XQ_MM(mullo_epi32)(a, b); }
  static I add32(I a, I b) { return XQ_MM(add_epi32)(a, b); }
  // 2^23: a float this large has its integer in its low bits, so a byte becomes a float by what stands above it.
  static constexpr int kByteFloats = 1 << 23;
  // Words that hold bytes as floats less `offset`, which is at least kByteFloats: the low or the high half of each 128
  // bits. Exact.
  static F low_words_to_floats(I words, F offset) {
    return sub(XQ_FROM_BITS(XQ_MM(unpacklo_epi16)(words, set16(0x4b00))), offset);
  }
  static F high_words_to_floats(I words, F offset) {
    return sub(XQ_FROM_BITS(XQ_MM(unpackhi_epi16)(words, set16(0x4b00))), offset);
  }

  static I max8(I a, I b) { return XQ_MM(max_epu8)(a, b); }
  static I min8(I a, I b) { return XQ_MM(min_epu8)(a, b); }

  // Four vectors of int32 plus a zero point as bytes, in the order of channel_of within 128 bits; and back.
  static I narrow(const I v[4], I zp16) {
    const I a = XQ_MM(adds_epi16)(XQ_MM(packs_epi32)(v[0], v[1]), zp16);
    const I b = XQ_MM(adds_epi16)(XQ_MM(packs_epi32)(v[2], v[3]), zp16);
    return XQ_MM(packus_epi16)(a, b);
  }
  // The same where the zero point is 0.
  static I narrow_from_zero(const I v[4]) {
    return XQ_MM(packus_epi16)(XQ_MM(packs_epi32)(v[0], v[1]), XQ_MM(packs_epi32)(v[2], v[3]));
  }
  static void widen(I bytes, I v[4]) {
    const I zero = set32(0), a = XQ_MM(unpacklo_epi8)(bytes, zero), b = XQ_MM(unpackhi_epi8)(bytes, zero);
    v[0] = XQ_MM(unpacklo_epi16)(a, zero), v[1] = XQ_MM(unpackhi_epi16)(a, zero);
    v[2] = XQ_MM(unpacklo_epi16)(b, zero), v[3] = XQ_MM(unpackhi_epi16)(b, zero);
  }
  // Bytes added to 16-bit sums, and such sums to int32 in the order of widen.
  static void add_wide(I bytes, I& low, I& high) {
    const I zero = set32(0);
    low = XQ_MM(add_epi16)(low, XQ_MM(unpacklo_epi8)(bytes, zero));
    high = XQ_MM(add_epi16)(high, XQ_MM(unpackhi_epi8)(bytes, zero));
  }
  static void add_quads(I low, I high, I v[4]) {
    const I zero = set32(0);
    v[0] = add32(v[0], XQ_MM(unpacklo_epi16)(low, zero)), v[1] = add32(v[1], XQ_MM(unpackhi_epi16)(low, zero));
    v[2] = add32(v[2], XQ_MM(unpacklo_epi16)(high, zero)), v[3] = add32(v[3], XQ_MM(unpackhi_epi16)(high, zero));
  }

  // A table of 256 bytes, kept in registers where they are plenty. Without VBMI, 16 shuffles look a byte
  // up in 16 bytes each: row i answers for all bytes from 16 i on, so it holds the difference to row
  // i - 1. Subtracting with saturation makes an index negative, which a shuffle answers with 0, below
  // its row; the upper half of the table is looked up with the sign flipped.
  struct ShuffleTable {
    I rows[16];
    explicit ShuffleTable(const uint8_t* table) {
      __m128i before = _mm_setzero_si128();
      for (int i = 0; i < 16; ++i) {
        const __m128i now = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table) + i);
        rows[i] = repeat(i % 8 ? _mm_xor_si128(now, before) : now);
        before = now;
      }
    }
    I look_up(I at) const {
      return look_up_rows([&](int i) XQ_INLINE { return rows[i]; }, at);
    }
    // The same in a table in memory that lies as xq::place_lut writes it.
    static I look_up_placed(const uint8_t* placed, I at) {
      return look_up_rows([&](int i) XQ_INLINE { return window(placed + 16 * i); }, at);
    }

   private:
    template <class ROW>
    XQ_INLINE static I look_up_rows(ROW row, I at) {
      const I flipped = XQ_SI(xor)(at, set8(-128));
      I found = set32(0);
      unroll<8>([&](int i) XQ_INLINE {
        const I step = set8(16 * i);
        const I low = shuffle_windows(row(i), XQ_MM(subs_epi8)(at, step));
        const I high = shuffle_windows(row(i + 8), XQ_MM(subs_epi8)(flipped, step));
        found = XQ_XOR_3(found, low, high);
      });
      return found;
    }
  };

  // Sums of bytes and of their squares, 64-bit and 32-bit lanes; then both in turn, 64-bit, still to be added up.
  static I add_sums(I acc, I bytes) { return XQ_MM(add_epi64)(acc, XQ_MM(sad_epu8)(bytes, set32(0))); }
  static I add_squares(I acc, I bytes) {
    const I zero = set32(0), a = XQ_MM(unpacklo_epi8)(bytes, zero), b = XQ_MM(unpackhi_epi8)(bytes, zero);
    return add32(acc, add32(XQ_MM(madd_epi16)(a, a), XQ_MM(madd_epi16)(b, b)));
  }
  static I totals_by_turns(I sums, I squares) {
    const I low = XQ_MM(srli_epi64)(set32(-1), 32);
    squares = XQ_MM(add_epi64)(XQ_SI(and)(squares, low), XQ_MM(srli_epi64)(squares, 32));
    return XQ_MM(add_epi64)(XQ_MM(unpacklo_epi64)(sums, squares), XQ_MM(unpackhi_epi64)(sums, squares));
  }

  // Within each 128 bits: 4 × 4 bytes, and 4 × 4 quads over four vectors, transposed.
  static I transpose_bytes(I v) {
    return shuffle_windows(v, repeat(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
  }
  static void transpose_quads(I v[4]) {
    const I a = XQ_MM(unpacklo_epi32)(v[0], v[1]), b = XQ_MM(unpackhi_epi32)(v[0], v[1]);
    const I c = XQ_MM(unpacklo_epi32)(v[2], v[3]), d = XQ_MM(unpackhi_epi32)(v[2], v[3]);
    v[0] = XQ_MM(unpacklo_epi64)(a, c), v[1] = XQ_MM(unpackhi_epi64)(a, c);
    v[2] = XQ_MM(unpacklo_epi64)(b, d), v[3] = XQ_MM(unpackhi_epi64)(b, d);
  }
  // Within each 128 bits, the first 3 bytes of each quad, joined.
  static I join_triples_apart(I v) {
    return shuffle_windows(v, repeat(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1)));
  }
  // Bytes of 4 rows, transposed: v[i] holds 4 bytes a channel, channels ordered as channel_of(4).
  static void weave(I a, I b, I c, I d, I v[4]) {
    const I ab0 = XQ_MM(unpacklo_epi8)(a, b), ab1 = XQ_MM(unpackhi_epi8)(a, b);
    const I cd0 = XQ_MM(unpacklo_epi8)(c, d), cd1 = XQ_MM(unpackhi_epi8)(c, d);
    v[0] = XQ_MM(unpacklo_epi16)(ab0, cd0), v[1] = XQ_MM(unpackhi_epi16)(ab0, cd0);
    v[2] = XQ_MM(unpacklo_epi16)(ab1, cd1), v[3] = XQ_MM(unpackhi_epi16)(ab1, cd1);
  }
};

}  // namespace

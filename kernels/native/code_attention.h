// Attention to many keys by dot products of codes, for AVX-512 with VNNI: scores of bytes, values of 16 bits, sums in int32.
//
// Of keys their mean is taken away first. That adds the same to all scores of a query, so that shares stay what they are,
// and what is left is smaller: a feature that is large in every key needs no room in the codes. Each query and each key
// has a scale, and each feature of the values. Shares are whole numbers to 4096, which sums of them are divided by.
#pragma once

#include "attention.h"

namespace {

template <class V>
struct CodeProducts {
  using Share = uint16_t;
  static constexpr bool kInPlace = false, kScaledValues = true;
  // Of which sums over a block of keys stay below 2^31.
  static constexpr int kMostShare = 4096, kMostValue = 2047;
  static_assert(int64_t{kMostShare} * kMostValue * xq::kAttentionKeys < INT32_MAX);
  // Below them packing and rounding cost more than products gain.
  static constexpr int64_t kFewestKeys = 256, kMostSize = 1024;

  static int64_t padded(int64_t size) { return xq::round_up(size, 32); }
  static int64_t quads(int64_t size) { return xq::ceil_div(size, 4); }
  // The mean, padded to whole rows of 64 codes, and scales, before the codes.
  static int64_t key_head(int64_t keys, int64_t size) { return (xq::round_up(size, 64) + keys) * 4; }
  static int64_t key_bytes(int64_t keys, int64_t size) { return key_head(keys, size) + keys * quads(size) * 4; }
  static int64_t value_bytes(int64_t keys, int64_t size) { return padded(size) * (4 + keys * 2); }
  static int64_t query_stride(int64_t size) { return xq::round_up(size, 64); }
  static int64_t query_bytes(int64_t size) { return xq::kAttentionRows * (8 + query_stride(size)); }
  static void begin() {}
  static void end() {}

  // Of the amounts of rows the largest, which is no less than infinity where some are not finite, and their sum.
  struct Amounts {
    float largest, sum;
  };
  static Amounts amounts(const float* rows, int64_t stride, int64_t count, int64_t size) {
    __m512i most = _mm512_setzero_si512();
    __m512 sum = V::setf(0);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t d = 0; d < size; d += 16) {
        const __m512i x = amount(V::load_floats(rows + i * stride + d, size - d));
        most = _mm512_max_epu32(most, x), sum = V::add(sum, _mm512_castsi512_ps(x));
      }
    return {_mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(_mm512_reduce_max_epu32(most))))), V::total(sum)};
  }
  // Whether codes say what these heads say: others are for floats.
  static bool takes(const xq::HeadTask& t) {
    if (t.keys < kFewestKeys || t.size > kMostSize) return false;
    const Amounts k = amounts(t.k, t.k_stride, t.keys, t.size), v = amounts(t.v, t.v_stride, t.keys, t.size);
    float q = 0;
    for (int64_t head = 0; head < t.heads; ++head) {
      const float* rows = t.q + head * t.q_head + t.query_begin * t.q_stride;
      const float here = amounts(rows, t.q_stride, t.query_end - t.query_begin, t.size).largest;
      if (!(here <= q)) q = here;
    }
    // A few features far beyond all others would be most of the mean, which is taken from all keys.
    const bool even = k.largest * static_cast<float>(t.keys * t.size) <= 256 * k.sum;
    return even && q * k.largest * static_cast<float>(t.size) * __builtin_fabsf(t.scale) < 1e30f && v.largest < 1e30f;
  }

  // Of 32 keys the first quads of features, then the next: 16 keys a vector.
  static void pack_keys(const xq::HeadTask& t, void* to) {
    auto* mean = static_cast<float*>(to);
    const int64_t keys = xq::round_up(t.keys, 32), width = quads(t.size) * 4, whole = xq::round_up(t.size, 64);
    float* scales = mean + whole;
    auto* out = static_cast<uint8_t*>(to) + key_head(keys, t.size);
    const __m512 share = V::setf(1.0f / static_cast<float>(t.keys));
    for (int64_t d = 0; d < whole; d += 16) {
      __m512 sum = V::setf(0);
      for (int64_t i = 0; i < t.keys && d < t.size; ++i) sum = V::add(sum, V::load_floats(t.k + i * t.k_stride + d, t.size - d));
      V::store_floats(mean + d, V::mul(sum, share), 16);
    }
    for (int64_t n = 0; n < keys; n += 16) {
      uint8_t* half = out + n / 32 * width * 32 + n % 32 * 4;
      __m512 inverse[16];
      unroll<16>([&](int i) XQ_INLINE {
        const bool there = n + i < t.keys;
        inverse[i] = row_scale(there ? t.k + (n + i) * t.k_stride : nullptr, mean, t.size, scales + n + i);
      });
      for (int64_t d = 0; d < t.size; d += 64) {
        __m512i rows[16];
        unroll<16>([&](int i) XQ_INLINE {
          const float* row = n + i < t.keys ? t.k + (n + i) * t.k_stride : nullptr;
          rows[i] = _mm512_xor_si512(codes_at(row, mean, d, t.size, inverse[i]), V::set8(-128));
        });
        transpose_words<V>(rows);
        unroll<16>([&](int i) XQ_INLINE {
          if (d + 4 * i < width) _mm512_storeu_si512(half + (d / 4 + i) * 128, rows[i]);
        });
      }
    }
  }
  // Of 32 features the first pair of keys, then the next: 16 features a vector. Pairs stand where shares() leaves them.
  static void pack_values(const xq::HeadTask& t, void* to) {
    auto* scales = static_cast<float*>(to);
    auto* out = reinterpret_cast<uint8_t*>(scales + padded(t.size));
    const int64_t keys = xq::round_up(t.keys, 32), width = padded(t.size);
    for (int64_t d = 0; d < width; d += 16) {
      const int64_t there = t.size - d;
      const auto at = [&](int64_t key) XQ_INLINE {
        return key < t.keys && there > 0 ? V::load_floats(t.v + key * t.v_stride + d, there) : V::setf(0);
      };
      __m512 most = V::setf(0x1p-100f);
      for (int64_t i = 0; i < t.keys; ++i) most = V::max(most, _mm512_abs_ps(at(i)));
      V::store_floats(scales + d, V::mul(most, V::setf(1.0f / kMostValue)), 16);
      const __m512 inverse = _mm512_div_ps(V::setf(kMostValue), most);
      uint8_t* half = out + d / 32 * keys * 64 + d % 32 * 4;
      for (int64_t n = 0; n < keys; n += 32)
        for (int64_t i = 0; i < 16; ++i) {
          const int64_t pair = n + i / 4 * 4 + i % 2 * 2 + (i & 2) * 8;
          const __m512i low = _mm512_cvtps_epi32(V::mul(at(pair), inverse));
          const __m512i high = _mm512_cvtps_epi32(V::mul(at(pair + 1), inverse));
          _mm512_storeu_si512(half + (n / 2 + i) * 128, _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16)));
        }
    }
  }
  static V::F value_scales(const void* values, int64_t d) { return V::loadf(static_cast<const float*>(values) + d); }

  // Scales, what sums begin with, and codes.
  static QueryRows<uint8_t> queries(const xq::HeadTask& t, const float* q, int64_t q_stride, int64_t rows, void* to) {
    auto* scales = static_cast<float*>(to);
    auto* begin = reinterpret_cast<int32_t*>(scales + xq::kAttentionRows);
    auto* out = static_cast<uint8_t*>(to) + xq::kAttentionRows * 8;
    for (int64_t i = 0; i < rows; ++i) {
      const __m512 inverse = row_scale(q + i * q_stride, nullptr, t.size, scales + i);
      __m512i sum = _mm512_setzero_si512();
      for (int64_t d = 0; d < t.size; d += 64, out += 64) {
        const __m512i codes = codes_at(q + i * q_stride, nullptr, d, t.size, inverse);
        sum = V::dot(sum, V::set8(-128), codes);  // 128 times them
        _mm512_storeu_si512(out, codes);
      }
      begin[i] = -_mm512_reduce_add_epi32(sum);
    }
    return {static_cast<const uint8_t*>(to), query_stride(t.size)};
  }

  static void scores(const xq::HeadTask& t, QueryRows<uint8_t> q, int64_t rows, const void* k, int64_t first, int64_t keys,
                     float* out, int64_t stride) {
    const auto* scales = reinterpret_cast<const float*>(q.at);
    const auto* begin = reinterpret_cast<const int32_t*>(scales + xq::kAttentionRows);
    const uint8_t* codes = q.at + xq::kAttentionRows * 8;
    const int64_t depth = quads(t.size);
    const float* key_scales = static_cast<const float*>(k) + xq::round_up(t.size, 64) + first;
    const auto* b = static_cast<const uint8_t*>(k) + key_head(xq::round_up(t.keys, 32), t.size) + first * depth * 4;
    for (int64_t c = 0; c < keys; c += 32, b += depth * 128)
      each_tile<kRows>(rows, [&](int64_t r, auto count) XQ_INLINE {
        score_tile<count()>({depth, codes + r * q.stride, q.stride, b}, begin + r, scales + r, key_scales + c,
                            out + r * stride + c, stride);
      });
  }

  // 2^y of all y, as whole numbers: by a polynomial of what is left of y beside a whole number, and a shift.
  static float shares(const float* scores, int64_t keys, int64_t visible, float factor, float most, Share* to) {
    constexpr float kOne = 1024;  // y in 16 bits, to -32: what is less has no share
    const __m512 times = V::setf(factor * kOne), less = V::setf(most);
    const auto power = [&](__m512 x) XQ_INLINE { return _mm512_cvtps_epi32(V::mul(V::sub(x, less), times)); };
    const __m512i c0 = V::set16(65423), c1 = V::set16(43647), c2 = V::set16(11049);
    __m512i sum = _mm512_setzero_si512();
    const auto pair = [&](int64_t k, __m512 a, __m512 b) XQ_INLINE {
      const __m512i y = _mm512_sub_epi16(_mm512_setzero_si512(), _mm512_packs_epi32(power(a), power(b)));
      const __m512i rest = _mm512_slli_epi16(y, 6);  // of 65536
      const __m512i line = _mm512_sub_epi16(c1, _mm512_mulhi_epu16(rest, c2));
      const __m512i p = _mm512_sub_epi16(c0, _mm512_mulhi_epu16(rest, line));
      const __m512i down = _mm512_add_epi16(_mm512_srli_epi16(y, 10), V::set16(3));
      const __m512i share = _mm512_avg_epu16(_mm512_srlv_epi16(p, down), _mm512_setzero_si512());
      sum = V::dot16(sum, share, V::set16(1));
      _mm512_storeu_si512(to + k, share);
    };
    int64_t k = 0;
    for (; k + 32 <= visible; k += 32) pair(k, V::loadf(scores + k), V::loadf(scores + k + 16));
    if (k < visible) {
      pair(k, seen_scores<V>(scores + k, visible - k), seen_scores<V>(scores + k + 16, visible - k - 16));
      k += 32;
    }
    for (; k < keys; k += 32) _mm512_storeu_si512(to + k, _mm512_setzero_si512());
    return static_cast<float>(_mm512_reduce_add_epi32(sum));
  }

  static void values(const xq::HeadTask& t, const Share* shares, int64_t stride, int64_t rows, const void* v, int64_t first,
                     int64_t keys, float* out, const float* before) {
    const int64_t width = padded(t.size), pairs = xq::ceil_div(keys, 32) * 16;
    const auto* b = static_cast<const uint8_t*>(v) + width * 4 + first * 64;
    const auto* a = reinterpret_cast<const uint8_t*>(shares);
    for (int64_t d = 0; d < width; d += 32, b += xq::round_up(t.keys, 32) * 64)
      each_tile<kRows>(rows, [&](int64_t r, auto count) XQ_INLINE {
        value_tile<count()>({pairs, a + r * stride * 2, stride * 2, b}, out + r * width + d, width, before ? before + r : nullptr);
      });
  }

 private:
  static constexpr int kRows = 8;  // which hide the latency of sums, and leave registers for operands

  static __m512i amount(__m512 x) { return _mm512_and_si512(_mm512_castps_si512(x), V::set32(0x7fffffff)); }
  // 16 floats of a row, less those of the mean if there is one; nothing where there is no row.
  static __m512 less_mean(const float* row, const float* mean, int64_t d, int64_t size) {
    if (!row || d >= size) return V::setf(0);
    const __m512 x = V::load_floats(row + d, size - d);
    return mean ? V::sub(x, V::loadf(mean + d)) : x;
  }
  // A row's scale goes to `to`; returns what codes are multiples by.
  static __m512 row_scale(const float* row, const float* mean, int64_t size, float* to) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t d = 0; d < size; d += 16) most = _mm512_max_epu32(most, amount(less_mean(row, mean, d, size)));
    const uint32_t bits = _mm512_reduce_max_epu32(most);
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    if (largest < 0x1p-100f) largest = 0x1p-100f;
    *to = largest / 127;
    return V::setf(127 / largest);
  }
  // Codes of 64 floats of a row.
  static __m512i codes_at(const float* row, const float* mean, int64_t d, int64_t size, __m512 inverse) {
    const auto quarter = [&](int64_t at) XQ_INLINE {
      return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(V::mul(less_mean(row, mean, d + at, size), inverse)));
    };
    const __m512i codes = _mm512_inserti32x4(_mm512_castsi128_si512(quarter(0)), quarter(16), 1);
    return _mm512_inserti32x4(_mm512_inserti32x4(codes, quarter(32), 2), quarter(48), 3);
  }
  // Operands of a tile: steps of 4 bytes of each of A's rows, and of two vectors of B.
  struct Operands {
    int64_t steps;
    const uint8_t* a;
    int64_t lda;
    const uint8_t* b;
  };
  // Sums of products of rows of A with 32 columns of B, of quads of bytes or of PAIRS of 16 bits, given to `put` one by one.
  template <int ROWS, bool PAIRS, class Begin, class Put>
  XQ_INLINE static void multiply(const Operands& given, const Begin& begin, const Put& put) {
    using I = typename V::I;
    const uint8_t* b = given.b;
    const int64_t lda = given.lda;
    // Three rows an address register.
    const uint8_t* at[(ROWS + 2) / 3];
    unroll<(ROWS + 2) / 3>([&](int g) XQ_INLINE { at[g] = given.a + 3 * g * lda; });
    I acc[2 * ROWS];
    unroll<2 * ROWS>([&](int i) XQ_INLINE { acc[i] = begin(i / 2); });
    const auto step = [&](int64_t i) XQ_INLINE {
      I columns[2];
      unroll<2>([&](int v) XQ_INLINE { columns[v] = V::load(b + v * 64); });
      b += 128;
      unroll<ROWS>([&](int r) XQ_INLINE {
        const I x = V::quad(at[r / 3] + r % 3 * lda + i * 4);
        // As asm, without copies of the sums that GCC 12 makes of the intrinsics.
        unroll<2>([&](int v) XQ_INLINE {
          if constexpr (PAIRS) __asm__("vpdpwssd %2, %1, %0" : "+v"(acc[2 * r + v]) : "v"(columns[v]), "v"(x));
          else __asm__("vpdpbusd %2, %1, %0" : "+v"(acc[2 * r + v]) : "v"(columns[v]), "v"(x));
        });
      });
    };
    int64_t i = 0;
    do step(i);
    while (++i < given.steps);
    unroll<2 * ROWS>([&](int n) XQ_INLINE { put(n / 2, n % 2 * 16, V::to_float(acc[n])); });
  }
  // Tiles are functions of their own, as registers are assigned by function.
  template <int ROWS>
  [[gnu::noinline]] static void score_tile(const Operands& operands, const int32_t* begin, const float* scales,
                                           const float* key_scales, float* out, int64_t stride) {
    multiply<ROWS, false>(operands, [&](int r) XQ_INLINE { return V::set32(begin[r]); }, [&](int r, int c, auto sum) XQ_INLINE {
      const auto scale = V::mul(V::setf(scales[r]), V::loadf(key_scales + c));
      V::store_floats(out + r * stride + c, V::mul(sum, scale), 16);
    });
  }
  template <int ROWS>
  [[gnu::noinline]] static void value_tile(const Operands& operands, float* out, int64_t width, const float* before) {
    multiply<ROWS, true>(operands, [&](int) XQ_INLINE { return V::set32(0); }, [&](int r, int c, auto sum) XQ_INLINE {
      float* to = out + r * width + c;
      V::store_floats(to, before ? V::fma(V::loadf(to), V::setf(before[r]), sum) : sum, 16);
    });
  }
};

// False where the heads are not such that codes serve.
template <class V>
bool attention_by_codes(const xq::HeadTask& given, void* scratch) {
  xq::HeadTask t = given;
  // Keys behind the last that is seen count in nothing: heads are what they are without the padding.
  if (t.mask && t.mask_head == 0 && first_keys(t, 0) >= 0) t.keys = first_keys(t, 0), t.mask = nullptr;
  if (!CodeProducts<V>::takes(t)) return false;
  attention<V, CodeProducts<V>>(t, scratch);
  return true;
}

template <class V>
constexpr xq::CodeAttention kCodeAttention = {attention_by_codes<V>, attention_scratch<CodeProducts<V>>, CodeProducts<V>::kFewestKeys};

}  // namespace

// Dot products of all pairs of a sample's vectors, and of each with itself.
#pragma once

#include "float_loops.h"
#include "unroll.h"

namespace {

// Partial sums of one product: lane i of these 8 is that of columns i and 8 + i of each 16, added.
struct Partial {
#if defined(XQ_FLOATS_AVX512)
  static constexpr int kAtOnce = 8;
  template <int COUNT>
  XQ_INLINE static void of(const float* const* a, const float* const* b, int64_t dim, __m256* out) {
    __m512 acc[COUNT];
    unroll<COUNT>([&](int i) XQ_INLINE { acc[i] = _mm512_setzero_ps(); });
    int64_t k = 0;
    for (; k + 16 <= dim; k += 16)
      unroll<COUNT>([&](int i) XQ_INLINE {
        acc[i] = _mm512_fmadd_ps(_mm512_loadu_ps(a[i] + k), _mm512_loadu_ps(b[i] + k), acc[i]);
      });
    if (k < dim)
      unroll<COUNT>([&](int i) XQ_INLINE {
        acc[i] = _mm512_fmadd_ps(Lanes::load_floats(a[i] + k, dim - k), Lanes::load_floats(b[i] + k, dim - k), acc[i]);
      });
    unroll<COUNT>([&](int i) XQ_INLINE {
      out[i] = _mm256_add_ps(_mm512_castps512_ps256(acc[i]), _mm512_extractf32x8_ps(acc[i], 1));
    });
  }
#else
  static constexpr int kAtOnce = 4;
  template <int COUNT>
  XQ_INLINE static void of(const float* const* a, const float* const* b, int64_t dim, __m256* out) {
    __m256 low[COUNT], high[COUNT];
    unroll<COUNT>([&](int i) XQ_INLINE { low[i] = high[i] = _mm256_setzero_ps(); });
    int64_t k = 0;
    for (; k + 16 <= dim; k += 16)
      unroll<COUNT>([&](int i) XQ_INLINE {
        low[i] = _mm256_fmadd_ps(_mm256_loadu_ps(a[i] + k), _mm256_loadu_ps(b[i] + k), low[i]);
        high[i] = _mm256_fmadd_ps(_mm256_loadu_ps(a[i] + k + 8), _mm256_loadu_ps(b[i] + k + 8), high[i]);
      });
    for (int half = 0; k < dim; k += 8, ++half) {
      const int64_t left = xq::min64(dim - k, 8);
      __m256* to = half ? high : low;
      unroll<COUNT>([&](int i) XQ_INLINE {
        to[i] = _mm256_fmadd_ps(Lanes::load_floats(a[i] + k, left), Lanes::load_floats(b[i] + k, left), to[i]);
      });
    }
    unroll<COUNT>([&](int i) XQ_INLINE { out[i] = _mm256_add_ps(low[i], high[i]); });
  }
#endif
};

// The sums of 8 vectors, each ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
XQ_INLINE inline __m256 sums_of(const __m256 (&v)[8]) {
  const auto quarters = [](__m256 a, __m256 b) XQ_INLINE {
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  };
  const auto pairs = [](__m256 a, __m256 b) XQ_INLINE {
    const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_shuffle_pd(x, y, 0)), _mm256_castpd_ps(_mm256_shuffle_pd(x, y, 15)));
  };
  const __m256 a = pairs(quarters(v[0], v[1]), quarters(v[2], v[3])), b = pairs(quarters(v[4], v[5]), quarters(v[6], v[7]));
  const __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
  return _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

void interact(const xq_interaction& op, int64_t begin, int64_t end) {
  const int64_t dim = op.dim, pairs = int64_t{op.vectors} * (op.vectors + 1) / 2;
  const int64_t products = xq::interaction_products(op);
  for (int64_t n = begin; n < end; ++n) {
    const float *first = op.first + n * op.first_stride, *in = op.in + n * op.in_stride;
    float* out = op.out + n * op.out_stride;
    memcpy(out, first, static_cast<size_t>(dim) * sizeof(float));
    out += dim;
    // 8 products at a time, whatever rows they are of; those behind the last one are it once more.
    const auto vector = [&](int64_t row) XQ_INLINE { return row < 0 ? first : in + row * dim; };
    int64_t row = pairs > 0 ? 0 : -1, other = -1;  // -1 is `first`
    for (int64_t at = 0; at < products; at += 8) {
      const float *a[8], *b[8];
      for (int i = 0; i < 8; ++i) {
        a[i] = vector(row), b[i] = vector(other);
        const int64_t next = at + i + 1;
        if (next >= products) continue;
        if (next == pairs) row = other = -1;
        else if (next > pairs) other = ++row;
        else if (++other == row) ++row, other = -1;
      }
      __m256 parts[8];
      for (int i = 0; i < 8; i += Partial::kAtOnce) Partial::of<Partial::kAtOnce>(a + i, b + i, dim, parts + i);
      const __m256 sums = sums_of(parts);
      if (at + 8 <= products) {
        _mm256_storeu_ps(out + at, sums);
      } else {
        float last[8];
        _mm256_storeu_ps(last, sums);
        memcpy(out + at, last, static_cast<size_t>(products - at) * sizeof(float));
      }
    }
  }
}

}  // namespace

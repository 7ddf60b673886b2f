// Dot products of all pairs of a sample's vectors.
#pragma once

#include "float_lanes.h"
#include "float_loops.h"
#include "unroll.h"

namespace {

// Partial sums of one product: lane i of these 8 is that of columns i and 8 + i of each 16, added.
struct Partial {
#if defined(XQ_FLOATS_AVX512)
  static constexpr int kAtOnce = 8;
  template <int COUNT>
  XQ_INLINE static void of(const float* a, const float* const* b, int64_t dim, __m256* out) {
    __m512 acc[COUNT];
    unroll<COUNT>([&](int i) XQ_INLINE { acc[i] = _mm512_setzero_ps(); });
    int64_t k = 0;
    for (; k + 16 <= dim; k += 16) {
      const __m512 v = _mm512_loadu_ps(a + k);
      unroll<COUNT>([&](int i) XQ_INLINE { acc[i] = _mm512_fmadd_ps(v, _mm512_loadu_ps(b[i] + k), acc[i]); });
    }
    if (k < dim) {
      const __m512 v = Lanes::load_some(a + k, dim - k);
      unroll<COUNT>([&](int i) XQ_INLINE { acc[i] = _mm512_fmadd_ps(v, Lanes::load_some(b[i] + k, dim - k), acc[i]); });
    }
    unroll<COUNT>([&](int i) XQ_INLINE {
      out[i] = _mm256_add_ps(_mm512_castps512_ps256(acc[i]), _mm512_extractf32x8_ps(acc[i], 1));
    });
  }
#else
  static constexpr int kAtOnce = 4;
  template <int COUNT>
  XQ_INLINE static void of(const float* a, const float* const* b, int64_t dim, __m256* out) {
    __m256 low[COUNT], high[COUNT];
    unroll<COUNT>([&](int i) XQ_INLINE { low[i] = high[i] = _mm256_setzero_ps(); });
    int64_t k = 0;
    for (; k + 16 <= dim; k += 16) {
      const __m256 v = _mm256_loadu_ps(a + k), w = _mm256_loadu_ps(a + k + 8);
      unroll<COUNT>([&](int i) XQ_INLINE {
        low[i] = _mm256_fmadd_ps(v, _mm256_loadu_ps(b[i] + k), low[i]);
        high[i] = _mm256_fmadd_ps(w, _mm256_loadu_ps(b[i] + k + 8), high[i]);
      });
    }
    for (int half = 0; k < dim; k += 8, ++half) {
      const int64_t left = xq::min64(dim - k, 8);
      const __m256 v = Lanes::load_some(a + k, left);
      __m256* to = half ? high : low;
      unroll<COUNT>([&](int i) XQ_INLINE { to[i] = _mm256_fmadd_ps(v, Lanes::load_some(b[i] + k, left), to[i]); });
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

// The products of `a` with `count` vectors, at most 8.
XQ_INLINE inline void dots(const float* a, const float* const* b, int64_t count, int64_t dim, float* out) {
  __m256 parts[8];
  if (count == 8) {
    for (int i = 0; i < 8; i += Partial::kAtOnce) Partial::of<Partial::kAtOnce>(a, b + i, dim, parts + i);
    return _mm256_storeu_ps(out, sums_of(parts));
  }
  for (int i = 0; i < 8; ++i) parts[i] = _mm256_setzero_ps();
  int64_t done = 0;
  if (count >= 4) Partial::of<4>(a, b, dim, parts), done = 4;
  for (; done < count; ++done) Partial::of<1>(a, b + done, dim, parts + done);
  float sums[8];
  _mm256_storeu_ps(sums, sums_of(parts));
  memcpy(out, sums, static_cast<size_t>(count) * sizeof(float));
}

void interact(const xq_interaction& op, int64_t begin, int64_t end) {
  const int64_t dim = op.dim;
  for (int64_t n = begin; n < end; ++n) {
    const float *first = op.first + n * op.first_stride, *in = op.in + n * op.in_stride;
    float* out = op.out + n * op.out_stride;
    memcpy(out, first, static_cast<size_t>(dim) * sizeof(float));
    out += dim;
    for (int64_t row = 0; row < op.vectors; ++row) {
      const int64_t before = row + 1;  // `first` is the first of them
      for (int64_t from = 0; from < before; from += 8) {
        const int64_t count = xq::min64(before - from, 8);
        const float* others[8];
        for (int64_t i = 0; i < count; ++i) others[i] = from + i == 0 ? first : in + (from + i - 1) * dim;
        dots(in + row * dim, others, count, dim, out + from);
      }
      out += before;
    }
  }
}

}  // namespace

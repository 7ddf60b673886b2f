// Attention of one query a head to keys that lie row by row, as a decoder's cache has them: each key and each value
// is read once, where it lies.
#pragma once

#include "attention.h"
#include "row_tasks.h"

namespace {

// The dot products of a query and KEYS keys, `stride` floats apart.
template <class V, int KEYS>
XQ_INLINE inline void dot_keys(const float* q, const float* k, int64_t stride, int64_t size, float scale, float* scores) {
  using F = typename V::F;
  F sums[KEYS];
  unroll<KEYS>([&](int i) XQ_INLINE { sums[i] = V::setf(0); });
  int64_t d = 0;
  for (; d + V::kLanes <= size; d += V::kLanes) {
    const F x = V::loadf(q + d);
    unroll<KEYS>([&](int i) XQ_INLINE { sums[i] = V::fma(x, V::loadf(k + i * stride + d), sums[i]); });
  }
  if (d < size) {
    const F x = V::load_floats(q + d, size - d);
    unroll<KEYS>([&](int i) XQ_INLINE { sums[i] = V::fma(x, V::load_floats(k + i * stride + d, size - d), sums[i]); });
  }
  unroll<KEYS>([&](int i) XQ_INLINE { scores[i] = V::total(sums[i]) * scale; });
}

// VECS vectors of the sum of values, each times its share.
template <class V, int VECS>
XQ_INLINE inline void sum_values(const float* v, int64_t stride, const float* shares, int64_t keys, float factor, float* out,
                                 int64_t count) {
  using F = typename V::F;
  F sums[VECS];
  unroll<VECS>([&](int i) XQ_INLINE { sums[i] = V::setf(0); });
  const bool whole = count >= VECS * V::kLanes;
  for (int64_t t = 0; t < keys; ++t, v += stride) {
    const F share = V::setf(shares[t]);
    unroll<VECS>([&](int i) XQ_INLINE {
      const F x = whole ? V::loadf(v + i * V::kLanes) : V::load_floats(v + i * V::kLanes, count - i * V::kLanes);
      sums[i] = V::fma(share, x, sums[i]);
    });
  }
  unroll<VECS>([&](int i) XQ_INLINE {
    V::store_floats(out + i * V::kLanes, V::mul(sums[i], V::setf(factor)), count - i * V::kLanes);
  });
}

// `scores` has room for all keys, in whole pairs of vectors.
template <class V>
void one_query(const xq::OneQueryTask& t, float* scores) {
  for (int64_t head = 0; head < t.heads; ++head) {
    const float* q = t.q + head * t.q_head;
    float* out = t.out + head * t.size;
    int64_t key = 0;
    for (; key + 4 <= t.keys; key += 4) dot_keys<V, 4>(q, t.k + key * t.k_stride, t.k_stride, t.size, t.scale, scores + key);
    for (; key < t.keys; ++key) dot_keys<V, 1>(q, t.k + key * t.k_stride, t.k_stride, t.size, t.scale, scores + key);
    const float most = greatest_score<V>(scores, t.keys);
    const float sum = shares_of<V, false, false>(scores, t.keys, t.keys, kLog2e, most, [&](int64_t k, auto a, auto b) XQ_INLINE {
      V::store_floats(scores + k, a, V::kLanes), V::store_floats(scores + k + V::kLanes, b, V::kLanes);
    });
    constexpr int64_t kStep = 4 * V::kLanes;
    int64_t d = 0;
    for (; d + kStep <= t.size; d += kStep) sum_values<V, 4>(t.v + d, t.v_stride, scores, t.keys, 1 / sum, out + d, kStep);
    for (; d < t.size; d += V::kLanes)
      sum_values<V, 1>(t.v + d, t.v_stride, scores, t.keys, 1 / sum, out + d, xq::min64(V::kLanes, t.size - d));
  }
}

}  // namespace

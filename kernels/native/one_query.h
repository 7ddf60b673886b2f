// Attention of one query a head to keys and values that lie row by row, as a decoder's cache has them, as floats or as codes
// that become floats in registers. Heads of queries that share a head of keys read each key and each value together.
#pragma once

#include <type_traits>

#include "attention.h"
#include "row_tasks.h"

namespace {

template <class V>
XQ_INLINE inline typename V::F floats_of(const float* from, int64_t count) {
  return count >= V::kLanes ? V::loadf(from) : V::load_floats(from, count);
}
// Those beyond `count` are 0.
template <class V>
XQ_INLINE inline typename V::F floats_of(const int8_t* codes, int64_t count) {
  if (count >= V::kLanes) return V::to_float(V::widen_signed(codes));
  int8_t some[16] = {};
  if (count > 0) memcpy(some, codes, static_cast<size_t>(count));
  return V::to_float(V::widen_signed(some));
}

// The totals of four vectors, each summed in the same order whatever the others are.
template <class V>
XQ_INLINE inline __m128 totals_of_four(const typename V::F (&v)[4]) {
  if constexpr (V::kLanes == 16) {
    const auto pairs = [](__m512 a, __m512 b) XQ_INLINE { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
    const __m512 a = pairs(v[0], v[1]), b = pairs(v[2], v[3]);
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  } else {
    const auto pairs = [](__m256 a, __m256 b) XQ_INLINE { return _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)); };
    const __m256 a = pairs(v[0], v[1]), b = pairs(v[2], v[3]);
    const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  }
}

// The scores of HEADS queries, `q_head` floats apart, and KEYS keys, four at most, from number `key` on; scores of a query
// are `room` floats from those of the next.
template <class V, int HEADS, int KEYS, class T>
XQ_INLINE inline void score_keys(const xq::QueryTask<T>& t, const float* q, int64_t key, float* scores, int64_t room) {
  using F = typename V::F;
  const T* k = t.k + key * t.k_stride;
  F sums[HEADS][4];
  unroll<HEADS * 4>([&](int i) XQ_INLINE { sums[i / 4][i % 4] = V::setf(0); });
  const auto add = [&](int64_t d, int64_t count) XQ_INLINE {
    F x[HEADS];
    unroll<HEADS>([&](int h) XQ_INLINE { x[h] = floats_of<V>(q + h * t.q_head + d, count); });
    unroll<KEYS>([&](int i) XQ_INLINE {
      const F some = floats_of<V>(k + i * t.k_stride + d, count);
      unroll<HEADS>([&](int h) XQ_INLINE { sums[h][i] = V::fma(x[h], some, sums[h][i]); });
    });
  };
  int64_t d = 0;
  for (; d + V::kLanes <= t.size; d += V::kLanes) add(d, V::kLanes);
  if (d < t.size) add(d, t.size - d);
  unroll<HEADS>([&](int h) XQ_INLINE {
    alignas(16) float totals[4];
    _mm_store_ps(totals, totals_of_four<V>(sums[h]));
    unroll<KEYS>([&](int i) XQ_INLINE {
      float scale = t.scale;
      if constexpr (!std::is_same_v<T, float>) scale *= t.k_scale[key + i];
      scores[h * room + key + i] = totals[i] * scale;
    });
  });
}

// VECS vectors of the sums of values from feature `d` on, each times its shares.
template <class V, int HEADS, int VECS, class T>
XQ_INLINE inline void sum_values(const xq::QueryTask<T>& t, int64_t d, const float* shares, int64_t room, const float* factors,
                                 float* out) {
  using F = typename V::F;
  F sums[HEADS * VECS];
  unroll<HEADS * VECS>([&](int i) XQ_INLINE { sums[i] = V::setf(0); });
  const int64_t count = t.size - d;
  const bool whole = count >= VECS * V::kLanes;
  const T* v = t.v + d;
  for (int64_t key = 0; key < t.keys; ++key, v += t.v_stride) {
    F x[VECS];
    unroll<VECS>([&](int i) XQ_INLINE { x[i] = floats_of<V>(v + i * V::kLanes, whole ? V::kLanes : count - i * V::kLanes); });
    unroll<HEADS>([&](int h) XQ_INLINE {
      const F share = V::setf(shares[h * room + key]);
      unroll<VECS>([&](int i) XQ_INLINE { sums[h * VECS + i] = V::fma(share, x[i], sums[h * VECS + i]); });
    });
  }
  unroll<HEADS * VECS>([&](int i) XQ_INLINE {
    const int64_t at = i % VECS * V::kLanes;
    V::store_floats(out + i / VECS * t.size + d + at, V::mul(sums[i], V::setf(factors[i / VECS])), count - at);
  });
}

template <class V, int HEADS, class T>
void query_heads(const xq::QueryTask<T>& t, int64_t head, float* scores) {
  const int64_t room = xq::round_up(t.keys, 2 * V::kLanes);
  const float* q = t.q + head * t.q_head;
  float* out = t.out + head * t.size;
  int64_t key = 0;
  for (; key + 4 <= t.keys; key += 4) score_keys<V, HEADS, 4>(t, q, key, scores, room);
  for (; key < t.keys; ++key) score_keys<V, HEADS, 1>(t, q, key, scores, room);
  float factors[HEADS];
  for (int h = 0; h < HEADS; ++h) {
    float* shares = scores + h * room;
    const float most = greatest_score<V>(shares, t.keys);
    const auto put = [&](int64_t k, auto a, auto b) XQ_INLINE {
      if constexpr (!std::is_same_v<T, float>) {  // times the scales of the values that they multiply
        const int64_t left = t.keys - k - V::kLanes;
        a = V::mul(a, V::load_floats(t.v_scale + k, t.keys - k));
        b = left > 0 ? V::mul(b, V::load_floats(t.v_scale + k + V::kLanes, left)) : V::setf(0);
      }
      V::store_floats(shares + k, a, V::kLanes), V::store_floats(shares + k + V::kLanes, b, V::kLanes);
    };
    factors[h] = 1 / shares_of<V, false>(shares, t.keys, t.keys, kLog2e, most, put);
  }
  constexpr int64_t kStep = 4 * V::kLanes;
  int64_t d = 0;
  for (; d + kStep <= t.size; d += kStep) sum_values<V, HEADS, 4>(t, d, scores, room, factors, out);
  for (; d < t.size; d += V::kLanes) sum_values<V, HEADS, 1>(t, d, scores, room, factors, out);
}

// `scores` has room for those of kHeadsTogether heads to all keys, in whole pairs of vectors.
template <class V, class T>
void one_query(const xq::QueryTask<T>& t, float* scores) {
  constexpr int64_t kMost = V::kLanes == 16 ? xq::kHeadsTogether : 2;  // of four keys: sums that fit the registers
  for (int64_t head = 0; head < t.heads;) {
    const int64_t some = xq::min64(t.heads - head, kMost);
    if (some == 1) query_heads<V, 1>(t, head, scores);
    if (some == 2) query_heads<V, 2>(t, head, scores);
    if constexpr (kMost > 2) {
      if (some == 3) query_heads<V, 3>(t, head, scores);
      if (some == 4) query_heads<V, 4>(t, head, scores);
    }
    head += some;
  }
}

}  // namespace

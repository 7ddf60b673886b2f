// Keys and values of a decoder's cache as int8 codes with a scale for each token and head: making them, and attention of
// one query a head to them. Codes become floats in registers; heads of queries that share them read them together.
#pragma once

#include "attention.h"
#include "row_tasks.h"

namespace {

template <class V>
void make_codes(const float* x, int64_t size, int8_t* codes, float* scale) {
  using F = typename V::F;
  using I = typename V::I;
  const F zero = V::setf(0);
  F most = zero, odd = zero;
  for (int64_t d = 0; d < size; d += V::kLanes) {
    const F v = V::load_floats(x + d, size - d);
    most = V::max(most, V::max(v, V::sub(zero, v)));
    odd = V::fma(v, zero, odd);  // no number once a feature is not finite
  }
  const bool finite = !V::any_nan(odd);
  const float least = 0x1p-119f, found = V::greatest(most), whole = found > least ? found : least;
  *scale = finite ? whole / 127.0f : __builtin_nanf("");
  const F inverse = V::setf(finite ? 127.0f / whole : 0.0f);
  const I middle = V::set16(128), sign = V::set32(static_cast<int32_t>(0x80808080));
  for (int64_t d = 0; d < size; d += 4 * V::kLanes) {
    I v[4];
    unroll<4>([&](int i) XQ_INLINE {
      const int64_t left = size - d - i * V::kLanes;
      v[i] = finite && left > 0 ? V::to_int(V::mul(V::load_floats(x + d + i * V::kLanes, left), inverse)) : V::set32(0);
    });
    const I signed_codes = V::exclusive_or(V::narrow_in_order(v, middle), sign);
    auto* to = reinterpret_cast<uint8_t*>(codes + d);
    if (size - d >= 4 * V::kLanes) V::store(to, signed_codes);
    else V::template store_pixels<4>(to, 0, signed_codes, 1, static_cast<int>(size - d));
  }
}

// Codes as floats; those beyond `count` are 0.
template <class V>
XQ_INLINE inline typename V::F code_floats(const int8_t* codes, int64_t count) {
  if (count >= V::kLanes) return V::to_float(V::widen_signed(codes));
  int8_t some[16] = {};
  if (count > 0) memcpy(some, codes, static_cast<size_t>(count));
  return V::to_float(V::widen_signed(some));
}

template <class V>
void codes_to_floats(const xq::CodeRowsTask& t) {
  for (int64_t row = 0; row < t.rows; ++row) {
    const int8_t* codes = t.codes + row * t.stride;
    float* out = t.out + row * t.size;
    const auto scale = V::setf(t.scale[row]);
    for (int64_t d = 0; d < t.size; d += V::kLanes)
      V::store_floats(out + d, V::mul(code_floats<V>(codes + d, t.size - d), scale), t.size - d);
  }
}

// The dot products of HEADS queries, `q_head` floats apart, and KEYS keys, `stride` codes apart; scores of a query are
// `room` floats from those of the next.
template <class V, int HEADS, int KEYS>
XQ_INLINE inline void dot_codes(const float* q, int64_t q_head, const int8_t* k, int64_t stride, const float* k_scale,
                                int64_t size, float scale, float* scores, int64_t room) {
  using F = typename V::F;
  F sums[HEADS * KEYS];
  unroll<HEADS * KEYS>([&](int i) XQ_INLINE { sums[i] = V::setf(0); });
  const auto add = [&](int64_t d, int64_t count) XQ_INLINE {
    F x[HEADS];
    unroll<HEADS>([&](int h) XQ_INLINE { x[h] = V::load_floats(q + h * q_head + d, count); });
    unroll<KEYS>([&](int i) XQ_INLINE {
      const F key = code_floats<V>(k + i * stride + d, count);
      unroll<HEADS>([&](int h) XQ_INLINE { sums[h * KEYS + i] = V::fma(x[h], key, sums[h * KEYS + i]); });
    });
  };
  int64_t d = 0;
  for (; d + V::kLanes <= size; d += V::kLanes) add(d, V::kLanes);
  if (d < size) add(d, size - d);
  unroll<HEADS * KEYS>([&](int i) XQ_INLINE {
    scores[i / KEYS * room + i % KEYS] = V::total(sums[i]) * (k_scale[i % KEYS] * scale);
  });
}

// VECS vectors of the sums of values, `stride` codes apart, each times its shares.
template <class V, int HEADS, int VECS>
XQ_INLINE inline void sum_codes(const int8_t* v, int64_t stride, const float* shares, int64_t room, int64_t keys,
                                const float* factors, float* out, int64_t out_head, int64_t count) {
  using F = typename V::F;
  F sums[HEADS * VECS];
  unroll<HEADS * VECS>([&](int i) XQ_INLINE { sums[i] = V::setf(0); });
  const bool whole = count >= VECS * V::kLanes;
  for (int64_t t = 0; t < keys; ++t, v += stride) {
    F x[VECS];
    unroll<VECS>([&](int i) XQ_INLINE {
      x[i] = code_floats<V>(v + i * V::kLanes, whole ? V::kLanes : count - i * V::kLanes);
    });
    unroll<HEADS>([&](int h) XQ_INLINE {
      const F share = V::setf(shares[h * room + t]);
      unroll<VECS>([&](int i) XQ_INLINE { sums[h * VECS + i] = V::fma(share, x[i], sums[h * VECS + i]); });
    });
  }
  unroll<HEADS * VECS>([&](int i) XQ_INLINE {
    const int64_t at = i % VECS * V::kLanes;
    V::store_floats(out + i / VECS * out_head + at, V::mul(sums[i], V::setf(factors[i / VECS])), count - at);
  });
}

template <class V, int HEADS>
void query_heads(const xq::CodeQueryTask& t, int64_t head, float* scores) {
  constexpr int kKeys = HEADS <= 2 ? 4 : 2, kVecs = HEADS == 1 ? 4 : 2;  // sums that fit the registers
  const int64_t room = xq::round_up(t.keys, 2 * V::kLanes);
  const float* q = t.q + head * t.q_head;
  float* out = t.out + head * t.size;
  const auto dots = [&](auto count, int64_t key) XQ_INLINE {
    dot_codes<V, HEADS, count()>(q, t.q_head, t.k + key * t.k_stride, t.k_stride, t.k_scale + key, t.size, t.scale,
                                 scores + key, room);
  };
  int64_t key = 0;
  for (; key + kKeys <= t.keys; key += kKeys) dots(Count<kKeys>(), key);
  for (; key < t.keys; ++key) dots(Count<1>(), key);
  float factors[HEADS];
  for (int h = 0; h < HEADS; ++h) {
    float* shares = scores + h * room;
    const float most = greatest_score<V>(shares, t.keys);
    const auto put = [&](int64_t k, auto a, auto b) XQ_INLINE {  // times the scales of the values that they multiply
      V::store_floats(shares + k, V::mul(a, V::load_floats(t.v_scale + k, t.keys - k)), V::kLanes);
      const int64_t second = k + V::kLanes, left = t.keys - second;
      V::store_floats(shares + second, left > 0 ? V::mul(b, V::load_floats(t.v_scale + second, left)) : V::setf(0), V::kLanes);
    };
    factors[h] = 1 / shares_of<V, false, false>(shares, t.keys, t.keys, kLog2e, most, put);
  }
  constexpr int64_t kStep = kVecs * V::kLanes;
  int64_t d = 0;
  for (; d + kStep <= t.size; d += kStep)
    sum_codes<V, HEADS, kVecs>(t.v + d, t.v_stride, scores, room, t.keys, factors, out + d, t.size, kStep);
  for (; d < t.size; d += V::kLanes)
    sum_codes<V, HEADS, 1>(t.v + d, t.v_stride, scores, room, t.keys, factors, out + d, t.size, xq::min64(V::kLanes, t.size - d));
}

// `scores` has room for those of kCodeHeads heads to all keys, in whole pairs of vectors.
template <class V>
void code_query(const xq::CodeQueryTask& t, float* scores) {
  int64_t head = 0;
  for (; head + 4 <= t.heads; head += 4) query_heads<V, 4>(t, head, scores);
  if (t.heads - head == 3) return query_heads<V, 3>(t, head, scores);
  if (t.heads - head == 2) return query_heads<V, 2>(t, head, scores);
  if (t.heads - head == 1) query_heads<V, 1>(t, head, scores);
}

template <class V>
constexpr xq::CodeKernels kCodes = {make_codes<V>, codes_to_floats<V>, code_query<V>};

}  // namespace

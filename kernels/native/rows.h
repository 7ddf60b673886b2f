// Rows of floats, each quantized by its own range.
#pragma once

#include "row_tasks.h"
#include "unroll.h"

namespace {

// The least and the greatest of a row and 0, and whether all of it is finite. Two of each: chains that run side by side.
template <class V>
struct RangeSeen {
  using F = typename V::F;
  F lows[2] = {V::setf(0), V::setf(0)}, highs[2] = {lows[0], lows[0]}, odd[2] = {lows[0], lows[0]};

  XQ_INLINE inline void take(int i, F x) {
    lows[i] = V::min(lows[i], x), highs[i] = V::max(highs[i], x);
    odd[i] = V::fma(x, V::setf(0), odd[i]);  // times zero, only NaN and infinity are not zero
  }
  XQ_INLINE inline xq::RowRange range(float* low) const {
    *low = V::least(V::min(lows[0], lows[1]));
    const float high = V::greatest(V::max(highs[0], highs[1]));
    return xq::range_of(*low, high, !V::any_nan(V::fma(odd[0], V::setf(1), odd[1])));
  }
};

template <class V>
XQ_INLINE inline RangeSeen<V> range_seen(const uint8_t* row, int64_t features) {
  constexpr int64_t kBytes = V::kLanes * 4;
  RangeSeen<V> seen;
  int64_t left = features;
  for (; left >= 2 * V::kLanes; left -= 2 * V::kLanes, row += 2 * kBytes)
    seen.take(0, V::load_floats(row, V::kLanes)), seen.take(1, V::load_floats(row + kBytes, V::kLanes));
  for (; left > 0; left -= V::kLanes, row += kBytes) seen.take(0, V::load_floats(row, left));
  return seen;
}

template <class V>
XQ_INLINE inline void quantize_row(const uint8_t* row, int64_t features, const RangeSeen<V>& seen, uint8_t* codes, float* scale,
                                   int32_t* zero_point) {
  using I = typename V::I;
  constexpr int64_t kBytes = V::kLanes * 4;
  float low = 0;
  const xq::RowRange range = seen.range(&low);
  const auto inverse = V::setf(range.inverse);
  const auto zp = static_cast<int32_t>(__builtin_lrintf(range.inverse == 0 ? 0.0f : -low * range.inverse));
  *scale = range.scale, *zero_point = zp;
  const I zp16 = V::set16(zp);
  int64_t left = features;
  for (; left >= kBytes; left -= kBytes, row += 4 * kBytes, codes += kBytes) {
    I v[4];
    for (int k = 0; k < 4; ++k) v[k] = V::to_int(V::mul(V::load_floats(row + k * kBytes, V::kLanes), inverse));
    V::store(codes, V::narrow_in_order(v, zp16));
  }
  if (left == 0) return;
  I v[4];
  for (int k = 0; k < 4; ++k) {
    const int64_t here = left - k * V::kLanes;
    v[k] = here > 0 ? V::to_int(V::mul(V::load_floats(row + k * kBytes, here), inverse)) : V::set32(0);
  }
  V::template store_pixels<4>(codes, 0, V::narrow_in_order(v, zp16), 1, static_cast<int>(left));
}

template <class V>
void quantize_rows(const xq::RowsTask& t) {
  for (int64_t m = 0; m < t.rows; ++m) {
    const uint8_t* row = t.in + m * t.in_stride;
    quantize_row<V>(row, t.features, range_seen<V>(row, t.features), t.codes + m * t.lda, t.scale + m, t.zp + m);
  }
}

// Sums of four vectors at a time: one after another they would wait for each other.
template <class V, class Term>
XQ_INLINE inline float sum_of_row(int64_t features, Term term) {
  using F = typename V::F;
  F sums[4];
  unroll<4>([&](int i) XQ_INLINE { sums[i] = V::setf(0); });
  int64_t k = 0;
  for (; k + 4 * V::kLanes <= features; k += 4 * V::kLanes)
    unroll<4>([&](int i) XQ_INLINE { sums[i] = V::add(sums[i], term(k + i * V::kLanes, V::kLanes)); });
  for (; k < features; k += V::kLanes) sums[0] = V::add(sums[0], term(k, features - k));
  return V::total(V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3])));
}

// value [* up] [+ residual] -> total, as FinishTask says; returns its sum.
template <class V>
XQ_INLINE inline float total_row(const xq::FinishTask& t, const float* x, const float* up, const float* residual, float* total) {
  return sum_of_row<V>(t.features, [&](int64_t k, int64_t count) XQ_INLINE {
    auto v = V::load_floats(x + k, count);
    if (up) v = V::mul(v, V::load_floats(up + k, count));
    if (residual) v = V::add(v, V::load_floats(residual + k, count));
    V::store_floats(total + k, v, count);
    return v;
  });
}

// total, of which the sum is known -> normed, as FinishTask says.
template <class V>
XQ_INLINE inline RangeSeen<V> norm_row(const xq::FinishTask& t, const float* x, float sum, float* out) {
  using F = typename V::F;
  const auto n = static_cast<float>(t.features);
  const auto at = [&](int64_t k, int64_t count) XQ_INLINE { return V::load_floats(x + k, count); };
  const F center = V::setf(t.norm == XQ_NORM_LAYER ? sum / n : 0.0f);
  const float squares = sum_of_row<V>(t.features, [&](int64_t k, int64_t count) XQ_INLINE {
    // What lies beyond the row is 0, and must not become -mean.
    const F d = count >= V::kLanes ? V::sub(at(k, count), center) : V::sub(at(k, count), V::first_floats(center, count));
    return V::mul(d, d);
  });
  const F rstd = V::setf(1.0f / __builtin_sqrtf(squares / n + t.eps)), one = V::setf(1), none = V::setf(0);
  RangeSeen<V> seen;
  const auto step = [&](int i, int64_t k, int64_t count) XQ_INLINE {
    const F w = t.norm_weight ? V::load_floats(t.norm_weight + k, count) : one;
    const F b = t.norm_bias ? V::load_floats(t.norm_bias + k, count) : none;
    const F d = count >= V::kLanes ? V::sub(at(k, count), center) : V::sub(at(k, count), V::first_floats(center, count));
    const F normed = V::fma(V::mul(d, rstd), w, b);
    V::store_floats(out + k, normed, count);
    seen.take(i, normed);
  };
  int64_t k = 0;
  for (; k + 2 * V::kLanes <= t.features; k += 2 * V::kLanes) step(0, k, V::kLanes), step(1, k + V::kLanes, V::kLanes);
  for (; k + V::kLanes <= t.features; k += V::kLanes) step(0, k, V::kLanes);
  if (k < t.features) step(0, k, t.features - k);
  return seen;
}

template <class V>
void finish_rows(const xq::FinishTask& t) {
  for (int64_t m = 0; m < t.rows; ++m) {
    const float* x = t.value + m * t.value_stride;
    const float* up = t.up ? t.up + m * t.up_stride : nullptr;
    const float* residual = t.residual ? t.residual + m * t.features : nullptr;
    float sum = 0;
    if (up || residual) {
      float* total = t.total + m * t.total_stride;
      sum = total_row<V>(t, x, up, residual, total);
      x = total;
    } else if (t.norm == XQ_NORM_LAYER) {
      sum = sum_of_row<V>(t.features, [&](int64_t k, int64_t count) XQ_INLINE { return V::load_floats(x + k, count); });
    }
    const auto write_codes = [&](const RangeSeen<V>& seen) XQ_INLINE {
      if (t.codes)
        quantize_row<V>(reinterpret_cast<const uint8_t*>(x), t.features, seen, t.codes + m * t.features, t.scale + m, t.zp + m);
    };
    if (t.norm == XQ_NORM_NONE) {
      if (t.codes) write_codes(range_seen<V>(reinterpret_cast<const uint8_t*>(x), t.features));
      continue;
    }
    float* normed = t.normed + m * t.normed_stride;
    const RangeSeen<V> seen = norm_row<V>(t, x, sum, normed);
    x = normed;
    write_codes(seen);
  }
}

}  // namespace

// Rows of floats, each quantized by its own range.
#pragma once

#include "row_tasks.h"
#include "unroll.h"

namespace {

template <class V>
xq::RowRange row_range(const uint8_t* row, int64_t features, float* low) {
  using F = typename V::F;
  constexpr int64_t kBytes = V::kLanes * 4;
  // Times zero, only NaN and infinity are not zero.
  F lows[2] = {V::setf(0), V::setf(0)}, highs[2] = {lows[0], lows[0]}, odd[2] = {lows[0], lows[0]};
  const F zero = V::setf(0);
  auto take = [&](int i, F x) XQ_INLINE {
    lows[i] = V::min(lows[i], x), highs[i] = V::max(highs[i], x), odd[i] = V::fma(x, zero, odd[i]);
  };
  int64_t left = features;
  for (; left >= 2 * V::kLanes; left -= 2 * V::kLanes, row += 2 * kBytes)
    take(0, V::load_floats(row, V::kLanes)), take(1, V::load_floats(row + kBytes, V::kLanes));
  for (; left > 0; left -= V::kLanes, row += kBytes) take(0, V::load_floats(row, left));
  *low = V::least(V::min(lows[0], lows[1]));
  const float high = V::greatest(V::max(highs[0], highs[1]));
  return xq::range_of(*low, high, !V::any_nan(V::fma(odd[0], V::setf(1), odd[1])));
}

template <class V>
void quantize_rows(const xq::RowsTask& t) {
  using I = typename V::I;
  constexpr int64_t kBytes = V::kLanes * 4;
  for (int64_t m = 0; m < t.rows; ++m) {
    const uint8_t* row = t.in + m * t.in_stride;
    float low = 0;
    const xq::RowRange range = row_range<V>(row, t.features, &low);
    const auto inverse = V::setf(range.inverse);
    const auto zp = static_cast<int32_t>(__builtin_lrintf(range.inverse == 0 ? 0.0f : -low * range.inverse));
    t.scale[m] = range.scale, t.zp[m] = zp;
    const I zp16 = V::set16(zp);
    uint8_t* codes = t.codes + m * t.lda;
    int64_t left = t.features;
    for (; left >= kBytes; left -= kBytes, row += 4 * kBytes, codes += kBytes) {
      I v[4];
      for (int k = 0; k < 4; ++k) v[k] = V::to_int(V::mul(V::load_floats(row + k * kBytes, V::kLanes), inverse));
      V::store(codes, V::narrow_in_order(v, zp16));
    }
    if (left == 0) continue;
    I v[4];
    for (int k = 0; k < 4; ++k) {
      const int64_t here = left - k * V::kLanes;
      v[k] = here > 0 ? V::to_int(V::mul(V::load_floats(row + k * kBytes, here), inverse)) : V::set32(0);
    }
    V::template store_pixels<4>(codes, 0, V::narrow_in_order(v, zp16), 1, static_cast<int>(left));
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

// total -> normed, as FinishTask says.
template <class V>
XQ_INLINE inline void norm_row(const xq::FinishTask& t, const float* x, float* out) {
  using F = typename V::F;
  const auto n = static_cast<float>(t.features);
  const auto at = [&](int64_t k, int64_t count) XQ_INLINE { return V::load_floats(x + k, count); };
  float mean = 0;
  if (t.norm == XQ_NORM_LAYER) mean = sum_of_row<V>(t.features, at) / n;
  const F center = V::setf(mean);
  const float squares = sum_of_row<V>(t.features, [&](int64_t k, int64_t count) XQ_INLINE {
    // What lies beyond the row is 0, and must not become -mean.
    const F d = count >= V::kLanes ? V::sub(at(k, count), center) : V::sub(at(k, count), V::first_floats(center, count));
    return V::mul(d, d);
  });
  const F rstd = V::setf(1.0f / __builtin_sqrtf(squares / n + t.eps)), one = V::setf(1), none = V::setf(0);
  const auto step = [&](int64_t k, int64_t count) XQ_INLINE {
    const F w = t.norm_weight ? V::load_floats(t.norm_weight + k, count) : one;
    const F b = t.norm_bias ? V::load_floats(t.norm_bias + k, count) : none;
    V::store_floats(out + k, V::fma(V::mul(V::sub(at(k, count), center), rstd), w, b), count);
  };
  int64_t k = 0;
  for (; k + V::kLanes <= t.features; k += V::kLanes) step(k, V::kLanes);
  if (k < t.features) step(k, t.features - k);
}

template <class V>
void finish_rows(const xq::FinishTask& t) {
  for (int64_t m = 0; m < t.rows; ++m) {
    const float* x = t.value + m * t.value_stride;
    const float* up = t.up ? t.up + m * t.up_stride : nullptr;
    const float* residual = t.residual ? t.residual + m * t.features : nullptr;
    if (up || residual) {
      float* total = t.total + m * t.total_stride;
      const auto step = [&](int64_t k, int64_t count) XQ_INLINE {
        auto v = V::load_floats(x + k, count);
        if (up) v = V::mul(v, V::load_floats(up + k, count));
        if (residual) v = V::add(v, V::load_floats(residual + k, count));
        V::store_floats(total + k, v, count);
      };
      int64_t k = 0;
      for (; k + V::kLanes <= t.features; k += V::kLanes) step(k, V::kLanes);
      if (k < t.features) step(k, t.features - k);
      x = total;
    }
    if (t.norm != XQ_NORM_NONE) {
      float* normed = t.normed + m * t.normed_stride;
      norm_row<V>(t, x, normed);
      x = normed;
    }
    if (t.codes)
      quantize_rows<V>({reinterpret_cast<const uint8_t*>(x), 0, 1, t.features, t.codes + m * t.features, 0,
                        t.scale + m, t.zp + m});
  }
}

}  // namespace

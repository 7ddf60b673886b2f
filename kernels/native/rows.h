// Rows of floats, each quantized by its own range.
#pragma once

#include "internal.h"
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
    V::store(codes, V::narrow_in_order(v, zp16));
  }
}

}  // namespace

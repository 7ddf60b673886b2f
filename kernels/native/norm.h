// A scale and a shift for each channel: affine maps and layer normalization.
#pragma once

#include "moments.h"
#include "rounding.h"

namespace {

// A float for each channel, or the same for all (step 0).
struct PerChannel {
  const float* at;
  int64_t step;
};

// GROUPS vectors of floats: `count` bytes, all of them but in the last vector.
template <class V, int GROUPS>
XQ_INLINE inline typename V::I scaled(const uint8_t* a, const float* scale, const float* shift, int64_t count,
                                      typename V::F mult, typename V::F offset, const Rounding<V>& round) {
  typename V::F v[4];
  for (int i = 0; i < GROUPS; ++i) {
    const int64_t left = count - i * V::kLanes;
    v[i] = V::fma(V::to_float(V::widen_at(a + i * V::kLanes)), mult, offset);
    v[i] = V::fma(v[i], V::load_floats(scale + i * V::kLanes, left), V::load_floats(shift + i * V::kLanes, left));
  }
  for (int i = GROUPS; i < 4; ++i) v[i] = v[i % 2 % GROUPS];
  return round.in_order(v);
}

// out = q(fma(fma(a, mult, offset), scale[c], shift[c])) over `count` channels.
template <class V>
XQ_INLINE inline void scale_span(const uint8_t* a, uint8_t* out, int64_t count, PerChannel scale, PerChannel shift,
                                 typename V::F mult, typename V::F offset, const Rounding<V>& round) {
  constexpr int64_t kCount = Bytes<V>::kCount;
  const float *w = scale.at, *b = shift.at;
  for (; count >= kCount; count -= kCount, a += kCount, out += kCount, w += scale.step, b += shift.step)
    V::store(out, scaled<V, 4>(a, w, b, kCount, mult, offset, round));
  if (count == 0) return;
  alignas(64) uint8_t copy[kCount];
  a = Bytes<V>::whole(a, count, copy);
  typename V::I v;
  switch ((count - 1) / V::kLanes) {
    case 0: v = scaled<V, 1>(a, w, b, count, mult, offset, round); break;
    case 1: v = scaled<V, 2>(a, w, b, count, mult, offset, round); break;
    case 2: v = scaled<V, 3>(a, w, b, count, mult, offset, round); break;
    default: v = scaled<V, 4>(a, w, b, count, mult, offset, round); break;
  }
  Bytes<V>::store(out, v, count);
}

inline int64_t gcd(int64_t a, int64_t b) {
  while (b) {
    const int64_t rest = a % b;
    a = b, b = rest;
  }
  return a;
}

// Adjacent pixels as one span: scale and shift repeated until a pixel and a vector end together.
template <class V>
void affine_joined(const xq_op& op, const uint8_t* a, uint8_t* out, int64_t bytes, int64_t period, Rounding<V> round, float* repeated) {
  const auto one = V::setf(1), offset = V::setf(static_cast<float>(-op.a_zp));
  float *scale = repeated, *shift = repeated + period;
  for (int64_t i = 0; i < period; i += op.out.c) {
    memcpy(scale + i, op.scale_c, sizeof(float) * static_cast<size_t>(op.out.c));
    memcpy(shift + i, op.shift_c, sizeof(float) * static_cast<size_t>(op.out.c));
  }
  constexpr int64_t kCount = Bytes<V>::kCount;
  for (; bytes > 0; bytes -= period, a += period, out += period)
    scale_span<V>(a, out, xq::min64(bytes, period), {scale, kCount}, {shift, kCount}, one, offset, round);
}

template <class V>
void affine(const xq_op& op, const Stretch& s, Rounding<V> round) {
  constexpr int64_t kCount = Bytes<V>::kCount, kMost = 2048;
  const uint8_t* a = row_of(op.a, s.n, s.d, s.h);
  uint8_t* out = row_of(op.out, s.n, s.d, s.h);
  const int64_t c = op.out.c, bytes = s.pixels * c, period = c / gcd(c, kCount) * kCount;
  if (adjacent(op.a, s.pixels) && adjacent(op.out, s.pixels) && period > c && period <= kMost && bytes >= 2 * period) {
    float repeated[2 * kMost];
    return affine_joined<V>(op, a, out, bytes, period, round, repeated);
  }
  const auto one = V::setf(1), offset = V::setf(static_cast<float>(-op.a_zp));
  for (int64_t x = 0; x < s.pixels; ++x)
    scale_span<V>(a + x * op.a.stride_w, out + x * op.out.stride_w, c, {op.scale_c, kCount}, {op.shift_c, kCount}, one, offset, round);
}

template <class V>
XQ_INLINE inline void pixel_sums(const uint8_t* a, int64_t channels, int64_t* sum, int64_t* squares) {
  using I = typename V::I;
  I s = V::set32(0), q = s;
  for (int64_t c = 0; c < channels; c += Bytes<V>::kCount) {
    const I bytes = Bytes<V>::load(a + c, channels - c);
    s = V::add_sums(s, bytes), q = V::add_squares(q, bytes);
  }
  V::totals(s, q, sum, squares);
}

template <class V>
void layer_norm(const xq_op& op, const Stretch& s, Rounding<V> round) {
  constexpr int kPixels = 16;  // so that their roots and quotients are computed side by side
  constexpr int64_t kCount = Bytes<V>::kCount;
  float scales[kCount], shifts[kCount];
  for (int64_t i = 0; i < kCount; ++i) scales[i] = op.a_mult, shifts[i] = 0;
  const PerChannel scale = op.scale_c ? PerChannel{op.scale_c, kCount} : PerChannel{scales, 0};
  const PerChannel shift = op.shift_c ? PerChannel{op.shift_c, kCount} : PerChannel{shifts, 0};
  const int64_t channels = op.out.c, a_step = op.a.stride_w, step = op.out.stride_w;
  const uint8_t* a = row_of(op.a, s.n, s.d, s.h);
  uint8_t* out = row_of(op.out, s.n, s.d, s.h);
  int64_t sums[kPixels] = {}, squares[kPixels] = {};
  float mult[kPixels], offset[kPixels];
  for (int64_t x = 0; x < s.pixels; x += kPixels) {
    const int64_t here = xq::min64(s.pixels - x, kPixels);
    for (int64_t i = 0; i < here; ++i) pixel_sums<V>(a + (x + i) * a_step, channels, sums + i, squares + i);
    for (int i = 0; i < kPixels; ++i) {
      const xq::Norm norm = xq::norm_of(sums[i], squares[i], channels, op.eps);
      mult[i] = norm.mult, offset[i] = norm.shift;
    }
    for (int64_t i = 0; i < here; ++i)
      scale_span<V>(a + (x + i) * a_step, out + (x + i) * step, channels, scale, shift, V::setf(mult[i]), V::setf(offset[i]), round);
  }
}

}  // namespace

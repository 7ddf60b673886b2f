// Between float32 and codes. Floats lie channel beside channel, or pixel beside pixel in planes; other
// strides are left to the plain loops.
#pragma once

#include "rounding.h"

namespace {

// Floats of `count` channels beside one another, as bytes.
template <class V>
XQ_INLINE inline void quantize_span(const uint8_t* a, uint8_t* out, int64_t bytes, typename V::F mult, const Rounding<V>& round) {
  constexpr int kLanes = V::kLanes;
  int64_t i = 0;
  typename V::F v[4];
  for (; i + 4 * kLanes <= bytes; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) v[k] = V::mul(V::load_floats(a + 4 * (i + k * kLanes), kLanes), mult);
    V::store(out + i, round.in_order(v));
  }
  if (i == bytes) return;
  for (int k = 0; k < 4; ++k) {
    const int64_t left = bytes - i - k * kLanes;
    v[k] = left > 0 ? V::mul(V::load_floats(a + 4 * (i + k * kLanes), left), mult) : V::setf(0);
  }
  Bytes<V>::store(out + i, round.in_order(v), bytes - i);
}

// Three planes to pixels of three bytes.
template <class V>
void quantize_triples(const xq_op& op, const uint8_t* a, uint8_t* out, int64_t pixels, Rounding<V> round) {
  constexpr int kLanes = V::kLanes;
  const auto mult = V::setf(op.a_mult);
  const int64_t plane = op.a_stride_c;
  for (int64_t x = 0; x < pixels; x += kLanes, a += 4 * kLanes, out += 3 * kLanes) {
    const int64_t here = xq::min64(pixels - x, kLanes);
    typename V::F v[4];
    for (int c = 0; c < 3; ++c) v[c] = V::mul(V::load_floats(a + c * plane, here), mult);
    v[3] = v[0];
    const auto joined = V::join_triples(V::transpose_bytes(round.woven(v)));
    if (here == kLanes) V::store_triples(out, joined);
    else Bytes<V>::store(out, joined, 3 * here);
  }
}

// How many of the pixels x, x + 4, x + 8, … are among the first `count`.
inline int every_fourth(int64_t count, int x) { return static_cast<int>((count - x + 3) / 4); }

// kLanes pixels (or less) of up to 16 planes to as many adjacent channels.
template <class V>
XQ_INLINE inline void quantize_tile(const uint8_t* a, int64_t plane, uint8_t* out, int64_t step, int64_t pixels,
                                    int64_t channels, typename V::F mult, const Rounding<V>& round) {
  typename V::I quads[4];
  for (int g = 0; g < 4; ++g) {
    typename V::F v[4];
    for (int c = 0; c < 4; ++c)
      v[c] = 4 * g + c < channels ? V::mul(V::load_floats(a + (4 * g + c) * plane, pixels), mult) : V::setf(0);
    quads[g] = V::transpose_bytes(round.woven(v));
  }
  V::transpose_quads(quads);
  for (int x = 0; x < 4 && x < pixels; ++x)
    V::store_lanes(out + x * step, 4 * step, quads[x], every_fourth(pixels, x), static_cast<int>(channels));
}

template <class V>
void quantize(const xq_op& op, const Stretch& s, Rounding<V> round) {
  const uint8_t* a = row_of(op.a, s.n, s.d, s.h);
  uint8_t* out = row_of(op.out, s.n, s.d, s.h);
  const int64_t channels = op.out.c, a_step = op.a.stride_w, step = op.out.stride_w;
  const auto mult = V::setf(op.a_mult);
  if (channels == 1 || op.a_stride_c == 4) {
    const bool joined = s.pixels == 1 || (a_step == 4 * channels && step == channels);
    const int64_t bytes = joined ? s.pixels * channels : channels;
    for (int64_t x = 0; x < (joined ? 1 : s.pixels); ++x) quantize_span<V>(a + x * a_step, out + x * step, bytes, mult, round);
    return;
  }
  if (channels == 3 && step == 3) return quantize_triples<V>(op, a, out, s.pixels, round);
  for (int64_t x = 0; x < s.pixels; x += V::kLanes)
    for (int64_t c = 0; c < channels; c += 16)
      quantize_tile<V>(a + 4 * x + c * op.a_stride_c, op.a_stride_c, out + x * step + c, step,
                       xq::min64(s.pixels - x, V::kLanes), xq::min64(channels - c, 16), mult, round);
}

template <class V>
XQ_INLINE inline void dequantize_span(const uint8_t* a, uint8_t* out, int64_t bytes, typename V::I zp, typename V::F mult) {
  constexpr int kLanes = V::kLanes;
  for (int64_t i = 0; i < bytes; i += 4 * kLanes) {
    typename V::F v[4];
    Bytes<V>::floats(a + i, bytes - i, zp, v);
    for (int k = 0; k < 4 && i + k * kLanes < bytes; ++k)
      V::store_floats(out + 4 * (i + k * kLanes), V::mul(v[k], mult), bytes - i - k * kLanes);
  }
}

template <class V>
XQ_INLINE inline void dequantize_tile(const uint8_t* a, int64_t step, uint8_t* out, int64_t plane, int64_t pixels,
                                      int64_t channels, typename V::I zp, typename V::F mult) {
  typename V::I quads[4];
  for (int x = 0; x < 4; ++x)
    quads[x] = x < pixels ? V::load_lanes(a + x * step, 4 * step, every_fourth(pixels, x), static_cast<int>(channels)) : V::set32(0);
  V::transpose_quads(quads);
  for (int g = 0; 4 * g < channels; ++g) {
    typename V::I v[4];
    V::widen(V::transpose_bytes(quads[g]), v);
    for (int c = 0; c < 4 && 4 * g + c < channels; ++c)
      V::store_floats(out + (4 * g + c) * plane, V::mul(V::to_float(V::sub32(v[c], zp)), mult), pixels);
  }
}

template <class V>
void dequantize(const xq_op& op, const Stretch& s) {
  const uint8_t* a = row_of(op.a, s.n, s.d, s.h);
  uint8_t* out = row_of(op.out, s.n, s.d, s.h);
  const int64_t channels = op.out.c, step = op.a.stride_w, out_step = op.out.stride_w;
  const auto zp = V::set32(op.a_zp);
  const auto mult = V::setf(op.a_mult);
  if (channels == 1 || op.out_stride_c == 4) {
    const bool joined = s.pixels == 1 || (out_step == 4 * channels && step == channels);
    const int64_t bytes = joined ? s.pixels * channels : channels;
    for (int64_t x = 0; x < (joined ? 1 : s.pixels); ++x) dequantize_span<V>(a + x * step, out + x * out_step, bytes, zp, mult);
    return;
  }
  for (int64_t c = 0; c < channels; c += 16)
    for (int64_t x = 0; x < s.pixels; x += V::kLanes)
      dequantize_tile<V>(a + x * step + c, step, out + 4 * x + c * op.out_stride_c, op.out_stride_c,
                         xq::min64(s.pixels - x, V::kLanes), xq::min64(channels - c, 16), zp, mult);
}

XQ_INLINE inline void look_up_real(const float* reals, uint8_t code, uint8_t* out) {
  memcpy(out, reals + code, sizeof(float));  // floats need no alignment
}

// Loads one by one: two fit in a cycle, and gathers take longer on all but a few CPUs.
template <class V>
void look_up_reals(const xq_op& op, const Stretch& s) {
  const uint8_t* a = row_of(op.a, s.n, s.d, s.h);
  uint8_t* out = row_of(op.out, s.n, s.d, s.h);
  const int64_t channels = op.out.c, step = op.a.stride_w, out_step = op.out.stride_w, plane = op.out_stride_c;
  if (channels == 1 || plane == 4) {
    const bool joined = s.pixels == 1 || (out_step == 4 * channels && step == channels);
    const int64_t bytes = joined ? s.pixels * channels : channels;
    for (int64_t x = 0; x < (joined ? 1 : s.pixels); ++x)
      for (int64_t i = 0; i < bytes; ++i) look_up_real(op.reals, a[x * step + i], out + x * out_step + 4 * i);
    return;
  }
  for (int64_t c = 0; c < channels; c += 16)  // so many lines of planes, and one of pixels, at once
    for (int64_t x = 0; x < s.pixels; ++x)
      for (int64_t i = c; i < xq::min64(channels, c + 16); ++i)
        look_up_real(op.reals, a[x * step + i], out + x * out_step + i * plane);
}

}  // namespace

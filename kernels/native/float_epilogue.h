// From int32 sums to floats: the row's zero point and scale, weight scale, bias, activation.
#pragma once

#include "internal.h"
#include "unroll.h"

namespace {

// z * P(z²) / Q(z²), a rational approximation of an odd function that is 1 from `limit` on.
struct Sigmoidal {
  float limit, p[6], q[6];
};

// A minimax fit of tanh, wrong by less than 2e-8 before rounding.
constexpr Sigmoidal kTanh = {
    9.0f,
    {0.999999906f, 0.133731971f, 0.00348658119f, 2.04718199e-05f, 1.31842109e-08f, 0.0f},
    {1.0f, 0.467064939f, 0.0258419764f, 0.000327138427f, 7.7026578e-07f, 0.0f}};

// (Phi(x) - 1/2) / z for x = 5.1 z, of the normal distribution's Phi, as a polynomial of 2 z^2 - 1: x Phi(x) is wrong
// by less than 1.5e-6, and x or 0 from either end on, where this is 1/2. It takes no quotient.
constexpr float kNormal[] = {0.706887007f, -0.351915061f, 0.258989722f, -0.20515655f, 0.161814407f,
                             -0.122189678f, 0.0886864737f, -0.0621562526f, 0.0360026248f, -0.0154617121f,
                             0.0110849673f, -0.0104173496f, 0.00383142638f};

// x / 2 * (1 + f(z)): x from the limit on, 0 below its negative. NaN stays.
template <class V>
XQ_INLINE inline typename V::F gate(typename V::F x, typename V::F z, const Sigmoidal& f) {
  using F = typename V::F;
  const F t = V::mul(z, z), limit = V::setf(f.limit);
  F p = V::setf(f.p[5]), q = V::setf(f.q[5]);
  for (int i = 4; i >= 0; --i) p = V::fma(p, t, V::setf(f.p[i])), q = V::fma(q, t, V::setf(f.q[i]));
  const F half = V::mul(x, V::setf(0.5f));
  const F inside = V::fma(half, V::div(V::mul(z, p), q), half);
  return V::if_greater(z, limit, x, V::if_greater(V::setf(-f.limit), z, V::setf(0), inside));
}

// x Phi(x). NaN stays.
template <class V>
XQ_INLINE inline typename V::F gelu(typename V::F x) {
  using F = typename V::F;
  const F z = V::max(V::setf(-1), V::min(V::setf(1), V::mul(x, V::setf(1 / 5.1f))));
  const F u = V::fma(V::add(z, z), z, V::setf(-1));
  F p = V::setf(kNormal[12]);
  for (int i = 11; i >= 0; --i) p = V::fma(p, u, V::setf(kNormal[i]));
  return V::mul(x, V::fma(z, p, V::setf(0.5f)));
}

template <class V, int ACTIVATION>
XQ_INLINE inline typename V::F activate(typename V::F x) {
  using F = typename V::F;
  if constexpr (ACTIVATION == XQ_ACT_RELU) return V::max(V::setf(0), x);  // in this order NaN stays
  if constexpr (ACTIVATION == XQ_ACT_GELU) return gelu<V>(x);
  if constexpr (ACTIVATION == XQ_ACT_GELU_TANH) {
    const F z = V::mul(x, V::setf(0.797884561f));
    return gate<V>(x, V::fma(V::mul(z, V::mul(x, x)), V::setf(0.044715f), z), kTanh);
  }
  if constexpr (ACTIVATION == XQ_ACT_SILU) return gate<V>(x, V::mul(x, V::setf(0.5f)), kTanh);
  if constexpr (ACTIVATION == XQ_ACT_SIGMOID) return gate<V>(V::setf(1), V::mul(x, V::setf(0.5f)), kTanh);
  if constexpr (ACTIVATION == XQ_ACT_TANH) return V::fma(gate<V>(V::setf(1), x, kTanh), V::setf(2), V::setf(-1));
  return x;
}

template <class V>
struct FloatEpilogue {
  static constexpr bool kBytes = false;

  explicit FloatEpilogue(const xq::Packed&) {}
};

// Sums of so many weights keep to 23 bits.
constexpr int kFewWeights = 1 << 15;

// FULL: the block has a channel for each of its lanes, and few weights a channel.
template <class V, int VECS, int ACTIVATION, bool FULL>
XQ_INLINE inline void float_span(const xq::DenseTask& t, const xq::Block& b, int64_t begin, int64_t count,
                                 const int32_t* sums, int64_t lds) {
  using I = typename V::I;
  using F = typename V::F;
  const xq::Packed& p = *t.packed;
  const int32_t* weight_sums = p.at<int32_t>(p.weight_sums) + b.s_off;
  const float *mults = p.at<float>(p.mult) + b.s_off, *biases = p.at<float>(p.bias) + b.s_off;
  I sum_of[VECS];
  F mult[VECS], bias[VECS];
  unroll<VECS>([&](int v) XQ_INLINE {
    sum_of[v] = V::load(weight_sums + v * V::kLanes);
    if constexpr (FULL) sum_of[v] = V::factors(sum_of[v]);
    mult[v] = V::loadf(mults + v * V::kLanes), bias[v] = V::loadf(biases + v * V::kLanes);
  });
  // Copies: what is behind a reference would be read again after every store.
  const int64_t step = t.out_pixel, channels = b.count;
  const float* scales = t.row_scale + begin;
  const int32_t* zps = t.row_zp + begin;
  uint8_t* out = t.out + begin * step + int64_t{b.out_c} * 4;
  for (int64_t m = 0; m < count; ++m, sums += lds, out += step) {
    const I zp = FULL ? V::times(zps[m]) : V::set32(zps[m]);
    const F scale = V::setf(scales[m]);
    F x[VECS];
    unroll<VECS>([&](int v) XQ_INLINE {
      I sum = V::load(sums + v * V::kLanes);
      if constexpr (FULL) sum = V::dot16(sum, zp, sum_of[v]);
      else sum = V::sub32(sum, V::mul32(zp, sum_of[v]));
      x[v] = activate<V, ACTIVATION>(V::fma(V::to_float(sum), V::mul(scale, mult[v]), bias[v]));
    });
    unroll<VECS>([&](int v) XQ_INLINE {
      uint8_t* to = out + v * V::kLanes * 4;
      if constexpr (FULL) V::store(to, V::as_bits(x[v]));
      else if (v * V::kLanes < channels) V::store_floats(to, x[v], channels - v * V::kLanes);
    });
  }
}

// Rows of floats lie far apart, where the CPU does not see a stream coming: their lines are asked for while sums are made.
template <class V, int VECS>
XQ_INLINE inline void ask_for_rows(const FloatEpilogue<V>&, const xq::DenseTask& t, const xq::Block& b, int64_t first, int64_t rows) {
  const uint8_t* out = t.out + first * t.out_pixel + int64_t{b.out_c} * 4;
  for (int64_t m = 0; m < rows; ++m, out += t.out_pixel)
    for (int line = 0; line < VECS * V::kLanes * 4; line += 64) xq::prefetch(out + line);
}

// Sums become floats from memory: see put_vectors of Epilogue.
template <int ROWS, int VECS, class V>
bool put_vectors(const FloatEpilogue<V>&, const xq::DenseTask&, const xq::Block&, int64_t, int64_t,
                 const typename V::I*) {
  return false;
}

template <class V, int VECS, int ACTIVATION>
XQ_INLINE inline void float_rows(const xq::DenseTask& t, const xq::Block& b, int64_t begin, int64_t count,
                                 const int32_t* sums, int64_t lds) {
  const bool full = b.count == VECS * V::kLanes && t.packed->conv.in_channels <= kFewWeights;
  if (full) float_span<V, VECS, ACTIVATION, true>(t, b, begin, count, sums, lds);
  else float_span<V, VECS, ACTIVATION, false>(t, b, begin, count, sums, lds);
}

// Rows [begin, begin + count) of a task, which has one segment and no rows to drop.
template <class V, int VECS>
void put_rows(const FloatEpilogue<V>&, const xq::DenseTask& t, const xq::Block& b, int64_t,
              int64_t begin, int64_t count, const int32_t* sums, int64_t lds) {
  switch (t.packed->activation) {
    case XQ_ACT_RELU: return float_rows<V, VECS, XQ_ACT_RELU>(t, b, begin, count, sums, lds);
    case XQ_ACT_GELU: return float_rows<V, VECS, XQ_ACT_GELU>(t, b, begin, count, sums, lds);
    case XQ_ACT_GELU_TANH: return float_rows<V, VECS, XQ_ACT_GELU_TANH>(t, b, begin, count, sums, lds);
    case XQ_ACT_SILU: return float_rows<V, VECS, XQ_ACT_SILU>(t, b, begin, count, sums, lds);
    case XQ_ACT_SIGMOID: return float_rows<V, VECS, XQ_ACT_SIGMOID>(t, b, begin, count, sums, lds);
    case XQ_ACT_TANH: return float_rows<V, VECS, XQ_ACT_TANH>(t, b, begin, count, sums, lds);
    default: return float_rows<V, VECS, XQ_ACT_NONE>(t, b, begin, count, sums, lds);
  }
}

}  // namespace

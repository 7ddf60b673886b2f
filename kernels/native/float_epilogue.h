// From int32 sums to floats: the row's zero point and scale, weight scale, bias, activation.
#pragma once

#include "internal.h"
#include "unroll.h"

namespace {

// z * P(z²) / Q(z²), a rational approximation of an odd function that is 1 from `limit` on.
struct Sigmoidal {
  float limit, p[6], q[6];
};

// Minimax fits of erf and tanh, wrong by less than 2e-8 before rounding.
constexpr Sigmoidal kErf = {
    3.9f,
    {1.12837903f, 0.191941436f, 0.052966978f, 0.0038368958f, 0.000287457923f, 2.05038663e-06f},
    {1.0f, 0.503435447f, 0.114758381f, 0.0151092428f, 0.00118173967f, 3.82307709e-05f}};
constexpr Sigmoidal kTanh = {
    9.0f,
    {0.999999906f, 0.133731971f, 0.00348658119f, 2.04718199e-05f, 1.31842109e-08f, 0.0f},
    {1.0f, 0.467064939f, 0.0258419764f, 0.000327138427f, 7.7026578e-07f, 0.0f}};

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

template <class V, int ACTIVATION>
XQ_INLINE inline typename V::F activate(typename V::F x) {
  using F = typename V::F;
  if constexpr (ACTIVATION == XQ_ACT_RELU) return V::max(V::setf(0), x);  // in this order NaN stays
  if constexpr (ACTIVATION == XQ_ACT_GELU) return gate<V>(x, V::mul(x, V::setf(0.707106781f)), kErf);
  if constexpr (ACTIVATION == XQ_ACT_GELU_TANH) {
    const F z = V::mul(x, V::setf(0.797884561f));
    return gate<V>(x, V::fma(V::mul(z, V::mul(x, x)), V::setf(0.044715f), z), kTanh);
  }
  if constexpr (ACTIVATION == XQ_ACT_SILU) return gate<V>(x, V::mul(x, V::setf(0.5f)), kTanh);
  return x;
}

template <class V>
struct FloatEpilogue {
  explicit FloatEpilogue(const xq::Packed&) {}
};

// FULL: the block has a channel for each of its lanes.
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
    mult[v] = V::loadf(mults + v * V::kLanes), bias[v] = V::loadf(biases + v * V::kLanes);
  });
  // Copies: what is behind a reference would be read again after every store.
  const int64_t step = t.out_pixel, channels = b.count;
  const float* scales = t.row_scale + begin;
  const int32_t* zps = t.row_zp + begin;
  uint8_t* out = t.out + begin * step + int64_t{b.out_c} * 4;
  for (int64_t m = 0; m < count; ++m, sums += lds, out += step) {
    const I zp = V::set32(zps[m]);
    const F scale = V::setf(scales[m]);
    F x[VECS];
    unroll<VECS>([&](int v) XQ_INLINE {
      const I sum = V::sub32(V::load(sums + v * V::kLanes), V::mul32(zp, sum_of[v]));
      x[v] = activate<V, ACTIVATION>(V::fma(V::to_float(sum), V::mul(scale, mult[v]), bias[v]));
    });
    V::template channels_in_order<VECS>(x);
    unroll<VECS>([&](int v) XQ_INLINE {
      uint8_t* to = out + v * V::kLanes * 4;
      if constexpr (FULL) V::store(to, V::as_bits(x[v]));
      else if (v * V::kLanes < channels) V::store_floats(to, x[v], channels - v * V::kLanes);
    });
  }
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
  if (b.count == VECS * V::kLanes) float_span<V, VECS, ACTIVATION, true>(t, b, begin, count, sums, lds);
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
    default: return float_rows<V, VECS, XQ_ACT_NONE>(t, b, begin, count, sums, lds);
  }
}

}  // namespace

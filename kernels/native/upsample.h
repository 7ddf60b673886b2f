// Upsampling, one row of output at a time.
#pragma once

#include "resample.h"
#include "rounding.h"

namespace {

template <class V>
void nearest(const xq_op& op, const Stretch& s) {
  const uint8_t* a = row_of(op.a, s.n, xq::nearest_source(op.scale[0], s.d, op.a.d),
                            xq::nearest_source(op.scale[1], s.h, op.a.h));
  uint8_t* out = row_of(op.out, s.n, s.d, s.h);
  for (int64_t w = 0; w < s.pixels; ++w, out += op.out.stride_w) {
    const uint8_t* from = a + xq::nearest_source(op.scale[2], w, op.a.w) * op.a.stride_w;
    for (int64_t c = 0; c < op.out.c; c += Bytes<V>::kCount)
      Bytes<V>::store(out + c, Bytes<V>::load(from + c, op.out.c - c), op.out.c - c);
  }
}

template <class V>
void bilinear(const xq_op& op, const Stretch& s, Rounding<V> round) {
  using F = typename V::F;
  const xq::Mix y = xq::mix_of(op, 1, s.h, op.a.h);
  const uint8_t *top = row_of(op.a, s.n, s.d, y.low), *bottom = row_of(op.a, s.n, s.d, y.high);
  uint8_t* out = row_of(op.out, s.n, s.d, s.h);
  const F yp = V::setf(y.part), yr = V::setf(1 - y.part), mult = V::setf(op.a_mult);
  const auto zp = V::set32(op.a_zp);
  for (int64_t w = 0; w < s.pixels; ++w, out += op.out.stride_w) {
    const xq::Mix x = xq::mix_of(op, 2, w, op.a.w);
    const F xp = V::setf(x.part), xr = V::setf(1 - x.part);
    const int64_t low = x.low * op.a.stride_w, high = x.high * op.a.stride_w;
    for (int64_t c = 0; c < op.out.c; c += Bytes<V>::kCount) {
      const int64_t count = op.out.c - c;
      F a[4], b[4], e[4], f[4];
      Bytes<V>::floats(top + low + c, count, zp, a), Bytes<V>::floats(top + high + c, count, zp, b);
      Bytes<V>::floats(bottom + low + c, count, zp, e), Bytes<V>::floats(bottom + high + c, count, zp, f);
      for (int i = 0; i < 4; ++i) {
        const F upper = V::fma(xp, b[i], V::mul(xr, a[i])), lower = V::fma(xp, f[i], V::mul(xr, e[i]));
        a[i] = V::mul(V::fma(yp, lower, V::mul(yr, upper)), mult);
      }
      Bytes<V>::store(out + c, round.in_order(a), count);
    }
  }
}

}  // namespace

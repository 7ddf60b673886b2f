// Pools, one row of output at a time.
#pragma once

#include "resample.h"
#include "rounding.h"

namespace {

inline xq::Range taps_inside(const xq_op& op, int axis, int64_t out, int64_t size) {
  const int64_t first = xq::tap_at(op, axis, out, 0), step = op.dilation[axis];
  const int64_t begin = first >= 0 ? 0 : xq::ceil_div(-first, step);
  const int64_t end = size <= first ? 0 : xq::ceil_div(size - first, step);
  return {begin, xq::min64(end, op.kernel[axis])};
}

template <class V>
void max_pool(const xq_op& op, const Stretch& s) {
  using I = typename V::I;
  const xq::Range z = taps_inside(op, 0, s.d, op.a.d), y = taps_inside(op, 1, s.h, op.a.h);
  const int64_t step = op.dilation[2] * op.a.stride_w;
  for (int64_t w = 0; w < s.pixels; ++w) {
    const xq::Range x = taps_inside(op, 2, w, op.a.w);
    uint8_t* out = row_of(op.out, s.n, s.d, s.h) + w * op.out.stride_w;
    for (int64_t c = 0; c < op.out.c; c += Bytes<V>::kCount) {
      const int64_t count = op.out.c - c;
      I best = V::set8(0);
      for (int64_t tz = z.begin; tz < z.end; ++tz)
        for (int64_t ty = y.begin; ty < y.end; ++ty) {
          const uint8_t* a = row_of(op.a, s.n, xq::tap_at(op, 0, s.d, tz), xq::tap_at(op, 1, s.h, ty)) +
                             xq::tap_at(op, 2, w, x.begin) * op.a.stride_w + c;
          for (int64_t tx = x.begin; tx < x.end; ++tx, a += step) best = V::max8(best, Bytes<V>::load(a, count));
        }
      Bytes<V>::store(out + c, best, count);
    }
  }
}

// Adds the bytes of a box of pixels: 256 of them fit 16 bits.
template <class V>
XQ_INLINE inline void box_sums(const xq_op& op, int64_t n, const xq::PoolBox& box, int64_t c, typename V::I sums[4]) {
  const int64_t count = op.out.c - c, step = op.a.stride_w;
  typename V::I low = V::set32(0), high = low;
  int64_t room = 256;
  for (int64_t z = box.axis[0].begin; z < box.axis[0].end; ++z)
    for (int64_t y = box.axis[1].begin; y < box.axis[1].end; ++y) {
      const uint8_t* a = row_of(op.a, n, z, y) + box.axis[2].begin * step + c;
      for (int64_t left = box.axis[2].end - box.axis[2].begin; left > 0;) {
        const int64_t here = xq::min64(left, room);
        for (int64_t x = 0; x < here; ++x, a += step) V::add_wide(Bytes<V>::load(a, count), low, high);
        left -= here, room -= here;
        if (room > 0) continue;
        V::add_quads(low, high, sums);
        low = high = V::set32(0), room = 256;
      }
    }
  V::add_quads(low, high, sums);
}

template <class V>
void average(const xq_op& op, const Stretch& s, Rounding<V> round) {
  using I = typename V::I;
  for (int64_t w = 0; w < s.pixels; ++w) {
    const xq::PoolBox box = xq::pool_box(op, s.d, s.h, w);
    const auto mult = V::setf(box.mult);
    const I start = V::set32(-static_cast<int>(box.pixels * op.a_zp));
    uint8_t* out = row_of(op.out, s.n, s.d, s.h) + w * op.out.stride_w;
    for (int64_t c = 0; c < op.out.c; c += Bytes<V>::kCount) {
      I sums[4] = {start, start, start, start};
      box_sums<V>(op, s.n, box, c, sums);
      typename V::F v[4];
      for (int i = 0; i < 4; ++i) v[i] = V::mul(V::to_float(sums[i]), mult);
      Bytes<V>::store(out + c, round.woven(v), op.out.c - c);
    }
  }
}

}  // namespace

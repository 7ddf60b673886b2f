// What the element-wise ops, pools and resampling share: reading codes as floats, rounding them back.
#pragma once

#include "internal.h"
#include "unroll.h"

namespace {

inline uint8_t* row_of(const xq_tensor& t, int64_t n, int64_t d, int64_t h) {
  return t.data + n * t.stride_n + d * t.stride_d + h * t.stride_h;
}

// From floats to bytes. Used by value: a member behind a pointer is read again after every store.
template <class V>
struct Rounding {
  using I = typename V::I;
  using F = typename V::F;
  I zp16, lo, hi;
  F limit;
  const typename V::Table* table;

  Rounding(const xq_op& op, const typename V::Table* t)
      : zp16(V::set16(op.out_zp)), lo(V::set8(op.lo)), hi(V::set8(op.hi)),
        limit(V::setf(static_cast<float>(op.hi - op.out_zp))), table(t) {}

  // The limit keeps large values from wrapping. NaN passes it, and converts to the least integer.
  XQ_INLINE void convert(const F v[4], I sums[4]) const {
    for (int i = 0; i < 4; ++i) sums[i] = V::to_int(V::min(limit, v[i]));
  }
  XQ_INLINE I clamp(I bytes) const {
    bytes = V::min8(V::max8(bytes, lo), hi);
    return table ? table->look_up(bytes) : bytes;
  }
  // Floats in the order of V::widen.
  XQ_INLINE I woven(const F v[4]) const {
    I sums[4];
    convert(v, sums);
    return clamp(V::narrow(sums, zp16));
  }
  XQ_INLINE I in_order(const F v[4]) const {
    I sums[4];
    convert(v, sums);
    return clamp(V::narrow_in_order(sums, zp16));
  }
};

template <class V>
struct Bytes {
  using I = typename V::I;
  using F = typename V::F;
  static constexpr int64_t kCount = V::kLanes * 4;

  XQ_INLINE static I load(const uint8_t* p, int64_t count) {
    return count >= kCount ? V::load(p) : V::template load_pixels<4>(p, 0, 1, static_cast<int>(count));
  }
  XQ_INLINE static void store(uint8_t* p, I v, int64_t count) {
    V::template store_pixels<4>(p, 0, v, 1, static_cast<int>(xq::min64(count, kCount)));
  }
  // A place to read kCount bytes from, of which `count` matter: p itself or a copy.
  XQ_INLINE static const uint8_t* whole(const uint8_t* p, int64_t count, uint8_t copy[kCount]) {
    if (count >= kCount) return p;
    V::store(copy, load(p, count));
    return copy;
  }
  XQ_INLINE static void floats(const uint8_t* p, int64_t count, I zp, F v[4]) {
    alignas(64) uint8_t copy[kCount];
    p = whole(p, count, copy);
    for (int i = 0; i < 4; ++i) v[i] = V::to_float(V::sub32(V::widen_at(p + i * V::kLanes), zp));
  }
  // In the order of V::widen.
  XQ_INLINE static void woven(I bytes, I zp, F v[4]) {
    I wide[4];
    V::widen(bytes, wide);
    for (int i = 0; i < 4; ++i) v[i] = V::to_float(V::sub32(wide[i], zp));
  }
};

// Pixels that lie stride_w apart in every tensor: a row, or rows that follow one another.
struct Stretch {
  int64_t n, d, h, pixels;
};

inline bool adjacent(const xq_tensor& t, int64_t pixels) { return pixels == 1 || t.stride_w == t.c; }

}  // namespace

// Element-wise ops, pools and resampling, one row of output at a time.
#pragma once

#include "resample.h"

namespace {

inline uint8_t* row_of(const xq_tensor& t, int64_t n, int64_t d, int64_t h) {
  return t.data + n * t.stride_n + d * t.stride_d + h * t.stride_h;
}

template <class V>
struct Rows {
  using I = typename V::I;
  using F = typename V::F;
  static constexpr int64_t kBytes = V::kLanes * 4;
  const xq_op& op;
  I zp16, lo, hi, a_zp, b_zp;
  F a_mult, b_mult, zero, limit;

  explicit Rows(const xq_op& o)
      : op(o), zp16(V::set16(o.out_zp)), lo(V::set8(o.lo)), hi(V::set8(o.hi)), a_zp(V::set32(o.a_zp)),
        b_zp(V::set32(o.b_zp)), a_mult(V::setf(o.a_mult)), b_mult(V::setf(o.b_mult)), zero(V::setf(0)),
        limit(V::setf(static_cast<float>(o.hi - o.out_zp))) {}

  static I load(const uint8_t* p, int64_t count) {
    return count >= kBytes ? V::load(p) : V::template load_pixels<4>(p, 0, 1, static_cast<int>(count));
  }
  static void store(uint8_t* p, I v, int64_t count) {
    V::template store_pixels<4>(p, 0, v, 1, static_cast<int>(xq::min64(count, kBytes)));
  }
  I quantize(const F v[4]) const {
    I sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = V::to_int(V::min(limit, v[i]));
    const I bytes = V::min8(V::max8(V::narrow(sums, zp16), lo), hi);
    return op.lut ? V::look_up(op.lut, bytes) : bytes;
  }
  static void floats(I bytes, I zp, F v[4]) {
    I wide[4];
    V::widen(bytes, wide);
    for (int i = 0; i < 4; ++i) v[i] = V::to_float(V::sub32(wide[i], zp));
  }

  I look_up(I a) const { return V::look_up(op.lut, a); }
  I requant(I a) const {
    F v[4];
    floats(a, a_zp, v);
    for (F& x : v) x = V::fma(x, a_mult, zero);
    return quantize(v);
  }
  I add(I a, I b) const {
    F v[4], w[4];
    floats(a, a_zp, v), floats(b, b_zp, w);
    for (int i = 0; i < 4; ++i) v[i] = V::fma(v[i], a_mult, V::fma(w[i], b_mult, zero));
    return quantize(v);
  }
  I multiply(I a, I b) const {
    F v[4], w[4];
    floats(a, a_zp, v), floats(b, b_zp, w);
    for (int i = 0; i < 4; ++i) v[i] = V::fma(V::fma(v[i], w[i], zero), a_mult, zero);
    return quantize(v);
  }

  // f(offset, count) for every vector of a row; pixels are joined where they are adjacent.
  template <class Step>
  void spans(bool adjacent, int64_t a_step, int64_t b_step, Step step) const {
    const int64_t pixels = adjacent ? 1 : op.out.w, bytes = adjacent ? op.out.w * op.out.c : op.out.c;
    for (int64_t x = 0; x < pixels; ++x)
      for (int64_t i = 0; i < bytes; i += kBytes)
        step(x * a_step + i, x * b_step + i, x * op.out.stride_w + i, bytes - i);
  }

  bool adjacent(const xq_tensor& t) const { return t.w == 1 || t.stride_w == t.c; }

  void unary(int64_t n, int64_t d, int64_t h) const {
    const uint8_t* a = row_of(op.a, n, d, h);
    uint8_t* out = row_of(op.out, n, d, h);
    const bool flat = adjacent(op.a) && adjacent(op.out);
    spans(flat, op.a.stride_w, 0, [&](int64_t ia, int64_t, int64_t io, int64_t count) {
      const I x = load(a + ia, count);
      store(out + io, op.kind == XQ_OP_LUT ? look_up(x) : op.kind == XQ_OP_COPY ? x : requant(x), count);
    });
  }

  void binary(int64_t n, int64_t d, int64_t h) const {
    const bool wide = op.b.d == op.out.d && op.b.h == op.out.h && op.b.w == op.out.w;
    const uint8_t *a = row_of(op.a, n, d, h), *b = wide ? row_of(op.b, n, d, h) : row_of(op.b, n, 0, 0);
    uint8_t* out = row_of(op.out, n, d, h);
    const bool flat = adjacent(op.a) && adjacent(op.out) && (wide ? adjacent(op.b) : op.out.w == 1);
    spans(flat, op.a.stride_w, wide ? op.b.stride_w : 0,
          [&](int64_t ia, int64_t ib, int64_t io, int64_t count) {
            const I x = load(a + ia, count), y = load(b + ib, count);
            store(out + io, op.kind == XQ_OP_ADD ? add(x, y) : multiply(x, y), count);
          });
  }

  void shuffle(int64_t n, int64_t d, int64_t h) const {
    const int64_t groups = op.groups, each = op.a.c / groups;
    for (int64_t x = 0; x < op.out.w; ++x) {
      const uint8_t* a = row_of(op.a, n, d, h) + x * op.a.stride_w;
      uint8_t* out = row_of(op.out, n, d, h) + x * op.out.stride_w;
      if (groups == 2) {
        for (int64_t i = 0; i < each; ++i) out[2 * i] = a[i], out[2 * i + 1] = a[each + i];
        continue;
      }
      for (int64_t g = 0; g < groups; ++g)
        for (int64_t i = 0; i < each; ++i) out[i * groups + g] = a[g * each + i];
    }
  }

  static xq::Range taps_inside(const xq_op& op, int axis, int64_t out, int64_t size) {
    const int64_t first = xq::tap_at(op, axis, out, 0), step = op.dilation[axis];
    const int64_t begin = first >= 0 ? 0 : xq::ceil_div(-first, step);
    const int64_t end = size <= first ? 0 : xq::ceil_div(size - first, step);
    return {begin, xq::min64(end, op.kernel[axis])};
  }

  void max_pool(int64_t n, int64_t d, int64_t h) const {
    const xq::Range z = taps_inside(op, 0, d, op.a.d), y = taps_inside(op, 1, h, op.a.h);
    for (int64_t w = 0; w < op.out.w; ++w) {
      const xq::Range x = taps_inside(op, 2, w, op.a.w);
      uint8_t* out = row_of(op.out, n, d, h) + w * op.out.stride_w;
      for (int64_t c = 0; c < op.out.c; c += kBytes) {
        const int64_t count = op.out.c - c;
        I best = V::set8(0);
        for (int64_t tz = z.begin; tz < z.end; ++tz)
          for (int64_t ty = y.begin; ty < y.end; ++ty) {
            const uint8_t* a = row_of(op.a, n, xq::tap_at(op, 0, d, tz), xq::tap_at(op, 1, h, ty)) + c;
            for (int64_t tx = x.begin; tx < x.end; ++tx)
              best = V::max8(best, load(a + xq::tap_at(op, 2, w, tx) * op.a.stride_w, count));
          }
        store(out + c, best, count);
      }
    }
  }

  void average(int64_t n, int64_t d, int64_t h) const {
    for (int64_t w = 0; w < op.out.w; ++w) {
      const xq::PoolBox box = xq::pool_box(op, d, h, w);
      const F mult = V::setf(box.mult);
      uint8_t* out = row_of(op.out, n, d, h) + w * op.out.stride_w;
      for (int64_t c = 0; c < op.out.c; c += kBytes) {
        const int64_t count = op.out.c - c;
        const I start = V::set32(-static_cast<int>(box.pixels * op.a_zp));
        I sums[4] = {start, start, start, start};
        for (int64_t z = box.axis[0].begin; z < box.axis[0].end; ++z)
          for (int64_t y = box.axis[1].begin; y < box.axis[1].end; ++y)
            for (int64_t x = box.axis[2].begin; x < box.axis[2].end; ++x) {
              I wide[4];
              V::widen(load(row_of(op.a, n, z, y) + x * op.a.stride_w + c, count), wide);
              for (int i = 0; i < 4; ++i) sums[i] = V::add32(sums[i], wide[i]);
            }
        F v[4];
        for (int i = 0; i < 4; ++i) v[i] = V::fma(V::to_float(sums[i]), mult, zero);
        store(out + c, quantize(v), count);
      }
    }
  }

  void nearest(int64_t n, int64_t d, int64_t h) const {
    const uint8_t* a = row_of(op.a, n, xq::nearest_source(op.scale[0], d, op.a.d),
                              xq::nearest_source(op.scale[1], h, op.a.h));
    uint8_t* out = row_of(op.out, n, d, h);
    for (int64_t w = 0; w < op.out.w; ++w) {
      const uint8_t* from = a + xq::nearest_source(op.scale[2], w, op.a.w) * op.a.stride_w;
      for (int64_t c = 0; c < op.out.c; c += kBytes)
        store(out + w * op.out.stride_w + c, load(from + c, op.out.c - c), op.out.c - c);
    }
  }

  void mix(F part, F rest, const F a[4], const F b[4], F v[4]) const {
    for (int i = 0; i < 4; ++i) v[i] = V::fma(part, b[i], V::fma(rest, a[i], zero));
  }

  void bilinear(int64_t n, int64_t d, int64_t h) const {
    const xq::Mix y = xq::mix_of(op, 1, h, op.a.h);
    const uint8_t *top = row_of(op.a, n, d, y.low), *bottom = row_of(op.a, n, d, y.high);
    uint8_t* out = row_of(op.out, n, d, h);
    const F yp = V::setf(y.part), yr = V::setf(1 - y.part);
    for (int64_t w = 0; w < op.out.w; ++w) {
      const xq::Mix x = xq::mix_of(op, 2, w, op.a.w);
      const F xp = V::setf(x.part), xr = V::setf(1 - x.part);
      const int64_t low = x.low * op.a.stride_w, high = x.high * op.a.stride_w;
      for (int64_t c = 0; c < op.out.c; c += kBytes) {
        const int64_t count = op.out.c - c;
        F a[4], b[4], t[4], u[4];
        floats(load(top + low + c, count), a_zp, a), floats(load(top + high + c, count), a_zp, b);
        mix(xp, xr, a, b, t);
        floats(load(bottom + low + c, count), a_zp, a), floats(load(bottom + high + c, count), a_zp, b);
        mix(xp, xr, a, b, u);
        mix(yp, yr, t, u, t);
        for (F& v : t) v = V::fma(v, a_mult, zero);
        store(out + w * op.out.stride_w + c, quantize(t), count);
      }
    }
  }

  void run(int64_t n, int64_t d, int64_t h) const {
    switch (op.kind) {
      case XQ_OP_COPY:
      case XQ_OP_LUT:
      case XQ_OP_REQUANT: return unary(n, d, h);
      case XQ_OP_ADD:
      case XQ_OP_MUL: return binary(n, d, h);
      case XQ_OP_SHUFFLE: return shuffle(n, d, h);
      case XQ_OP_MAX_POOL: return max_pool(n, d, h);
      case XQ_OP_AVG_POOL:
      case XQ_OP_ADAPTIVE_POOL: return average(n, d, h);
      case XQ_OP_NEAREST: return nearest(n, d, h);
      default: return bilinear(n, d, h);
    }
  }
};

template <class V>
void op_rows(const xq_op& op, int64_t begin, int64_t end) {
  const Rows<V> rows(op);
  for (int64_t row = begin; row < end; ++row)
    rows.run(row / (op.out.d * op.out.h), row / op.out.h % op.out.d, row % op.out.h);
}

}  // namespace

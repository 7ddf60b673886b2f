// Element-wise ops, and the dispatch of all ops on rows.
#pragma once

#include "convert.h"
#include "norm.h"
#include "pool.h"
#include "rounding.h"
#include "upsample.h"

namespace {

// step(offset in a, in b, in out, bytes left) for every vector of a stretch.
template <class V, class Step>
XQ_INLINE inline void spans(const xq_op& op, int64_t pixels, bool joined, int64_t b_step, Step step) {
  const int64_t bytes = joined ? pixels * op.out.c : op.out.c, a_step = op.a.stride_w, out_step = op.out.stride_w;
  if (joined) pixels = 1;
  for (int64_t x = 0; x < pixels; ++x)
    for (int64_t i = 0; i < bytes; i += Bytes<V>::kCount)
      step(x * a_step + i, x * b_step + i, x * out_step + i, bytes - i);
}

template <class V, class Step>
XQ_INLINE inline void unary(const xq_op& op, const Stretch& s, Step step) {
  const uint8_t* a = row_of(op.a, s.n, s.d, s.h);
  uint8_t* out = row_of(op.out, s.n, s.d, s.h);
  spans<V>(op, s.pixels, adjacent(op.a, s.pixels) && adjacent(op.out, s.pixels), 0,
           [&](int64_t ia, int64_t, int64_t io, int64_t count) XQ_INLINE {
             Bytes<V>::store(out + io, step(a + ia, count), count);
           });
}

template <class V>
void copy(const xq_op& op, const Stretch& s) {
  unary<V>(op, s, [](const uint8_t* a, int64_t count) XQ_INLINE { return Bytes<V>::load(a, count); });
}

template <class V>
void look_up(const xq_op& op, const Stretch& s, const typename V::Table& table) {
  const typename V::Table local = table;
  unary<V>(op, s, [&](const uint8_t* a, int64_t count) XQ_INLINE {
    return local.look_up(Bytes<V>::load(a, count));
  });
}

template <class V>
void requantize(const xq_op& op, const Stretch& s, Rounding<V> round) {
  const auto zp = V::set32(op.a_zp);
  const auto mult = V::setf(op.a_mult);
  unary<V>(op, s, [&](const uint8_t* a, int64_t count) XQ_INLINE {
    typename V::F v[4];
    Bytes<V>::floats(a, count, zp, v);
    for (auto& x : v) x = V::mul(x, mult);
    return round.in_order(v);
  });
}

// What `join` makes of the floats of two vectors of codes, as codes.
template <class V, class Join>
struct Joined {
  typename V::I a_zp, b_zp;
  Rounding<V> round;
  Join join;

  XQ_INLINE typename V::I operator()(typename V::I a, typename V::I b) const {
    typename V::F v[4], w[4];
    Bytes<V>::woven(a, a_zp, v), Bytes<V>::woven(b, b_zp, w);
    for (int i = 0; i < 4; ++i) v[i] = join(v[i], w[i]);
    return round.woven(v);
  }
};

// Pixels of few channels that lie apart: 4 / VECS of them in a vector.
template <class V, int VECS, class Made>
XQ_INLINE inline void few_channels(const xq_op& op, int64_t pixels, const uint8_t* a, const uint8_t* b, int64_t b_step,
                                   uint8_t* out, const Made& made) {
  constexpr int64_t kEach = 4 / VECS;
  const int64_t a_step = op.a.stride_w, out_step = op.out.stride_w;
  const int c = static_cast<int>(op.out.c);
  for (int64_t x = 0; x < pixels; x += kEach, a += kEach * a_step, b += kEach * b_step, out += kEach * out_step) {
    const int some = static_cast<int>(xq::min64(kEach, pixels - x));
    V::template store_pixels<VECS>(out, out_step, made(V::template load_pixels<VECS>(a, a_step, some, c),
                                                       V::template load_pixels<VECS>(b, b_step, some, c)), some, c);
  }
}

template <class V, class Join>
XQ_INLINE inline void binary(const xq_op& op, const Stretch& s, Rounding<V> round, Join join) {
  const bool wide = xq::b_is_wide(op);
  const uint8_t *a = row_of(op.a, s.n, s.d, s.h), *b = wide ? row_of(op.b, s.n, s.d, s.h) : row_of(op.b, s.n, 0, 0);
  uint8_t* out = row_of(op.out, s.n, s.d, s.h);
  const bool joined = adjacent(op.a, s.pixels) && adjacent(op.out, s.pixels) && (s.pixels == 1 || (wide && adjacent(op.b, s.pixels)));
  const int64_t b_step = wide ? op.b.stride_w : 0;
  const Joined<V, Join> made{V::set32(op.a_zp), V::set32(op.b_zp), round, join};
  if (!joined && op.out.c <= V::kLanes) return few_channels<V, 1>(op, s.pixels, a, b, b_step, out, made);
  if (!joined && op.out.c <= 2 * V::kLanes) return few_channels<V, 2>(op, s.pixels, a, b, b_step, out, made);
  spans<V>(op, s.pixels, joined, b_step, [&](int64_t ia, int64_t ib, int64_t io, int64_t count) XQ_INLINE {
    Bytes<V>::store(out + io, made(Bytes<V>::load(a + ia, count), Bytes<V>::load(b + ib, count)), count);
  });
}

template <class V>
void add(const xq_op& op, const Stretch& s, Rounding<V> round) {
  const auto a_mult = V::setf(op.a_mult), b_mult = V::setf(op.b_mult);
  using F = typename V::F;
  binary<V>(op, s, round, [&](F a, F b) XQ_INLINE { return V::fma(a, a_mult, V::mul(b, b_mult)); });
}

template <class V>
void multiply(const xq_op& op, const Stretch& s, Rounding<V> round) {
  const auto mult = V::setf(op.a_mult);
  using F = typename V::F;
  binary<V>(op, s, round, [&](F a, F b) XQ_INLINE { return V::mul(V::mul(a, b), mult); });
}

template <class V>
void shuffle_pair(const uint8_t* a, int64_t each, uint8_t* out) {
  for (int64_t i = 0; i < each; i += Bytes<V>::kCount) {
    const int64_t count = 2 * xq::min64(each - i, Bytes<V>::kCount);
    typename V::I v[2];
    V::interleave(Bytes<V>::load(a + i, each - i), Bytes<V>::load(a + each + i, each - i), v);
    Bytes<V>::store(out + 2 * i, v[0], count);
    if (count > Bytes<V>::kCount) Bytes<V>::store(out + 2 * i + Bytes<V>::kCount, v[1], count - Bytes<V>::kCount);
  }
}

template <class V>
void shuffle(const xq_op& op, const Stretch& s) {
  const int64_t groups = op.groups, each = op.a.c / groups;
  const uint8_t* a = row_of(op.a, s.n, s.d, s.h);
  uint8_t* out = row_of(op.out, s.n, s.d, s.h);
  for (int64_t x = 0; x < s.pixels; ++x, a += op.a.stride_w, out += op.out.stride_w) {
    if (groups == 2) {
      shuffle_pair<V>(a, each, out);
      continue;
    }
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t i = 0; i < each; ++i) out[i * groups + g] = a[g * each + i];
  }
}

template <class V>
void op_stretch(const xq_op& op, const Stretch& s, const typename V::Table* table) {
  const Rounding<V> round(op, table);
  switch (op.kind) {
    case XQ_OP_COPY: return copy<V>(op, s);
    case XQ_OP_LUT: return look_up<V>(op, s, *table);
    case XQ_OP_REQUANT: return requantize<V>(op, s, round);
    case XQ_OP_ADD: return add<V>(op, s, round);
    case XQ_OP_MUL: return multiply<V>(op, s, round);
    case XQ_OP_SHUFFLE: return shuffle<V>(op, s);
    case XQ_OP_MAX_POOL: return max_pool<V>(op, s);
    case XQ_OP_AVG_POOL:
    case XQ_OP_ADAPTIVE_POOL: return average<V>(op, s, round);
    case XQ_OP_NEAREST: return nearest<V>(op, s);
    case XQ_OP_BILINEAR: return bilinear<V>(op, s, round);
    case XQ_OP_QUANTIZE: return quantize<V>(op, s, round);
    case XQ_OP_DEQUANTIZE: return dequantize<V>(op, s);
    case XQ_OP_LUT_REAL: return look_up_reals<V>(op, s);
    case XQ_OP_AFFINE: return affine<V>(op, s, round);
    default: return layer_norm<V>(op, s, round);
  }
}

// Rows that make one stretch: 1, those of a depth, of an image, or all.
inline int64_t chained(const xq_tensor& t) {
  const int64_t row = t.w * t.stride_w;
  if (t.h > 1 && t.stride_h != row) return 1;
  if (t.d > 1 && t.stride_d != t.h * row) return t.h;
  return t.n > 1 && t.stride_n != t.d * t.h * row ? t.h * t.d : t.h * t.d * t.n;
}

inline int64_t stretch_rows(const xq_op& op) {
  if (!xq::pixelwise(op)) return 1;
  int64_t rows = xq::min64(chained(op.a), chained(op.out));
  if (op.kind != XQ_OP_ADD && op.kind != XQ_OP_MUL) return rows;
  if (!xq::b_is_wide(op)) return xq::min64(rows, op.out.d * op.out.h);
  return xq::min64(rows, chained(op.b));
}

template <class V>
void op_stretches(const xq_op& op, int64_t begin, int64_t end, const typename V::Table* table) {
  const int64_t most = stretch_rows(op);
  for (int64_t row = begin; row < end;) {
    const int64_t rows = xq::min64(most - row % most, end - row);
    op_stretch<V>(op, {row / (op.out.d * op.out.h), row / op.out.h % op.out.d, row % op.out.h, rows * op.out.w}, table);
    row += rows;
  }
}

template <class V>
void op_rows(const xq_op& op, int64_t begin, int64_t end) {
  if (!op.lut) return op_stretches<V>(op, begin, end, nullptr);
  const typename V::Table table(op.lut);
  op_stretches<V>(op, begin, end, &table);
}

}  // namespace

// Products of floats, and functions of their results, over the vector type of float_lanes.h.
#pragma once

#include "float_products.h"
#include "gate_rows.h"
#include "internal.h"
#include "unroll.h"

namespace {

constexpr int kVectorsAPanel = XQ_PANEL / Lanes::kLanes;
constexpr int kMostVectors = Lanes::kLanes == 16 ? 4 : 2;
// Features whose weights, for kMostVectors vectors, stay in the second cache while rows pass.
constexpr int64_t kFeaturesAtOnce = 512;

// Rows of a tile: its sums, weights and one input fill the registers.
constexpr int rows_of(int vectors) {
  if (Lanes::kLanes == 16) return vectors == 4 ? 6 : vectors == 3 ? 8 : 12;
  return vectors == 2 ? 6 : 12;
}

struct Stretch {
  int64_t from, to;  // of features
  bool onto;         // sums go on, instead of starting from the bias
};

// The first `rows` of ROWS rows, from `row` on, times VECS vectors of output features, from vector `first` on.
template <int ROWS, int VECS>
void product_tile(const xq_float_product& op, Stretch s, int64_t row, int64_t rows, int64_t first) {
  using F = Lanes::F;
  const float *in[ROWS], *weight[VECS];
  F sum[ROWS * VECS];
  unroll<ROWS>([&](int r) XQ_INLINE { in[r] = op.in + (row + (r < rows ? r : 0)) * op.in_stride; });
  unroll<VECS>([&](int v) XQ_INLINE {
    const int64_t panel = (first + v) / kVectorsAPanel, lane = (first + v) % kVectorsAPanel * Lanes::kLanes;
    weight[v] = op.weight + (panel * op.panel + op.skipped) * XQ_PANEL + lane;
    const int64_t n = (first + v) * Lanes::kLanes, left = op.out_features - n;
    unroll<ROWS>([&](int r) XQ_INLINE {
      const float* so_far = op.out + (row + (r < rows ? r : 0)) * op.out_stride + n;
      if (!s.onto) sum[r * VECS + v] = Lanes::load(op.bias + n);
      else sum[r * VECS + v] = left >= Lanes::kLanes ? Lanes::load(so_far) : Lanes::load_some(so_far, left);
    });
  });
  for (int64_t k = s.from; k < s.to; ++k) {
    F w[VECS];
    unroll<VECS>([&](int v) XQ_INLINE { w[v] = Lanes::load(weight[v] + k * XQ_PANEL); });
    unroll<ROWS>([&](int r) XQ_INLINE {
      const F x = Lanes::set(in[r][k]);
      unroll<VECS>([&](int v) XQ_INLINE { sum[r * VECS + v] = Lanes::fma(x, w[v], sum[r * VECS + v]); });
    });
  }
  unroll<ROWS>([&](int r) XQ_INLINE {
    if (r >= rows) return;
    unroll<VECS>([&](int v) XQ_INLINE {
      const int64_t n = (first + v) * Lanes::kLanes, left = op.out_features - n;
      float* to = op.out + (row + r) * op.out_stride + n;
      left >= Lanes::kLanes ? Lanes::store(to, sum[r * VECS + v]) : Lanes::store_some(to, sum[r * VECS + v], left);
    });
  });
}

template <int VECS>
void product_vectors(const xq_float_product& op, Stretch s, int64_t begin, int64_t end, int64_t first) {
  constexpr int kRows = rows_of(VECS);
  int64_t row = begin;
  for (; end - row > 1; row += kRows) product_tile<kRows, VECS>(op, s, row, xq::min64(end - row, kRows), first);
  if (row < end) product_tile<1, VECS>(op, s, row, 1, first);
}

void float_product(const xq_float_product& op, int64_t begin, int64_t end) {
  const int64_t vectors = (op.out_features + Lanes::kLanes - 1) / Lanes::kLanes;
  for (int64_t from = 0; from < op.features; from += kFeaturesAtOnce) {
    const Stretch s{from, xq::min64(from + kFeaturesAtOnce, op.features), from > 0 || op.onto};
    int64_t first = 0;
    for (; vectors - first >= kMostVectors; first += kMostVectors) product_vectors<kMostVectors>(op, s, begin, end, first);
    switch (vectors - first) {
      case 3: product_vectors<min_of(3, kMostVectors)>(op, s, begin, end, first); break;
      case 2: product_vectors<min_of(2, kMostVectors)>(op, s, begin, end, first); break;
      case 1: product_vectors<1>(op, s, begin, end, first); break;
      default: break;
    }
  }
}

// A vector of channels of PIXELS pixels, whose taps come ACROSS at a time: neighbours share what they look at.
template <int PIXELS, int ACROSS, bool WHOLE>
XQ_INLINE inline void tap_sums(const xq_float_taps& op, int64_t pixel, int64_t c) {
  using F = Lanes::F;
  const int64_t left = op.channels - c;
  const auto load = [&](const float* p) XQ_INLINE { return WHOLE ? Lanes::load(p) : Lanes::load_some(p, left); };
  const float* in = op.in + pixel * op.in_stride + c;
  F sum[PIXELS];
  unroll<PIXELS>([&](int p) XQ_INLINE { sum[p] = load(op.bias + c); });
  for (int64_t t = 0; t < op.taps; t += ACROSS) {
    F w[ACROSS];
    unroll<ACROSS>([&](int k) XQ_INLINE { w[k] = load(op.weight + op.which[t + k] * op.channels + c); });
    const float* from = in + op.offsets[t];
    unroll<PIXELS + ACROSS - 1>([&](int x) XQ_INLINE {
      const F seen = load(from + x * op.in_stride);
      unroll<ACROSS>([&](int k) XQ_INLINE {
        if (x - k >= 0 && x - k < PIXELS) sum[x - k] = Lanes::fma(seen, w[k], sum[x - k]);
      });
    });
  }
  unroll<PIXELS>([&](int p) XQ_INLINE {
    float* to = op.out + (pixel + p) * op.out_stride + c;
    WHOLE ? Lanes::store(to, sum[p]) : Lanes::store_some(to, sum[p], left);
  });
}

template <int PIXELS, int ACROSS>
void tap_pixels(const xq_float_taps& op, int64_t pixel) {
  int64_t c = 0;
  for (; c + Lanes::kLanes <= op.channels; c += Lanes::kLanes) tap_sums<PIXELS, ACROSS, true>(op, pixel, c);
  if (c < op.channels) tap_sums<PIXELS, ACROSS, false>(op, pixel, c);
}

template <int ACROSS>
void tap_lines(const xq_float_taps& op, int64_t begin, int64_t end) {
  int64_t pixel = begin;
  for (; pixel + 6 <= end; pixel += 6) tap_pixels<6, ACROSS>(op, pixel);
  for (; pixel < end; ++pixel) tap_pixels<1, 1>(op, pixel);
}

void float_taps(const xq_float_taps& op, int64_t begin, int64_t end) {
  switch (op.across) {
    case 3: return tap_lines<3>(op, begin, end);
    case 5: return tap_lines<5>(op, begin, end);
    default: return tap_lines<1>(op, begin, end);
  }
}

// One function of VECS vectors, whose x is beside them.
template <int VECS>
XQ_INLINE inline void apply(const xq_float_function& f, Lanes::F (&y)[VECS], Lanes::F (&x)[VECS]) {
  using F = Lanes::F;
  const F a = Lanes::set(f.a);
  const auto each = [&](auto of) XQ_INLINE { unroll<VECS>([&](int v) XQ_INLINE { y[v] = of(y[v]); }); };
  switch (f.kind) {
    case XQ_FLOAT_ADD: return each([&](F v) XQ_INLINE { return Lanes::add(v, a); });
    case XQ_FLOAT_MUL: return each([&](F v) XQ_INLINE { return Lanes::mul(v, a); });
    case XQ_FLOAT_LEAST: return each([&](F v) XQ_INLINE { return Lanes::max(a, v); });
    case XQ_FLOAT_MOST: return each([&](F v) XQ_INLINE { return Lanes::min(a, v); });
    case XQ_FLOAT_SIGMOID:
      return each([&](F v) XQ_INLINE {
        const Ratio r = half_tanh_of(v);
        return Lanes::ratio(up(r), twice(r.bottom));
      });
    case XQ_FLOAT_TANH:
      return each([&](F v) XQ_INLINE {
        const Ratio r = tanh_of(v);
        return Lanes::ratio(r.top, r.bottom);
      });
    case XQ_FLOAT_TIMES_X: return unroll<VECS>([&](int v) XQ_INLINE { y[v] = Lanes::mul(y[v], x[v]); });
    default: unroll<VECS>([&](int v) XQ_INLINE { x[v] = y[v]; });
  }
}

void float_functions(const xq_float_function* functions, int64_t how_many, float* values, int64_t count) {
  using F = Lanes::F;
  constexpr int kVecs = 4;
  int64_t i = 0;
  for (; i + kVecs * Lanes::kLanes <= count; i += kVecs * Lanes::kLanes) {
    F y[kVecs], x[kVecs];
    unroll<kVecs>([&](int v) XQ_INLINE { x[v] = y[v] = Lanes::load(values + i + v * Lanes::kLanes); });
    for (int64_t f = 0; f < how_many; ++f) apply(functions[f], y, x);
    unroll<kVecs>([&](int v) XQ_INLINE { Lanes::store(values + i + v * Lanes::kLanes, y[v]); });
  }
  for (; i < count; i += Lanes::kLanes) {
    const int64_t left = xq::min64(count - i, Lanes::kLanes);
    F y[1] = {Lanes::load_some(values + i, left)}, x[1] = {y[0]};
    for (int64_t f = 0; f < how_many; ++f) apply(functions[f], y, x);
    Lanes::store_some(values + i, y[0], left);
  }
}

}  // namespace

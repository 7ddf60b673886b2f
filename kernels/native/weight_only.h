// Float rows times int8 weights that are read as they lie: for few rows, where reading is the cost.
#pragma once

#include "float_epilogue.h"
#include "internal.h"
#include "unroll.h"

namespace {

// Int8 weights as floats, `count` of them; the rest is 0.
template <class V>
XQ_INLINE inline typename V::F weights_at(const int8_t* w, int64_t count) {
  if (count >= V::kLanes) return V::to_float(V::widen_signed(w));
  alignas(64) int8_t copy[V::kLanes] = {};
  memcpy(copy, w, static_cast<size_t>(count));
  return V::to_float(V::widen_signed(copy));
}

// ROWS rows times OUTPUTS rows of weights.
template <class V, int ROWS, int OUTPUTS>
void weight_only_tile(const xq::WeightOnlyTask& t, int64_t row, int64_t output) {
  using F = typename V::F;
  F acc[ROWS * OUTPUTS];
  unroll<ROWS * OUTPUTS>([&](int i) XQ_INLINE { acc[i] = V::setf(0); });
  const float* x = t.in + row * t.in_stride;
  const int8_t* w = t.weight + output * t.features;
  auto step = [&](int64_t k, int64_t count) XQ_INLINE {
    F rows[ROWS];
    unroll<ROWS>([&](int r) XQ_INLINE { rows[r] = V::load_floats(x + r * t.in_stride + k, count); });
    unroll<OUTPUTS>([&](int o) XQ_INLINE {
      const F weights = weights_at<V>(w + o * t.features + k, count);
      unroll<ROWS>([&](int r) XQ_INLINE { acc[r * OUTPUTS + o] = V::fma(rows[r], weights, acc[r * OUTPUTS + o]); });
    });
  };
  int64_t k = 0;
  for (; k + V::kLanes <= t.features; k += V::kLanes) step(k, V::kLanes);
  if (k < t.features) step(k, t.features - k);
  for (int r = 0; r < ROWS; ++r)
    for (int o = 0; o < OUTPUTS; ++o) t.out[(row + r) * t.out_stride + output + o] = V::total(acc[r * OUTPUTS + o]);
}

template <class V, int OUTPUTS>
void weight_only_rows(const xq::WeightOnlyTask& t, int64_t output) {
  for (int64_t row = 0; row < t.rows; row += 4) switch (xq::min64(t.rows - row, 4)) {
      case 1: weight_only_tile<V, 1, OUTPUTS>(t, row, output); break;
      case 2: weight_only_tile<V, 2, OUTPUTS>(t, row, output); break;
      case 3: weight_only_tile<V, 3, OUTPUTS>(t, row, output); break;
      default: weight_only_tile<V, 4, OUTPUTS>(t, row, output); break;
    }
}

template <class V, int ACTIVATION>
void finish_sums(const xq::WeightOnlyTask& t) {
  for (int64_t row = 0; row < t.rows; ++row)
    for (int64_t o = t.begin; o < t.end; o += V::kLanes) {
      const int64_t count = t.end - o;
      float* out = t.out + row * t.out_stride + o;
      const auto bias = t.bias ? V::load_floats(t.bias + o, count) : V::setf(0);
      const auto v = V::fma(V::load_floats(out, count), V::load_floats(t.scale + o, count), bias);
      V::store_floats(out, activate<V, ACTIVATION>(v), count);
    }
}

template <class V>
void weight_only(const xq::WeightOnlyTask& t) {
  int64_t output = t.begin;
  for (; output + 4 <= t.end; output += 4) weight_only_rows<V, 4>(t, output);
  for (; output < t.end; ++output) weight_only_rows<V, 1>(t, output);
  switch (t.activation) {
    case XQ_ACT_RELU: return finish_sums<V, XQ_ACT_RELU>(t);
    case XQ_ACT_GELU: return finish_sums<V, XQ_ACT_GELU>(t);
    case XQ_ACT_GELU_TANH: return finish_sums<V, XQ_ACT_GELU_TANH>(t);
    case XQ_ACT_SILU: return finish_sums<V, XQ_ACT_SILU>(t);
    case XQ_ACT_SIGMOID: return finish_sums<V, XQ_ACT_SIGMOID>(t);
    case XQ_ACT_TANH: return finish_sums<V, XQ_ACT_TANH>(t);
    default: return finish_sums<V, XQ_ACT_NONE>(t);
  }
}

}  // namespace

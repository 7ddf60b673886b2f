// Dot products of all pairs of a sample's vectors.
#pragma once

#include "float_lanes.h"
#include "float_loops.h"
#include "unroll.h"

namespace {

// The products of `a` with COUNT vectors that lie one behind the other.
template <int COUNT>
XQ_INLINE inline void dots(const float* a, const float* b, int64_t dim, float* out) {
  using F = Lanes::F;
  F acc[COUNT];
  unroll<COUNT>([&](int i) XQ_INLINE { acc[i] = Lanes::set(0); });
  int64_t k = 0;
  for (; k + Lanes::kLanes <= dim; k += Lanes::kLanes) {
    const F v = Lanes::load(a + k);
    unroll<COUNT>([&](int i) XQ_INLINE { acc[i] = Lanes::fma(v, Lanes::load(b + i * dim + k), acc[i]); });
  }
  if (k < dim) {
    const F v = Lanes::load_some(a + k, dim - k);
    unroll<COUNT>([&](int i) XQ_INLINE { acc[i] = Lanes::fma(v, Lanes::load_some(b + i * dim + k, dim - k), acc[i]); });
  }
  unroll<COUNT>([&](int i) XQ_INLINE { out[i] = Lanes::total(acc[i]); });
}

void interact(const xq_interaction& op, int64_t begin, int64_t end) {
  const int64_t dim = op.dim;
  for (int64_t n = begin; n < end; ++n) {
    const float *first = op.first + n * op.first_stride, *in = op.in + n * op.in_stride;
    float* out = op.out + n * op.out_stride;
    memcpy(out, first, static_cast<size_t>(dim) * sizeof(float));
    out += dim;
    for (int64_t row = 0; row < op.vectors; ++row) {
      const float* a = in + row * dim;
      dots<1>(a, first, dim, out++);
      int64_t other = 0;
      for (; other + 8 <= row; other += 8) dots<8>(a, in + other * dim, dim, out + other);
      if (other + 4 <= row) dots<4>(a, in + other * dim, dim, out + other), other += 4;
      for (; other < row; ++other) dots<1>(a, in + other * dim, dim, out + other);
      out += row;
    }
  }
}

}  // namespace

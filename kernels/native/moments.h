// Layer normalization of a pixel from the sums of its codes: the same arithmetic on every ISA.
#pragma once

#include "internal.h"

namespace xq {

// A code x is normalized as fma(x, mult, shift).
struct Norm {
  float mult, shift;
};

static inline Norm norm_of(int64_t sum, int64_t squares, int64_t channels, float eps) {
  const double n = static_cast<double>(channels);
  // Integers up to here: nothing cancels.
  const double variance = static_cast<double>(channels * squares - sum * sum) / (n * n);
  const double rstd = 1.0 / __builtin_sqrt(variance + static_cast<double>(eps));
  const double mean = static_cast<double>(sum) / n;
  return {static_cast<float>(rstd), static_cast<float>(-mean * rstd)};
}

}  // namespace xq

// What the overflow proof needs to know of weights, as kernels/saturation.py says and computes in plain torch.
#pragma once

#include <cstdint>

namespace x86quant::runtime {

// The least and the greatest of some sums, and 0.
struct SumRange {
  int64_t low = 0, high = 0;
};

struct WeightExtremes {
  SumRange neighbours;  // of weights (0, 1), (2, 3), ... of a row
  SumRange any_two;     // of a row
  SumRange rows;        // of all positive weights of a row, or of all negative ones
};

// Of `rows` rows of `size` weights, one behind the other. In one pass.
WeightExtremes weight_extremes(const int8_t* weights, int64_t rows, int64_t size);

}  // namespace x86quant::runtime

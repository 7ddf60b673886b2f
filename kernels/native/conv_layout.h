// What a packed convolution or linear looks like, before any weight is seen: its algorithm, and where what lies.
#pragma once

#include <vector>

#include "conv_phases.h"
#include "internal.h"

namespace xq {

// Everything about a blob that does not depend on the weights' values.
struct Layout {
  Packed head{};
  std::vector<Block> blocks;
  std::vector<Run> runs;
  int64_t scalars = 0;   // elements of corr, mult and bias
  int64_t weight_bytes = 0;
};

inline int64_t taps_of(const xq_conv& c) { return int64_t{c.kernel[0]} * c.kernel[1] * c.kernel[2]; }

// Groups narrower than a block are joined into one; wider ones get blocks of their own.
int64_t joined_groups(const Packed& head);

// The same convolution by another algorithm than 4 x 4 tiles.
xq_conv without_winograd4(const xq_conv& conv, int isa);

// With `float_out` for results that are floats, which want the sums of weights.
Layout layout_of(const xq_conv& conv, int isa, bool float_out = false);
Layout layout_of_phase(const xq_conv& whole, const Phase& phase, int isa);

}  // namespace xq

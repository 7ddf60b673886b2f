// Weights of Winograd convolutions.
#pragma once

#include "internal.h"

namespace xq {

// Whether 4 x 4 tiles give the right sums whatever the input: weights are (out, in / groups, 3, 3).
bool within_winograd_reach(const xq_conv& conv, const int8_t* weight);

// Writes the weights of the blocks from `first` to before `end`, of those that `head` speaks of, to `to`: position by
// position pairs of input channels for each output channel of a block.
void pack_winograd(const Packed& head, const Block* first, const Block* end, const int8_t* weight, int8_t* to);

}  // namespace xq

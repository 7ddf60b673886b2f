// Strips of a depthwise convolution, and its weights as they meet them. See README.md.
#pragma once

#include "internal.h"

namespace xq {

// Chooses `depthwise` and `turned` for the geometry in the head; turns it where that is better.
void plan_depthwise(Packed& head);

// Packs the blocks [first, end) of the weights (channels, 1, kd, kh, kw), which begin at `to`. What a block has is zero before.
void pack_depthwise(const Packed& head, const Block* first, const Block* end, const int8_t* weight, int8_t* to);

}  // namespace xq

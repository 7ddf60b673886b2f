// Orders of weights in which u8 x s8 products can be summed in 16 bits, where there is no VNNI.
#pragma once

#include "internal.h"

namespace xq {

// Moves couples of quads that are safe together before the others, then those that are safe in some pairing,
// their bytes so ordered that pairs are adjacent. Writes a run's part of Packed::order; returns its end.
int32_t* order_quads(int8_t* w, int64_t quads, int64_t quad_bytes, int32_t* order);

// Shuffles each 16 bytes of a block's only run if more pairs are then safe than that costs; `from` says from
// where in its window each byte came.
bool regroup_quads(int8_t* w, const Run& run, int64_t quad_bytes, uint8_t* from);

// Orders the bytes of every lane of a quad, and their places, so that pairs are safe, if all lanes have such
// an order.
bool order_lanes(int8_t* w, int64_t lanes, uint8_t* places);

}  // namespace xq

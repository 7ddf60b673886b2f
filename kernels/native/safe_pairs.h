// Orders of weights in which u8 x s8 products can be summed in 16 bits, where there is no VNNI.
#pragma once

#include "internal.h"

namespace xq {

// Orders the quads of a run as Packed::order describes, and writes its part of that. With `from` the bytes of
// each 16 are shuffled first where that pays for the copying: then true, and `from` says from where in its
// window each byte came.
bool order_run(int8_t* w, const Run& run, int64_t quad_bytes, int32_t* order, uint8_t* from);

// Orders the bytes of every lane of a quad, and their places, so that pairs are safe, if all lanes have such
// an order.
bool order_lanes(int8_t* w, int64_t lanes, uint8_t* places);

}  // namespace xq

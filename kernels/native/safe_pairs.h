// Orders of weights in which u8 x s8 products can be summed in 16 bits, where there is no VNNI.
#pragma once

#include "internal.h"

namespace xq {

// How the bytes of the windows of 16 of each run are rearranged: from where in its window each byte comes (the last window
// is read so that it ends with the run), whether it is flipped (255: to 255 minus it, as its weights changed their
// signs), and what a channel's sums lack after that.
struct Regroup {
  uint8_t *from, *flip;
  int32_t* more;
};

// Orders the quads of a block's runs as Packed::order describes, and writes its part of that. With `to` the bytes
// are regrouped first where that pays for the copying: then true.
bool order_block(int8_t* w, const Run* runs, int32_t n_runs, int64_t quad_bytes, int32_t* order, const Regroup* to);

// Orders the bytes of every lane of a quad, and their places, so that pairs are safe, if all lanes have such
// an order.
bool order_lanes(int8_t* w, int64_t lanes, uint8_t* places);

}  // namespace xq

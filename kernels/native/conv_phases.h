// A transposed convolution with a stride as several ordinary ones.
//
// Along one axis output y meets tap k at input (y + padding - k) / stride, where that is whole. So outputs whose y + padding
// leave the same rest r meet the same taps r, r + stride, ..., at inputs that follow each other: an ordinary convolution of
// those taps in reverse, whose results lie `stride` apart. With a phase for each rest of each axis no tap meets the zero
// points between stretched pixels, which are all but one in stride of them.
#pragma once

#include "internal.h"

namespace xq {

// More would each be too little work.
constexpr int64_t kMostPhases = 64;

// How many there are; 0 where the convolution is better done as one.
inline int64_t phases_of(const xq_conv& c) {
  if (!c.transposed) return 0;
  int64_t phases = 1;
  for (int i = 0; i < 3; ++i) {
    // A rest that no tap has would be a phase of nothing; taps further apart than pixels meet other rests.
    if (c.kernel[i] < c.stride[i] || c.dilation[i] != 1) return 0;
    phases *= c.stride[i];
    if (phases > kMostPhases) return 0;
  }
  return phases > 1 ? phases : 0;
}

// One of them.
struct Phase {
  int64_t rest[3], taps[3], first[3], pad[3];  // `first`: its first output; `pad`: what it wants in front of the input

  Phase(const xq_conv& c, int64_t index) {
    for (int i = 2; i >= 0; --i) {
      const int64_t stride = c.stride[i];
      rest[i] = index % stride, index /= stride;
      taps[i] = ceil_div(c.kernel[i] - rest[i], stride);
      const int64_t before = max64(ceil_div(c.padding[i] - rest[i], stride), 0);  // multiples of the stride in the padding
      first[i] = before * stride + rest[i] - c.padding[i];
      pad[i] = taps[i] - 1 - before;
    }
  }

  xq_conv conv(const xq_conv& c) const {
    xq_conv own = c;
    own.transposed = 0, own.algo = XQ_ALGO_DENSE, own.pixels = 0;
    for (int i = 0; i < 3; ++i) own.kernel[i] = static_cast<int32_t>(taps[i]), own.stride[i] = 1, own.padding[i] = 0;
    return own;
  }

  // The tap of the whole that an ordinary convolution's tap is, along one axis.
  int64_t tap_of(const xq_conv& c, int axis, int64_t tap) const { return rest[axis] + c.stride[axis] * (taps[axis] - 1 - tap); }

  // Its outputs in a tensor of all.
  xq_tensor part_of(const xq_conv& c, const xq_tensor& all) const {
    xq_tensor own = all;
    int64_t* const sizes[3] = {&own.d, &own.h, &own.w};
    int64_t* const strides[3] = {&own.stride_d, &own.stride_h, &own.stride_w};
    for (int i = 0; i < 3; ++i) {
      if (own.data) own.data += first[i] * *strides[i];
      *sizes[i] = max64(ceil_div(*sizes[i] - first[i], c.stride[i]), 0);
      *strides[i] *= c.stride[i];
    }
    return own;
  }
};

}  // namespace xq

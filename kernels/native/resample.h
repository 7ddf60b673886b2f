// Which source pixels an output pixel of a pool or an upsampling looks at.
#pragma once

#include "internal.h"

namespace xq {

struct Range {
  int64_t begin, end;
};

static inline int64_t tap_at(const xq_op& op, int axis, int64_t out, int64_t tap) {
  return out * op.stride[axis] - op.padding[axis] + tap * op.dilation[axis];
}

// The window of an average and what its sum is multiplied with.
struct PoolBox {
  Range axis[3];
  int64_t pixels;
  float mult;
};

static inline PoolBox pool_box(const xq_op& op, int64_t d, int64_t h, int64_t w) {
  const int64_t at[3] = {d, h, w}, in[3] = {op.a.d, op.a.h, op.a.w};
  const int64_t size[3] = {op.out.d, op.out.h, op.out.w};
  PoolBox box;
  box.pixels = 1;
  int64_t padded = 1;
  for (int i = 0; i < 3; ++i) {
    if (op.kind == XQ_OP_ADAPTIVE_POOL) {
      box.axis[i] = {at[i] * in[i] / size[i], ceil_div((at[i] + 1) * in[i], size[i])};
    } else {
      const int64_t begin = tap_at(op, i, at[i], 0);
      const int64_t end = min64(begin + op.kernel[i], in[i] + op.padding[i]);
      padded *= end - begin;
      box.axis[i] = {max64(begin, 0), min64(end, in[i])};
    }
    box.pixels *= max64(box.axis[i].end - box.axis[i].begin, 0);
  }
  const bool all = op.kind == XQ_OP_AVG_POOL && op.count_include_pad;
  box.mult = op.a_mult / static_cast<float>(max64(all ? padded : box.pixels, 1));
  return box;
}

// The two source indices of one axis of a bilinear pixel and the share of the second.
struct Mix {
  int64_t low, high;
  float part;
};

static inline Mix mix_of(const xq_op& op, int axis, int64_t out, int64_t size) {
  const float scale = op.scale[axis], o = static_cast<float>(out);
  float x = op.align_corners ? scale * o : scale * (o + 0.5f) - 0.5f;
  x = x < 0 ? 0 : x;
  const int64_t low = min64(static_cast<int64_t>(x), size - 1);
  const float part = x - static_cast<float>(low);
  return {low, min64(low + 1, size - 1), part < 1 ? part : 1.0f};
}

static inline int64_t nearest_source(float scale, int64_t out, int64_t size) {
  return min64(static_cast<int64_t>(static_cast<float>(out) * scale), size - 1);
}

}  // namespace xq

#include "depthwise_pack.h"

#include <utility>

namespace xq {
namespace {

// Few groups of 4 input rows cost little to interleave but serve few output rows. The weights 3
// and 1 are instructions an input column and a product.
struct DepthwiseCost {
  DepthwisePlan plan;
  double cost;
};

DepthwiseCost depthwise_cost(const Geometry& g) {
  const int64_t kh = g.kernel[1], least = ceil_div(kh, 4), shift = g.stride[0] / g.dilation[0];
  const int64_t woven = g.stride[0] % g.dilation[0] ? g.kernel[0] : min64(shift, g.kernel[0]);
  DepthwiseCost best{{1, 1}, 1e30};
  for (int64_t quads = least; quads <= least + (g.dilation[1] > 1 ? 0 : 2); ++quads) {
    const int64_t rows = g.dilation[1] > 1 ? 1 : (4 * quads - kh) / g.stride[1] + 1;
    int64_t products = 0;
    for (int64_t r = 0; r < rows; ++r)
      products += (r * g.stride[1] + kh - 1) / 4 - r * g.stride[1] / 4 + 1;
    const double cost =
        (3.0 * static_cast<double>(woven * quads * g.stride[2]) + static_cast<double>(products * g.kernel[0] * g.kernel[2])) /
        static_cast<double>(rows);
    if (rows <= 6 && cost < best.cost * 0.99)
      best = {{static_cast<int32_t>(rows), static_cast<int32_t>(quads)}, cost};
  }
  return best;
}

// Depth and height may change places, by strides: four bytes of a kernel without height are four slices.
Geometry turned(Geometry g) {
  for (int64_t* of : {g.kernel, g.dilation, g.stride, g.pad, g.up}) std::swap(of[0], of[1]);
  return g;
}

}  // namespace

void plan_depthwise(Packed& head) {
  const DepthwiseCost upright = depthwise_cost(head.geo);
  head.depthwise = upright.plan;
  if (head.geo.kernel[0] == 1) return;
  const Geometry other = turned(head.geo);
  const DepthwiseCost across = depthwise_cost(other);
  if (across.cost < upright.cost) head.geo = other, head.depthwise = across.plan, head.turned = 1;
}

void pack_depthwise(const Packed& head, const Block* first, const Block* end, const int8_t* weight, int8_t* to) {
  const int64_t kd = head.geo.kernel[0], kh = head.geo.kernel[1], kw = head.geo.kernel[2];
  const int halves = depthwise_halves(head.isa);
  for (const Block* block = first; block < end; ++block) {
    int8_t* at = to + block->w_off;
    // Four taps along height, from `top` on, of one vector of channels.
    const auto put = [&](int64_t z, int64_t top, int64_t x, int vec) {
      for (int lane = 0; lane < head.lanes; ++lane)
        for (int i = 0; i < 4; ++i) {
          const int64_t c = channel_of(block->vecs, vec, lane), y = top + i;
          if (c >= block->count || y < 0 || y >= kh) continue;
          const int64_t row = head.turned ? y * kd + z : z * kh + y;
          const int8_t value = weight[((block->out_c + c) * kd * kh + row) * kw + x];
          if (halves == 1) at[lane * 4 + i] = value;
          else reinterpret_cast<int16_t*>(at)[(i % 2 * head.lanes + lane) * 2 + i / 2] = value;
        }
      at += halves * head.lanes * 4;
    };
    for (int64_t r = 0; r < head.depthwise.rows; ++r)
      for (int64_t z = 0; z < kd; ++z)
        for (int64_t quad = 0; quad < head.depthwise.quads; ++quad)
          for (int64_t x = 0; x < kw; ++x)
            for (int vec = 0; vec < block->vecs; ++vec) put(z, quad * 4 - r * head.geo.stride[1], x, vec);
  }
}

}  // namespace xq

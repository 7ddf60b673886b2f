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
  DepthwiseCost best{{1, 1, 0}, 1e30};
  for (int64_t quads = least; quads <= least + (g.dilation[1] > 1 ? 0 : 2); ++quads) {
    const int64_t rows = g.dilation[1] > 1 ? 1 : (4 * quads - kh) / g.stride[1] + 1;
    int64_t products = 0;
    for (int64_t r = 0; r < rows; ++r)
      products += (r * g.stride[1] + kh - 1) / 4 - r * g.stride[1] / 4 + 1;
    const double cost =
        (3.0 * static_cast<double>(woven * quads * g.stride[2]) + static_cast<double>(products * g.kernel[0] * g.kernel[2])) /
        static_cast<double>(rows);
    if (rows <= 6 && cost < best.cost * 0.99)
      best = {{static_cast<int32_t>(rows), static_cast<int32_t>(quads), 0}, cost};
  }
  return best;
}

// Depth and height may change places, by strides: four bytes of a kernel without height are four slices.
Geometry turned(Geometry g) {
  for (int64_t* of : {g.kernel, g.dilation, g.stride, g.pad, g.up}) std::swap(of[0], of[1]);
  return g;
}

// Whether strips are not worth weaving: without VNNI they are stored twice as wide, and with a stride few taps meet a byte.
bool taps_are_few(const Packed& head) {
  const Geometry& g = head.geo;
  return head.isa == XQ_ISA_AVX2 && g.kernel[0] == 1 && g.kernel[1] * g.kernel[2] == kNineTaps && g.stride[1] > 1 && g.stride[2] > 1;
}

}  // namespace

void plan_depthwise(Packed& head) {
  if (taps_are_few(head)) {
    head.depthwise = {1, (kNineTaps + 3) / 4, 1};
    return;
  }
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
    // Four taps of one vector of channels: where each is among its channel's, or nothing at all.
    const auto put = [&](int vec, const int64_t taps[4]) {
      for (int lane = 0; lane < head.lanes; ++lane)
        for (int i = 0; i < 4; ++i) {
          const int64_t c = channel_of(block->vecs, vec, lane);
          if (c >= block->count || taps[i] < 0) continue;
          const int8_t value = weight[(block->out_c + c) * kd * kh * kw + taps[i]];
          if (halves == 1) at[lane * 4 + i] = value;
          else reinterpret_cast<int16_t*>(at)[(i % 2 * head.lanes + lane) * 2 + i / 2] = value;
        }
      at += halves * head.lanes * 4;
    };
    const auto put_vectors = [&](auto tap) {
      const int64_t taps[] = {tap(0), tap(1), tap(2), tap(3)};
      for (int vec = 0; vec < block->vecs; ++vec) put(vec, taps);
    };
    if (head.depthwise.by_taps) {
      for (int64_t first = 0; first < kh * kw; first += 4)
        put_vectors([&](int64_t i) { return first + i < kh * kw ? first + i : -1; });
      continue;
    }
    for (int64_t r = 0; r < head.depthwise.rows; ++r)
      for (int64_t z = 0; z < kd; ++z)
        for (int64_t quad = 0; quad < head.depthwise.quads; ++quad)
          for (int64_t x = 0; x < kw; ++x)
            put_vectors([&](int64_t i) {
              const int64_t y = quad * 4 - r * head.geo.stride[1] + i, row = head.turned ? y * kd + z : z * kh + y;
              return y < 0 || y >= kh ? -1 : row * kw + x;
            });
  }
}

}  // namespace xq

// Depthwise convolution of few taps without strips: four taps of a pixel at a time are woven, so that the four bytes of a
// channel are adjacent, and multiplied in registers. Where strips hold 16 bits (Vec256 without VNNI), storing and loading
// them takes longer than weaving a tap again for each pixel that it serves.
#pragma once

#include "epilogue.h"

namespace {

// Adjacent output pixels whose sums are kept together.
constexpr int64_t kTapPixels = 24;

// Where the taps of an output row are read.
struct TapRows {
  const xq::DepthwiseTask& t;
  const xq::Block& block;
  const uint8_t* padding;

  // The taps of output pixel x; outside of the image padding.
  void find(int64_t x, const uint8_t* taps[xq::kNineTaps]) const {
    const xq::Geometry& g = t.packed->geo;
    const int64_t z = t.z * g.stride[0] - g.pad[0];
    int64_t tap = 0;
    for (int64_t i = 0; i < g.kernel[1]; ++i) {
      const int64_t y = t.y * g.stride[1] + i * g.dilation[1] - g.pad[1];
      const bool inside = z >= 0 && z < t.in->d && y >= 0 && y < t.in->h;
      const uint8_t* row = inside ? t.in->data + t.n * t.in->stride_n + z * t.in->stride_d + y * t.in->stride_h + block.a_off
                                  : nullptr;
      for (int64_t j = 0; j < g.kernel[2]; ++j) {
        const int64_t column = x * g.stride[2] + j * g.dilation[2] - g.pad[2];
        taps[tap++] = row && column >= 0 && column < t.in->w ? row + column * t.in->stride_w : padding;
      }
    }
  }
  // Output pixels [first, last) all of whose taps lie in the image.
  void inside(int64_t& first, int64_t& last) const {
    const xq::Geometry& g = t.packed->geo;
    const int64_t z = t.z * g.stride[0] - g.pad[0], y = t.y * g.stride[1] - g.pad[1];
    first = last = 0;
    if (z < 0 || z >= t.in->d || y < 0 || y + (g.kernel[1] - 1) * g.dilation[1] >= t.in->h) return;
    const int64_t room = t.in->w + g.pad[2] - (g.kernel[2] - 1) * int64_t{g.dilation[2]};
    last = room <= 0 ? 0 : xq::min64(t.out->w, xq::ceil_div(room, g.stride[2]));
    first = xq::min64(xq::ceil_div(g.pad[2], g.stride[2]), last);
  }
};

// The sums of one pixel, whose taps lie `further` bytes behind `taps`.
template <class V, int VECS>
XQ_INLINE inline void multiply_taps(const uint8_t* const* taps, int64_t further, int count, const int8_t* w,
                                    const int32_t* corr, int32_t* to) {
  using I = typename V::I;
  constexpr int64_t kHalf = V::kLanes * 4;
  I sum[VECS];
  unroll<VECS>([&](int v) XQ_INLINE { sum[v] = V::load(corr + v * V::kLanes); });
  unroll<(xq::kNineTaps + 3) / 4>([&](int quad) XQ_INLINE {
    const bool alone = quad == xq::kNineTaps / 4;
    const uint8_t* row[4];
    unroll<4>([&](int i) XQ_INLINE { row[i] = taps[alone ? 4 * quad : 4 * quad + i] + further; });
    I v[VECS];
    if constexpr (VECS == 1) v[0] = V::weave1(row, count);
    else if (alone) V::widen(V::template load_pixels<VECS>(row[0], 0, 1, count), v);
    else V::weave4(row, count, v);
    unroll<VECS>([&](int i) XQ_INLINE {
      const int8_t* weights = w + (quad * VECS + i) * 2 * kHalf;
      // What is woven with the last tap meets no weights.
      sum[i] = V::dot16(sum[i], V::even_bytes(v[i]), V::load(weights));
      if (!alone) sum[i] = V::dot16(sum[i], V::odd_bytes(v[i]), V::load(weights + kHalf));
    });
  });
  unroll<VECS>([&](int v) XQ_INLINE { V::store(to + v * V::kLanes, sum[v]); });
}

// Output pixels [begin, end) of a row of a block, kTapPixels at most.
template <class V, int VECS>
void depthwise_taps_of(const xq::DepthwiseTask& t, const xq::Block& block, const Epilogue<V>& epilogue,
                       const uint8_t* padding, int64_t begin, int64_t end) {
  constexpr int64_t kLds = VECS * V::kLanes;
  const xq::Packed& p = *t.packed;
  const int8_t* w = p.at<int8_t>(p.weights) + block.w_off;
  const int32_t* corr = p.at<int32_t>(p.corr) + block.s_off;
  const float *mult = p.at<float>(p.mult) + block.s_off, *bias = p.at<float>(p.bias) + block.s_off;
  const auto place = [&](const xq_tensor& x) {
    return x.data + t.n * x.stride_n + t.z * x.stride_d + t.y * x.stride_h + begin * x.stride_w + block.out_c;
  };
  const TapRows rows{t, block, padding};
  int64_t first, last;
  rows.inside(first, last);
  const uint8_t *inner[xq::kNineTaps], *outer[xq::kNineTaps];
  if (first < last) rows.find(first, inner);
  const int64_t step = p.geo.stride[2] * t.in->stride_w;
  alignas(64) int32_t sums[kTapPixels * kLds];
  const auto each = [&](int count) XQ_INLINE {
    for (int64_t x = begin; x < end; ++x) {
      const bool is_inner = x >= first && x < last;
      if (!is_inner) rows.find(x, outer);
      multiply_taps<V, VECS>(is_inner ? inner : outer, is_inner ? (x - first) * step : 0, count, w, corr,
                             sums + (x - begin) * kLds);
    }
  };
  if (block.count == kLds) each(kLds);
  else each(block.count);
  epilogue.template rows<VECS>(sums, kLds, end - begin, mult, bias, place(*t.out), t.out->stride_w,
                               t.res ? place(*t.res) : nullptr, t.res ? t.res->stride_w : 0, block.count);
}

template <class V>
void depthwise_taps(const xq::DepthwiseTask& t) {
  const xq::Packed& p = *t.packed;
  const Epilogue<V> epilogue(p);
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  alignas(64) uint8_t padding[64];
  memset(padding, p.in_zp, sizeof padding);
  // What the pixels of a few columns read stays in L1 until all blocks have met it: most lines belong to two.
  for (int64_t x = 0; x < t.out->w; x += kTapPixels) {
    const int64_t end = xq::min64(x + kTapPixels, t.out->w);
    for (int b = t.block_begin; b < t.block_end; ++b)
      blocks[b].vecs == 4 ? depthwise_taps_of<V, 4>(t, blocks[b], epilogue, padding, x, end)
                          : depthwise_taps_of<V, 1>(t, blocks[b], epilogue, padding, x, end);
  }
}

}  // namespace

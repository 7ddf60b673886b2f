// Depthwise convolution of any width. Four input rows are woven into a strip with the four bytes of
// a channel adjacent, so that one dot product takes four rows of taps at once. A strip serves all
// horizontal taps and, shifted in the weights, several output rows. A kernel with depth has strips for each of its
// slices, which serve the output slices one after the other. Wide strips hold the four bytes as 16 bits,
// even and odd ones apart: see xq::depthwise_halves.
#pragma once

#include "depthwise_taps.h"
#include "epilogue.h"

namespace {

// Bytes that a vector of lanes takes in a strip and in weights.
template <class V>
constexpr int64_t kLaneBytes = V::kLanes * 4 * (V::kWideStrips ? 2 : 1);

template <class V>
struct Strip {
  const xq::DepthwiseTask& t;
  const xq::Packed& p;
  const xq::Block& block;
  int64_t columns, first;   // first: input column of strip column 0, may be negative
  int64_t slice;            // input slice, may be outside
  int vecs;
  const uint8_t* padding;

  int64_t quad_bytes() const { return columns * vecs * kLaneBytes<V>; }

  const uint8_t* row(int64_t tap) const {
    const int64_t y = t.y * p.geo.stride[1] + tap * p.geo.dilation[1] - p.geo.pad[1];
    if (slice < 0 || slice >= t.in->d || y < 0 || y >= t.in->h) return nullptr;
    return t.in->data + t.n * t.in->stride_n + slice * t.in->stride_d + y * t.in->stride_h + block.a_off;
  }

  static void put(uint8_t* to, typename V::I v) {
    if constexpr (!V::kWideStrips) return V::store(to, v);
    V::store(to, V::even_bytes(v)), V::store(to + V::kLanes * 4, V::odd_bytes(v));
  }

  void weave(const uint8_t* const row[4], uint8_t* to) const {
    if (vecs == 4) {
      typename V::I v[4];
      V::weave4(row, block.count, v);
      for (int i = 0; i < 4; ++i) put(to + i * kLaneBytes<V>, v[i]);
    } else {
      put(to, V::weave1(row, block.count));
    }
  }

  void fill(int64_t quad, uint8_t* to) const {
    const uint8_t *start[4], *at[4];
    int64_t step[4];
    for (int i = 0; i < 4; ++i) {
      start[i] = row(quad * 4 + i);
      step[i] = start[i] ? t.in->stride_w : 0;
      if (!start[i]) start[i] = padding;
    }
    const uint8_t* const outside[4] = {padding, padding, padding, padding};
    const int64_t bytes = vecs * kLaneBytes<V>;
    const int64_t from = xq::min64(xq::max64(-first, 0), columns);
    const int64_t to_column = xq::max64(xq::min64(t.in->w - first, columns), from);
    for (int64_t x = 0; x < from; ++x) weave(outside, to + x * bytes);
    for (int i = 0; i < 4; ++i) at[i] = start[i] + (first + from) * step[i];
    for (int64_t x = from; x < to_column; ++x) {
      weave(at, to + x * bytes);
      for (int i = 0; i < 4; ++i) at[i] += step[i];
    }
    for (int64_t x = to_column; x < columns; ++x) weave(outside, to + x * bytes);
  }
};

// Whether any tap of output row r lies in this quad.
inline bool quad_used(const xq::Packed& p, int64_t r, int64_t quad) {
  const int64_t first = r * p.geo.stride[1];
  return quad * 4 + 3 >= first && quad * 4 < first + p.geo.kernel[1];
}

// The strips of an output slice: where those of each of the kernel's slices begin, and how long one of them is.
struct Strips {
  const uint8_t* of[xq::kMostSlices];
  int64_t quad_bytes;
};

// PIXELS adjacent sums of one row from finished strips, which begin `from` bytes later. Not inlined: beside the
// epilogue's vectors the sums would not stay in registers. DEEP says whether the kernel has depth.
template <class V, int PIXELS, int VECS, bool DEEP>
__attribute__((noinline)) void depthwise_pixels(const xq::Packed& p, const Strips& strips, int64_t from,
                                                const int8_t* w, int64_t r, const int32_t* corr,
                                                int32_t* to) {
  using I = typename V::I;
  constexpr int64_t kVector = kLaneBytes<V>, kColumn = VECS * kVector;
  const int64_t kw = p.geo.kernel[2];
  const int64_t step = p.geo.stride[2] * kColumn, dilation = p.geo.dilation[2] * kColumn;
  I sum[PIXELS * VECS];
  unroll<PIXELS * VECS>([&](int i) XQ_INLINE { sum[i] = V::load(corr + i % VECS * V::kLanes); });
  for (int64_t z = 0; z < (DEEP ? p.geo.kernel[0] : 1); ++z) {
    const uint8_t* strip = strips.of[z] + from;
    for (int64_t quad = 0; quad < p.depthwise.quads; ++quad, w += kw * kColumn, strip += strips.quad_bytes) {
      if (!quad_used(p, r, quad)) continue;
      for (int64_t x = 0; x < kw; ++x) {
        const uint8_t* at = strip + x * dilation;
        unroll<VECS>([&](int v) XQ_INLINE {
          const int8_t* weights = w + x * kColumn + v * kVector;
          unroll<PIXELS>([&](int i) XQ_INLINE {
            const uint8_t* pixel = at + i * step + v * kVector;
            I& acc = sum[i * VECS + v];
            if constexpr (V::kWideStrips) {
              acc = V::dot16(acc, V::load(pixel), V::load(weights));
              acc = V::dot16(acc, V::load(pixel + kVector / 2), V::load(weights + kVector / 2));
            } else {
              acc = V::dot(acc, V::load(pixel), V::load(weights));
            }
          });
        });
      }
    }
  }
  unroll<PIXELS * VECS>([&](int i) XQ_INLINE { V::store(to + i * V::kLanes, sum[i]); });
}

template <class V, int VECS, bool DEEP>
void depthwise_row(const xq::DepthwiseTask& t, const xq::Block& block, const Epilogue<V>& epilogue,
                   const Strips& strips, int64_t z, int64_t r, int64_t begin, int64_t end) {
  constexpr int kPixels = VECS == 4 ? V::kStripPixels : 8, kBatch = 24;
  const xq::Packed& p = *t.packed;
  const int64_t quads = int64_t{p.geo.kernel[0]} * p.depthwise.quads * p.geo.kernel[2];
  const int8_t* w = p.at<int8_t>(p.weights) + block.w_off + r * quads * VECS * kLaneBytes<V>;
  const int32_t* corr = p.at<int32_t>(p.corr) + block.s_off;
  const float *mult = p.at<float>(p.mult) + block.s_off, *bias = p.at<float>(p.bias) + block.s_off;
  auto place = [&](const xq_tensor& x) {
    return x.data + t.n * x.stride_n + z * x.stride_d + (t.y + r) * x.stride_h + block.out_c + begin * x.stride_w;
  };
  uint8_t* out = place(*t.out);
  const uint8_t* res = t.res ? place(*t.res) : nullptr;
  const int64_t res_step = t.res ? t.res->stride_w : 0;
  const int64_t step = p.geo.stride[2] * VECS * kLaneBytes<V>;
  constexpr int64_t kLds = VECS * V::kLanes;
  alignas(64) int32_t sums[kBatch * kLds];
  for (int64_t x = 0; x < end - begin; x += kBatch) {
    const int64_t count = xq::min64(kBatch, end - begin - x);
    int64_t i = 0;
    for (; i + kPixels <= count; i += kPixels)
      depthwise_pixels<V, kPixels, VECS, DEEP>(p, strips, (x + i) * step, w, r, corr, sums + i * kLds);
    for (; i + 2 <= count; i += 2)
      depthwise_pixels<V, 2, VECS, DEEP>(p, strips, (x + i) * step, w, r, corr, sums + i * kLds);
    if (i < count) depthwise_pixels<V, 1, VECS, DEEP>(p, strips, (x + i) * step, w, r, corr, sums + i * kLds);
    epilogue.template rows<VECS>(sums, kLds, count, mult, bias, out + x * t.out->stride_w, t.out->stride_w,
                                 res ? res + x * res_step : nullptr, res_step, block.count);
  }
}

template <class V, bool DEEP>
void depthwise_slices(const xq::DepthwiseTask& t) {
  const xq::Packed& p = *t.packed;
  const Epilogue<V> epilogue(p);
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  alignas(64) uint8_t padding[64];
  memset(padding, p.in_zp, sizeof padding);
  const int64_t tile = xq::depthwise_tile(p, t.out->w);
  const int64_t rows = xq::min64(p.depthwise.rows, t.out->h - t.y);
  const int64_t depth = DEEP ? p.geo.kernel[0] : 1, dilation = p.geo.dilation[0];
  for (int b = t.block_begin; b < t.block_end; ++b)
    for (int64_t x = 0; x < t.out->w; x += tile) {
      const int64_t end = xq::min64(x + tile, t.out->w);
      Strip<V> strip{t, p, blocks[b], xq::depthwise_strip_columns(p, end - x),
                     x * p.geo.stride[2] - p.geo.pad[2], 0, blocks[b].vecs, padding};
      Strips strips;
      strips.quad_bytes = strip.quad_bytes();
      // The slices, counted from the first one of the padding, whose strips there are.
      int64_t held[xq::kMostSlices];
      for (int64_t& slice : held) slice = -1;
      for (int64_t z = t.z; z < t.z + t.slices; ++z) {
        for (int64_t tap = 0; tap < depth; ++tap) {
          const int64_t slice = z * p.geo.stride[0] + tap * dilation, slot = slice / dilation % depth;
          uint8_t* to = t.scratch + slot * p.depthwise.quads * strips.quad_bytes;
          strips.of[tap] = to;
          if (held[slot] == slice) continue;
          held[slot] = slice, strip.slice = slice - p.geo.pad[0];
          for (int64_t q = 0; q < p.depthwise.quads; ++q) strip.fill(q, to + q * strips.quad_bytes);
        }
        for (int64_t r = 0; r < rows; ++r)
          blocks[b].vecs == 4 ? depthwise_row<V, 4, DEEP>(t, blocks[b], epilogue, strips, z, r, x, end)
                              : depthwise_row<V, 1, DEEP>(t, blocks[b], epilogue, strips, z, r, x, end);
      }
    }
}

template <class V>
void depthwise(const xq::DepthwiseTask& t) {
  if constexpr (V::kWideStrips)
    if (t.packed->depthwise.by_taps) return depthwise_taps<V>(t);
  t.packed->geo.kernel[0] > 1 ? depthwise_slices<V, true>(t) : depthwise_slices<V, false>(t);
}

}  // namespace

// 3 x 3 convolutions by Winograd's F(2 x 2, 3 x 3): 16 products instead of 36. All in integers: the
// input's transform fits 11 bits, the weights' 12 (four times the true one), so pairs of products are exact in
// int32 and the sums, divided by four at the end, too.
#pragma once

#include "epilogue.h"

namespace {

// B' d B of 16 channels at a time; position `p` of the result lies `step` elements after position 0.
inline void winograd_input(const uint8_t* const pixel[16], int64_t channels, int16_t* to, int64_t step) {
  for (int64_t c = 0; c < channels; c += 16) {
    __m256i v[16];
    unroll<16>([&](int i) XQ_INLINE {
      v[i] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pixel[i] + c)));
    });
    auto along = [&](int first, int by) XQ_INLINE {
      const __m256i a = v[first], b = v[first + by], d = v[first + 2 * by], e = v[first + 3 * by];
      v[first] = _mm256_sub_epi16(a, d), v[first + by] = _mm256_add_epi16(b, d);
      v[first + 2 * by] = _mm256_sub_epi16(d, b), v[first + 3 * by] = _mm256_sub_epi16(b, e);
    };
    unroll<4>([&](int i) XQ_INLINE { along(i, 4); });
    unroll<4>([&](int i) XQ_INLINE { along(4 * i, 1); });
    unroll<16>([&](int i) XQ_INLINE { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * step + c), v[i]); });
  }
}

template <class V, int ROWS, int VECS>
void winograd_tile(const int16_t* a, int64_t lda, const int16_t* w, int64_t pairs, int32_t* sums) {
  using I = typename V::I;
  I acc[ROWS * VECS];
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { acc[i] = V::set32(0); });
  for (int64_t k = 0; k < pairs; ++k, w += VECS * V::kLanes * 2) {
    I weights[VECS];
    unroll<VECS>([&](int v) XQ_INLINE { weights[v] = V::load(w + v * V::kLanes * 2); });
    xq::prefetch(w + pairs * VECS * V::kLanes * 2);  // the next position's
    unroll<ROWS>([&](int r) XQ_INLINE {
      const I x = V::quad(reinterpret_cast<const uint8_t*>(a + r * lda + 2 * k));
      unroll<VECS>([&](int v) XQ_INLINE { acc[r * VECS + v] = V::dot16(acc[r * VECS + v], x, weights[v]); });
    });
  }
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { V::store(sums + i * V::kLanes, acc[i]); });
}

template <class V, int VECS>
void winograd_rows(int64_t rows, const int16_t* a, int64_t lda, const int16_t* w, int64_t pairs, int32_t* sums) {
  switch (rows) {
    case 1: return winograd_tile<V, 1, VECS>(a, lda, w, pairs, sums);
    case 2: return winograd_tile<V, 2, VECS>(a, lda, w, pairs, sums);
    case 3: case 4: return winograd_tile<V, 4, VECS>(a, lda, w, pairs, sums);
    case 5: case 6: return winograd_tile<V, 6, VECS>(a, lda, w, pairs, sums);
    case 7: case 8: return winograd_tile<V, 8, VECS>(a, lda, w, pairs, sums);
    case 9: case 10: return winograd_tile<V, 10, VECS>(a, lda, w, pairs, sums);
    default: return winograd_tile<V, 12, VECS>(a, lda, w, pairs, sums);
  }
}

// Where a tile's four output pixels lie; tiles are numbered row by row, image after image.
struct WinogradTile {
  int64_t image, y, x;
  WinogradTile(const xq::WinogradTask& t, int64_t tile) {
    const int64_t across = xq::ceil_div(t.out->w, 2), down = xq::ceil_div(t.out->h, 2);
    image = tile / (across * down), y = tile / across % down * 2, x = tile % across * 2;
  }
  // The first byte of an image: slices in depth are images of their own.
  uint8_t* base(const xq_tensor& t) const { return t.data + image / t.d * t.stride_n + image % t.d * t.stride_d; }
};

inline void winograd_pixels(const xq::WinogradTask& t, int64_t tile, const uint8_t* padding,
                            const uint8_t* pixel[16]) {
  const WinogradTile at(t, tile);
  const xq_tensor& in = *t.in;
  const int64_t y = at.y - t.packed->geo.pad[1], x = at.x - t.packed->geo.pad[2];
  const uint8_t* base = at.base(in);
  for (int i = 0; i < 16; ++i) {
    const int64_t h = y + i / 4, w = x + i % 4;
    const bool inside = h >= 0 && h < in.h && w >= 0 && w < in.w;
    pixel[i] = inside ? base + h * in.stride_h + w * in.stride_w : padding;
  }
}

// A' m A / 4 of one tile, plus the zero point's correction: four pixels' sums.
template <class V, int VECS>
void winograd_output(const int32_t* m, int64_t step, const int32_t* corr, int32_t* sums) {
  using I = typename V::I;
  for (int vec = 0; vec < VECS; ++vec) {
    I half[8];
    unroll<4>([&](int i) XQ_INLINE {
      auto at = [&](int row) XQ_INLINE { return V::load(m + (4 * row + i) * step + vec * V::kLanes); };
      const I b = at(1), c = at(2);
      half[i] = V::add32(V::add32(at(0), b), c), half[4 + i] = V::sub32(V::sub32(b, c), at(3));
    });
    const I more = V::load(corr + vec * V::kLanes);
    unroll<2>([&](int y) XQ_INLINE {
      const I b = half[4 * y + 1], c = half[4 * y + 2];
      const I left = V::add32(V::add32(half[4 * y], b), c), right = V::sub32(V::sub32(b, c), half[4 * y + 3]);
      V::store(sums + ((2 * y) * VECS + vec) * V::kLanes, V::add32(V::quarter(left), more));
      V::store(sums + ((2 * y + 1) * VECS + vec) * V::kLanes, V::add32(V::quarter(right), more));
    });
  }
}

template <class V, int VECS>
void winograd_block(const xq::WinogradTask& t, const Epilogue<V>& epilogue, const xq::Block& block, int64_t first,
                    int64_t count, const int16_t* codes, int64_t lda, int64_t step, int32_t* products) {
  const xq::Packed& p = *t.packed;
  static_assert(xq::kWinogradRows % V::kWinogradRows == 0, "or the last rows would be written past the end");
  constexpr int64_t kWidth = VECS * V::kLanes;
  const int64_t product_step = xq::winograd_group(p) * kWidth;
  const int64_t pairs = p.conv.in_channels / p.conv.groups / 2;
  const auto* weights = reinterpret_cast<const int16_t*>(p.at<int8_t>(p.weights) + block.w_off);
  const int32_t* corr = p.at<int32_t>(p.corr) + block.s_off;
  const float *mult = p.at<float>(p.mult) + block.s_off, *bias = p.at<float>(p.bias) + block.s_off;
  const int64_t tiles = xq::ceil_div(count, V::kWinogradRows);
  for (int i = 0; i < 16; ++i)
    for (int64_t part = 0; part < tiles; ++part) {
      const int64_t from = part * count / tiles, rows = (part + 1) * count / tiles - from;
      winograd_rows<V, VECS>(rows, codes + i * step + from * lda + block.a_off, lda,
                             weights + i * pairs * kWidth * 2, pairs, products + i * product_step + from * kWidth);
    }
  alignas(64) int32_t sums[4 * kWidth];
  for (int64_t m = 0; m < count; ++m) {
    winograd_output<V, VECS>(products + m * kWidth, product_step, corr, sums);
    const WinogradTile at(t, first + m);
    const int64_t across = xq::min64(2, t.out->w - at.x);
    for (int64_t y = 0; y < 2 && at.y + y < t.out->h; ++y) {
      auto place = [&](const xq_tensor& x) {
        return at.base(x) + (at.y + y) * x.stride_h + at.x * x.stride_w + block.out_c;
      };
      epilogue.template rows<VECS>(sums + 2 * y * kWidth, kWidth, across, mult, bias, place(*t.out), t.out->stride_w,
                                   t.res ? place(*t.res) : nullptr, t.res ? t.res->stride_w : 0, block.count);
    }
  }
}

template <class V>
void winograd(const xq::WinogradTask& t) {
  const xq::Packed& p = *t.packed;
  const Epilogue<V> epilogue(p);
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  const int64_t channels = p.conv.in_channels, lda = xq::winograd_lda(channels);
  const int64_t most = xq::winograd_chunk(p, channels), step = xq::winograd_step(p, channels);
  const int64_t group = xq::winograd_group(p);
  auto* products = reinterpret_cast<int32_t*>(t.scratch);
  auto* codes = reinterpret_cast<int16_t*>(products + 16 * group * 2 * V::kLanes);
  auto* padding = reinterpret_cast<uint8_t*>(codes + 16 * step);
  memset(padding, p.in_zp, static_cast<size_t>(channels));
  const int64_t chunks = xq::ceil_div(t.last - t.first, most);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t first = t.first + chunk * (t.last - t.first) / chunks;
    const int64_t last = t.first + (chunk + 1) * (t.last - t.first) / chunks;
    for (int64_t tile = first; tile < last; ++tile) {
      const uint8_t* pixel[16];
      winograd_pixels(t, tile, padding, pixel);
      winograd_input(pixel, channels, codes + (tile - first) * lda, step);
    }
    for (int b = t.block_begin; b < t.block_end; ++b)
      for (int64_t tile = first; tile < last; tile += group) {
        const int64_t count = xq::min64(group, last - tile);
        const auto run = blocks[b].vecs == 2 ? winograd_block<V, 2> : winograd_block<V, 1>;
        run(t, epilogue, blocks[b], tile, count, codes + (tile - first) * lda, lda, step, products);
      }
  }
}

}  // namespace

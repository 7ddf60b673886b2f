// 3 x 3 convolutions by Winograd's algorithm: an input tile and the weights are transformed, multiplied position by
// position, 16 bits by 16, and the products transformed back. All in integers and exact: see winograd_forms.h.
#pragma once

#include "epilogue.h"
#include "winograd_forms.h"
#include "word_products.h"

namespace {

// Where a tile's output pixels lie; tiles are numbered row by row, image after image.
template <class FORM>
struct WinogradTile {
  int64_t image, y, x;
  WinogradTile(const xq::WinogradTask& t, int64_t tile) {
    const int64_t across = xq::ceil_div(t.out->w, FORM::kOut), down = xq::ceil_div(t.out->h, FORM::kOut);
    image = tile / (across * down), y = tile / across % down * FORM::kOut, x = tile % across * FORM::kOut;
  }
  // The first byte of an image: slices in depth are images of their own.
  uint8_t* base(const xq_tensor& t) const { return t.data + image / t.d * t.stride_n + image % t.d * t.stride_d; }
};

// Where the pixels lie that a tile reads: what is outside the image reads `padding`.
template <class FORM>
void winograd_pixels(const xq::WinogradTask& t, int64_t tile, const uint8_t* padding, const uint8_t** pixel) {
  const WinogradTile<FORM> at(t, tile);
  const xq_tensor& in = *t.in;
  const int64_t y = at.y - t.packed->geo.pad[1], x = at.x - t.packed->geo.pad[2];
  const uint8_t* first = at.base(in) + y * in.stride_h + x * in.stride_w;
  for (int64_t i = 0; i < FORM::kIn; ++i)
    for (int64_t j = 0; j < FORM::kIn; ++j) *pixel++ = first + i * in.stride_h + j * in.stride_w;
  if (y >= 0 && y + FORM::kIn <= in.h && x >= 0 && x + FORM::kIn <= in.w) return;
  pixel -= FORM::kIn * FORM::kIn;
  for (int64_t h = y; h < y + FORM::kIn; ++h)
    for (int64_t w = x; w < x + FORM::kIn; ++w, ++pixel)
      if (h < 0 || h >= in.h || w < 0 || w >= in.w) *pixel = padding;
}

// B' d B of 16 channels at a time; position `p` of the result lies `step` elements after position 0.
template <class FORM>
void winograd_input(const uint8_t* const* pixel, int64_t channels, int16_t* to, int64_t step) {
  constexpr int kIn = FORM::kIn;
  for (int64_t c = 0; c < channels; c += 16) {
    __m256i half[kIn * kIn];
    unroll<kIn>([&](int x) XQ_INLINE {
      __m256i column[kIn], done[kIn];
      unroll<kIn>([&](int y) XQ_INLINE {
        column[y] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pixel[y * kIn + x] + c)));
      });
      FORM::input(column, done);
      unroll<kIn>([&](int y) XQ_INLINE { half[y * kIn + x] = done[y]; });
    });
    unroll<kIn>([&](int y) XQ_INLINE {
      __m256i done[kIn];
      FORM::input(half + y * kIn, done);
      unroll<kIn>([&](int x) XQ_INLINE {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (y * kIn + x) * step + c), done[x]);
      });
    });
  }
}

alignas(64) constexpr int32_t kZeros[2 * xq::kMaxLanes] = {};

template <class V, int VECS>
void winograd_rows(int64_t rows, const int16_t* a, int64_t lda, const int16_t* w, WordsAhead ahead, int64_t pairs,
                   int32_t* sums) {
  switch (rows) {
    case 1: return word_products<V, 1, VECS>(a, lda, w, ahead, pairs, kZeros, sums);
    case 2: return word_products<V, 2, VECS>(a, lda, w, ahead, pairs, kZeros, sums);
    case 3: case 4: return word_products<V, 4, VECS>(a, lda, w, ahead, pairs, kZeros, sums);
    case 5: case 6: return word_products<V, 6, VECS>(a, lda, w, ahead, pairs, kZeros, sums);
  }
  if constexpr (V::kWinogradRows > 6) {
    if (rows <= 8) return word_products<V, 8, VECS>(a, lda, w, ahead, pairs, kZeros, sums);
    if (rows <= 10) return word_products<V, 10, VECS>(a, lda, w, ahead, pairs, kZeros, sums);
    if (rows <= 12) return word_products<V, 12, VECS>(a, lda, w, ahead, pairs, kZeros, sums);
  }
  if constexpr (V::kWinogradRows > 12) word_products<V, 14, VECS>(a, lda, w, ahead, pairs, kZeros, sums);
}

// A' m A of one tile, less what it is a multiple of, plus the zero point's correction: its pixels' sums.
template <class V, class FORM, int VECS>
void winograd_output(const int32_t* m, int64_t step, const int32_t* corr, int32_t* sums) {
  using I = typename V::I;
  constexpr int kIn = FORM::kIn, kOut = FORM::kOut;
  for (int vec = 0; vec < VECS; ++vec, m += V::kLanes, sums += V::kLanes) {
    I half[kOut * kIn];
    unroll<kIn>([&](int x) XQ_INLINE {
      I column[kIn], done[kOut];
      unroll<kIn>([&](int y) XQ_INLINE { column[y] = V::load(m + (kIn * y + x) * step); });
      FORM::template output<V>(column, done);
      unroll<kOut>([&](int y) XQ_INLINE { half[y * kIn + x] = done[y]; });
    });
    const I more = V::load(corr + vec * V::kLanes);
    unroll<kOut>([&](int y) XQ_INLINE {
      I done[kOut];
      FORM::template output<V>(half + y * kIn, done);
      unroll<kOut>([&](int x) XQ_INLINE {
        V::store(sums + (y * kOut + x) * VECS * V::kLanes, V::add32(FORM::template sum<V>(done[x]), more));
      });
    });
  }
}

// The products of a block for some tiles.
struct WinogradProducts {
  const xq::Block& block;
  int64_t first, count;   // tiles
  int32_t* at;
  int64_t step;           // from position to position
};

// Products to output bytes.
template <class V, class FORM, int VECS, typename Epilogue<V>::Way WAY, bool ZERO, bool TABLE>
void winograd_finish(const xq::WinogradTask& t, const Epilogue<V>& all, const WinogradProducts& products) {
  using I = typename V::I;
  constexpr int64_t kWidth = VECS * V::kLanes;
  constexpr int kOut = FORM::kOut, kPixels = min_of(4 / VECS, kOut);
  const xq::Packed& p = *t.packed;
  const xq::Block& block = products.block;
  const Epilogue<V> e = all;
  const auto c = e.template channels<VECS>(p.at<float>(p.mult) + block.s_off, p.at<float>(p.bias) + block.s_off);
  alignas(64) int32_t sums[kOut * kOut * kWidth];
  for (int64_t m = 0; m < products.count; ++m) {
    winograd_output<V, FORM, VECS>(products.at + m * kWidth, products.step, p.at<int32_t>(p.corr) + block.s_off, sums);
    const WinogradTile<FORM> at(t, products.first + m);
    const int64_t across = xq::min64(kOut, t.out->w - at.x), down = xq::min64(kOut, t.out->h - at.y);
    const auto place = [&](const xq_tensor& x) {
      return at.base(x) + at.y * x.stride_h + at.x * x.stride_w + block.out_c;
    };
    uint8_t* out = place(*t.out);
    const uint8_t* res = WAY != Epilogue<V>::kSums && WAY != Epilogue<V>::kSlopes && t.res ? place(*t.res) : nullptr;
    const int64_t res_pixel = res ? t.res->stride_w : 0;
    for (int64_t y = 0; y < down; ++y) {
      for (int64_t x = 0; x < across; x += kPixels) {
        I v[4];
        unroll<4>([&](int k) XQ_INLINE {
          const int i = min_of(k / VECS, kPixels - 1);
          v[k] = V::load(sums + (kOut * y + x + i) * kWidth + k % VECS * V::kLanes);
        });
        e.template apply_by<VECS, WAY, ZERO, TABLE>(v, c, out + x * t.out->stride_w, t.out->stride_w,
                                                    res ? res + x * res_pixel : nullptr, res_pixel,
                                                    static_cast<int>(xq::min64(kPixels, across - x)), block.count);
      }
      out += t.out->stride_h;
      if (res) res += t.res->stride_h;
    }
  }
}

template <class V, class FORM, int VECS>
void winograd_block(const xq::WinogradTask& t, const Epilogue<V>& epilogue, const WinogradProducts& products,
                    const int16_t* codes, int64_t lda, int64_t step) {
  const xq::Packed& p = *t.packed;
  constexpr int64_t kWidth = VECS * V::kLanes;
  const int64_t pairs = p.conv.in_channels / p.conv.groups / 2, count = products.count;
  const xq::Block& block = products.block;
  const auto* weights = reinterpret_cast<const int16_t*>(p.at<int8_t>(p.weights) + block.w_off);
  const int64_t parts = xq::ceil_div(count, V::kWinogradRows), size = pairs * kWidth * 2;
  for (int i = 0; i < FORM::kIn * FORM::kIn; ++i)
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t from = part * count / parts, rows = (part + 1) * count / parts - from;
      const int16_t* w = weights + i * size;
      winograd_rows<V, VECS>(rows, codes + i * step + from * lda + block.a_off, lda, w,
                             {w + size + part * size / parts, kWidth * 2 / parts}, pairs,
                             products.at + i * products.step + from * kWidth);
    }
  epilogue.by_way(t.res != nullptr, [&]<typename Epilogue<V>::Way WAY, bool ZERO, bool TABLE>() {
    winograd_finish<V, FORM, VECS, WAY, ZERO, TABLE>(t, epilogue, products);
  });
}

template <class V, class FORM>
void winograd_by(const xq::WinogradTask& t) {
  static_assert(xq::winograd_rows_of(V::kVnni, V::kLanes) % V::kWinogradRows == 0,
                "or the last rows would be written past the end");
  const xq::Packed& p = *t.packed;
  const Epilogue<V> epilogue(p);
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  constexpr int kPositions = FORM::kIn * FORM::kIn;
  const int64_t channels = p.conv.in_channels, lda = xq::winograd_lda(channels);
  const int64_t step = xq::winograd_step(p, channels), group = xq::winograd_group(p);
  auto* products = reinterpret_cast<int32_t*>(t.scratch);
  auto* codes = reinterpret_cast<int16_t*>(products + kPositions * group * 2 * V::kLanes);
  auto* padding = reinterpret_cast<uint8_t*>(codes + kPositions * step);
  memset(padding, p.in_zp, static_cast<size_t>(channels));
  // Evenly, and so that only the last one may have part of a group.
  const int64_t all = t.last - t.first, chunks = xq::ceil_div(all, xq::winograd_chunk(p, channels));
  const int64_t chunk = xq::round_up(xq::ceil_div(all, chunks), V::kWinogradRows);
  for (int64_t first = t.first; first < t.last; first += chunk) {
    const int64_t last = xq::min64(first + chunk, t.last);
    for (int64_t tile = first; tile < last; ++tile) {
      const uint8_t* pixel[kPositions];
      winograd_pixels<FORM>(t, tile, padding, pixel);
      winograd_input<FORM>(pixel, channels, codes + (tile - first) * lda, step);
    }
    const int64_t groups = xq::ceil_div(last - first, group);
    for (int b = t.block_begin; b < t.block_end; ++b)
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t from = g * (last - first) / groups, to = (g + 1) * (last - first) / groups;
        const auto run = blocks[b].vecs == 2 ? winograd_block<V, FORM, 2> : winograd_block<V, FORM, 1>;
        run(t, epilogue, {blocks[b], first + from, to - from, products, group * blocks[b].vecs * V::kLanes},
            codes + from * lda, lda, step);
      }
  }
}

template <class V>
void winograd(const xq::WinogradTask& t) {
  t.packed->winograd == 4 ? winograd_by<V, WinogradOf4>(t) : winograd_by<V, WinogradOf2>(t);
}

}  // namespace

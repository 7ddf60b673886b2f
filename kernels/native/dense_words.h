// GEMM without VNNI for short rows: bytes become 16 bits once, and all blocks of weights, which are kept so, pass over them.
// No order of weights is safe enough to find in so few (safe_pairs.cpp), and a tile of few products should begin soon.
#pragma once

#include "epilogue.h"
#include "word_products.h"

namespace {

// Rows that are widened together, and what of them is kept.
template <class V>
struct WidenedRows {
  static constexpr int64_t kTile = V::kWinogradRows, kMost = 48 / kTile * kTile;
  static constexpr int64_t kLda = xq::kMostWords + 16;  // a line and a half: rows do not share their place in L1
  alignas(64) int16_t words[kMost * kLda];

  // Reads whole quads.
  void set(int64_t row, const uint8_t* from, int64_t quads) {
    int16_t* to = words + row * kLda;
    int64_t k = 0;
    for (; k + 16 <= 4 * quads; k += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + k),
                          _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k))));
    for (; k < 4 * quads; k += 4) {
      int32_t quad;  // _mm_loadu_si32 puts it in another lane with GCC 11.1 and 11.2
      memcpy(&quad, from + k, sizeof(quad));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to + k), _mm_cvtepu8_epi16(_mm_cvtsi32_si128(quad)));
    }
  }
};

// Rows [first, first + count) of a segment, which `rows` holds, and a block.
template <class V, int VECS>
void dense_words_of(const xq::DenseTask& t, const Epilogue<V>& epilogue, const xq::Block& block, int64_t segment,
                    int64_t first, int64_t count, int64_t pairs, const WidenedRows<V>& rows) {
  constexpr int64_t kWidth = VECS * V::kLanes, kTile = WidenedRows<V>::kTile;
  const xq::Packed& p = *t.packed;
  const auto* w = reinterpret_cast<const int16_t*>(p.at<int8_t>(p.weights) + block.w_off);
  alignas(64) int32_t sums[WidenedRows<V>::kMost * kWidth];
  for (int64_t m = 0; m < count; m += kTile)
    word_products<V, kTile, VECS>(rows.words + m * rows.kLda, rows.kLda, w, {w, 0}, pairs, p.at<int32_t>(p.corr) + block.s_off,
                                  sums + m * kWidth);
  put_rows<V, VECS>(epilogue, t, block, segment, first, count, sums, kWidth);
}

template <class V>
void dense_words(const xq::DenseTask& t) {
  const xq::Packed& p = *t.packed;
  const Epilogue<V> epilogue(p);
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  const int64_t quads = p.at<xq::Run>(p.runs)->quads, offset = t.offsets[0];
  WidenedRows<V> rows;
  // The results of all blocks for some rows are written in pieces of lines: they should stay in L1 until they are whole.
  const int64_t fit = p.caches.l1 / 2 / p.conv.out_channels / rows.kTile * rows.kTile;
  const int64_t chunk = xq::min64(xq::max64(fit, rows.kTile), rows.kMost);
  for (int64_t s = 0; s < t.segments; ++s)
    for (int64_t first = 0; first < t.rows; first += chunk) {
      const int64_t count = xq::min64(chunk, t.rows - first);
      for (int64_t i = 0, m = first; i < count; ++i, ++m)
        rows.set(i, (m < t.tail_begin ? t.a + s * t.a_segment + m * t.lda : t.tail + (m - t.tail_begin) * t.tail_lda) + offset,
                 quads);
      for (int b = t.block_begin; b < t.block_end; ++b)
        (blocks[b].vecs == 2 ? dense_words_of<V, 2> : dense_words_of<V, 1>)(t, epilogue, blocks[b], s, first, count, 2 * quads,
                                                                            rows);
    }
}

}  // namespace

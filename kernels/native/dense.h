// Matrix product over taps with vector dot products: a block of kRows pixels by 1 or 2 vectors of
// output channels stays in registers while all taps and input channels pass.
#pragma once

#include "epilogue.h"
#include "float_epilogue.h"

namespace {

template <class V, int ROWS, int VECS>
void dense_tile(const xq::Packed& p, const uint8_t* a, int64_t lda, const int64_t* offsets,
                const xq::Block& block, int32_t* sums) {
  using I = typename V::I;
  const xq::Run* runs = p.at<xq::Run>(p.runs);
  const int8_t* w = p.at<int8_t>(p.weights) + block.w_off;
  const int32_t* corr = p.at<int32_t>(p.corr) + block.s_off;
  [[maybe_unused]] const int32_t* order = p.at<int32_t>(p.order) + (&block - p.at<xq::Block>(p.blocks)) * p.order_stride;
  I acc[ROWS * VECS];
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { acc[i] = V::load(corr + i % VECS * V::kLanes); });
  for (int i = 0; i < p.n_runs; ++i) {
    // Three rows an address register: base, base + lda, base + 2 * lda.
    const uint8_t* at[(ROWS + 2) / 3];
    unroll<(ROWS + 2) / 3>([&](int r) XQ_INLINE { at[r] = a + offsets[i] + 3 * r * lda; });
    auto step = [&](int64_t quad, auto dot) XQ_INLINE {
      I weights[VECS];
      unroll<VECS>([&](int v) XQ_INLINE { weights[v] = V::load(w + v * V::kLanes * 4); });
      w += VECS * V::kLanes * 4;
      unroll<ROWS>([&](int r) XQ_INLINE {
        const I x = V::quad(at[r / 3] + r % 3 * lda + quad * 4);
        unroll<VECS>([&](int v) XQ_INLINE { acc[r * VECS + v] = dot(acc[r * VECS + v], x, weights[v]); });
      });
    };
    const int quads = runs[i].quads;
    if constexpr (V::kVnni) {
      for (int q = 0; q < quads; ++q) step(q, V::dot);
    } else {
      const int safe = *order++;
      for (int j = 0; j < safe; ++j) step(order[j], V::dot_safe);
      for (int j = safe; j < quads; ++j) step(order[j], V::dot);
      order += quads;
    }
  }
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { V::store(sums + i * V::kLanes, acc[i]); });
}

template <class V, int VECS>
void dense_rows(int64_t rows, const xq::Packed& p, const uint8_t* a, int64_t lda, const int64_t* offsets,
                const xq::Block& block, int32_t* sums) {
  switch (rows) {
    case 1: return dense_tile<V, 1, VECS>(p, a, lda, offsets, block, sums);
    case 2: return dense_tile<V, 2, VECS>(p, a, lda, offsets, block, sums);
    case 3: case 4: return dense_tile<V, 4, VECS>(p, a, lda, offsets, block, sums);
    case 5: case 6: return dense_tile<V, 6, VECS>(p, a, lda, offsets, block, sums);
    case 7: case 8: return dense_tile<V, 8, VECS>(p, a, lda, offsets, block, sums);
    case 9: case 10: return dense_tile<V, 10, VECS>(p, a, lda, offsets, block, sums);
    default: return dense_tile<V, 12, VECS>(p, a, lda, offsets, block, sums);
  }
}

// Pixels that all blocks of channels pass over before the next ones. Few, so that their input and
// output stay in L1; but weights too big for L2 should be read once, not once a chunk.
inline int64_t chunk_rows(const xq::DenseTask& t, int64_t tile) {
  const xq::Packed& p = *t.packed;
  const int64_t lda = xq::max64(t.lda, 1), weights = p.size - p.weights;
  if (weights > 768 * 1024) return xq::round_up(384 * 1024 / lda, tile) + tile;
  const int64_t rows = xq::min64(24 * 1024 / lda, 48 * 1024 / p.conv.out_channels);
  return xq::max64((rows + tile / 2) / tile * tile, tile);
}

template <class V, class Out = Epilogue<V>>
void dense(const xq::DenseTask& t) {
  const xq::Packed& p = *t.packed;
  const Out epilogue(p);
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  alignas(64) int32_t sums[12 * 2 * V::kLanes];
  const int64_t chunk = chunk_rows(t, V::kRows);
  for (int64_t s = 0; s < t.segments; ++s)
    for (int64_t first = 0; first < t.rows; first += chunk) {
      const int64_t last = xq::min64(first + chunk, t.rows);
      for (int b = t.block_begin; b < t.block_end; ++b) {
        for (int64_t m = first; m < last;) {
          const bool in_tail = m >= t.tail_begin;
          const int64_t end = in_tail ? last : xq::min64(last, t.tail_begin);
          // Even tiles rather than a full one and a remnant.
          const int64_t rows = xq::ceil_div(end - m, xq::ceil_div(end - m, V::kRows));
          const int64_t lda = in_tail ? t.tail_lda : t.lda;
          const uint8_t* a = (in_tail ? t.tail + (m - t.tail_begin) * lda
                                      : t.a + s * t.a_segment + m * lda) + blocks[b].a_off;
          if (blocks[b].vecs == 2) {
            dense_rows<V, 2>(rows, p, a, lda, t.offsets, blocks[b], sums);
            put_rows<V, 2>(epilogue, t, blocks[b], s, m, rows, sums, 2 * V::kLanes);
          } else {
            dense_rows<V, 1>(rows, p, a, lda, t.offsets, blocks[b], sums);
            put_rows<V, 1>(epilogue, t, blocks[b], s, m, rows, sums, V::kLanes);
          }
          m += rows;
        }
      }
    }
}

}  // namespace

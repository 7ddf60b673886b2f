// Convolutions with 4 or 8 channels a group. Each lane of a dot product needs its own group's quad,
// so a register of the pixel's channels is permuted rather than one quad broadcast: no product is
// wasted on channels of other groups.
#pragma once

#include "epilogue.h"

namespace {

template <class V, int ROWS, int VECS>
void grouped_tile(const xq::Packed& p, const uint8_t* a, int64_t lda, const int64_t* offsets,
                  const xq::Block& block, int32_t* sums) {
  using I = typename V::I;
  constexpr int kWidth = VECS * V::kLanes;
  const int64_t group = p.conv.in_channels / p.conv.groups, quads = group / 4;
  const int8_t* w = p.at<int8_t>(p.weights) + block.w_off;
  const int32_t* corr = p.at<int32_t>(p.corr) + block.s_off;
  alignas(64) int32_t index[2][VECS][V::kLanes];
  for (int q = 0; q < quads; ++q)
    for (int v = 0; v < VECS; ++v)
      for (int lane = 0; lane < V::kLanes; ++lane)
        index[q][v][lane] = static_cast<int32_t>(xq::channel_of(VECS, v, lane) / group * quads + q);
  I acc[ROWS * VECS];
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { acc[i] = V::load(corr + i % VECS * V::kLanes); });
  for (int i = 0; i < p.n_runs; ++i)
    for (int q = 0; q < quads; ++q, w += kWidth * 4) {
      I at[VECS], weights[VECS];
      unroll<VECS>([&](int v) XQ_INLINE {
        at[v] = V::load(index[q][v]);
        weights[v] = V::load(w + v * V::kLanes * 4);
      });
      const uint8_t* from = a + offsets[i];
      unroll<ROWS>([&](int r) XQ_INLINE {
        const I pixel = V::template load_quads<kWidth>(from);
        unroll<VECS>([&](int v) XQ_INLINE {
          acc[r * VECS + v] = V::dot(acc[r * VECS + v], V::pick_quads(pixel, at[v]), weights[v]);
        });
        from += lda;
      });
    }
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { V::store(sums + i * V::kLanes, acc[i]); });
}

template <class V>
void grouped(const xq::DenseTask& t) {
  const xq::Packed& p = *t.packed;
  const Epilogue<V> epilogue(p);
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  constexpr int kRows = V::kGroupedRows;
  alignas(64) int32_t sums[kRows * 2 * V::kLanes];
  for (int64_t s = 0; s < t.segments; ++s)
    for (int64_t m = 0; m < t.rows; m += kRows)
      for (int b = t.block_begin; b < t.block_end; ++b) {
        const int64_t rows = xq::min64(kRows, t.rows - m);
        const uint8_t* a = t.a + s * t.a_segment + m * t.lda + blocks[b].a_off;
        if (blocks[b].vecs == 2) {
          grouped_tile<V, kRows, 2>(p, a, t.lda, t.offsets, blocks[b], sums);
          put_rows<V, 2>(epilogue, t, blocks[b], s, m, rows, sums, 2 * V::kLanes);
        } else {
          grouped_tile<V, kRows, 1>(p, a, t.lda, t.offsets, blocks[b], sums);
          put_rows<V, 1>(epilogue, t, blocks[b], s, m, rows, sums, V::kLanes);
        }
      }
}

}  // namespace

// Convolutions with 4 or 8 channels a group. Each lane of a dot product needs its own group's quad,
// so a register of the pixel's channels is permuted rather than one quad broadcast: no product is
// wasted on channels of other groups.
#pragma once

#include "epilogue.h"

namespace {

template <class V, int ROWS>
void grouped_tile(const xq::Packed& p, const uint8_t* a, int64_t lda, const int64_t* offsets,
                  const xq::Block& block, int32_t* sums) {
  using I = typename V::I;
  constexpr int kVecs = 2, kWidth = kVecs * V::kLanes;
  const int64_t group = p.conv.in_channels / p.conv.groups, quads = group / 4;
  const int8_t* w = p.at<int8_t>(p.weights) + block.w_off;
  const int32_t* corr = p.at<int32_t>(p.corr) + block.s_off;
  const int vecs = block.vecs;
  alignas(64) int32_t index[2][kVecs][V::kLanes];
  for (int q = 0; q < quads; ++q)
    for (int v = 0; v < vecs; ++v)
      for (int lane = 0; lane < V::kLanes; ++lane)
        index[q][v][lane] = static_cast<int32_t>(xq::channel_of(vecs, v, lane) / group * quads + q);
  I acc[ROWS][kVecs];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < vecs; ++v) acc[r][v] = V::load(corr + v * V::kLanes);
  for (int i = 0; i < p.n_runs; ++i)
    for (int q = 0; q < quads; ++q)
      for (int v = 0; v < vecs; ++v, w += V::kLanes * 4) {
        const I at = V::load(index[q][v]), weights = V::load(w);
        for (int r = 0; r < ROWS; ++r)
          acc[r][v] = V::dot(acc[r][v], V::gather_quads(a + offsets[i] + r * lda, at, kWidth), weights);
      }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < vecs; ++v) V::store(sums + (r * vecs + v) * V::kLanes, acc[r][v]);
}

template <class V>
void grouped(const xq::DenseTask& t) {
  const xq::Packed& p = *t.packed;
  const Epilogue<V> epilogue(p);
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  constexpr int kRows = 8;
  alignas(64) int32_t sums[kRows * 2 * V::kLanes];
  for (int64_t s = 0; s < t.segments; ++s)
    for (int64_t m = 0; m < t.rows; m += kRows)
      for (int b = t.block_begin; b < t.block_end; ++b) {
        const int64_t rows = xq::min64(kRows, t.rows - m);
        const uint8_t* a = t.a + s * t.a_segment + m * t.lda + blocks[b].a_off;
        grouped_tile<V, kRows>(p, a, t.lda, t.offsets, blocks[b], sums);
        const int64_t lds = blocks[b].vecs * V::kLanes;
        blocks[b].vecs == 2 ? put_rows<V, 2>(epilogue, t, blocks[b], s, m, rows, sums, lds)
                            : put_rows<V, 1>(epilogue, t, blocks[b], s, m, rows, sums, lds);
      }
}

}  // namespace

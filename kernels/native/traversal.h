// The order in which a GEMM walks over rows and blocks of weights: how many rows all blocks pass over before the next ones.
#pragma once

#include "internal.h"

namespace {

// Pixels that all blocks of channels pass over before the next ones. Few, so that their input takes half of L1
// and their output, which is written once, passes through no more than all of it. But weights that are too big
// to stay in L2 beside the rest (3/8 of it) should be read once, not once a chunk: then the input of a chunk
// takes half as much of L2.
inline int64_t chunk_rows(const xq::DenseTask& t, int64_t tile) {
  const xq::Packed& p = *t.packed;
  const int64_t lda = xq::max64(t.lda, 1), weights = p.size - p.weights;
  if (weights > p.caches.l2 * 3 / 8) return xq::round_up(p.caches.l2 * 3 / 16 / lda, tile) + tile;
  const int64_t rows = xq::min64(p.caches.l1 / 2 / lda, p.caches.l1 / p.conv.out_channels);
  return xq::max64((rows + tile / 2) / tile * tile, tile);
}

// Whether blocks of weights pass over all rows, one after the other, while the next one is asked for: where input and
// output stay in L2, weights need not.
inline bool weights_pass_once(const xq::DenseTask& t) {
  const xq::Packed& p = *t.packed;
  const int64_t row = t.lda + p.conv.out_channels * (t.res ? 2 : 1);
  return t.segments * t.rows * row <= p.caches.l2 / 4;
}

// Whether a tile of rows stays in L1 from one block of weights to the next.
inline bool rows_stay(const xq::DenseTask& t, int64_t tile) { return tile * t.lda <= t.packed->caches.l1 * 2 / 3; }

// Blocks of weights that each tile of rows meets before the next tile does, `bytes` at most, where rows stay in L1 meanwhile:
// weights lie in order, and come from L2 sooner than rows that lie far apart.
inline int32_t blocks_together(const xq::DenseTask& t, int64_t tile, int64_t bytes) {
  const xq::Packed& p = *t.packed;
  if (t.rows <= tile || p.n_runs > 1 || !rows_stay(t, tile)) return 1;
  return static_cast<int32_t>(xq::max64(bytes / p.at<xq::Block>(p.blocks)[t.block_begin].w_size, 1));
}

// Blocks that follow one another, and their weights.
struct BlockSpan {
  int32_t begin, end;
  const int8_t *weights, *weights_end;

  BlockSpan(const xq::DenseTask& t, int32_t first, int32_t count)
      : begin(first), end(static_cast<int32_t>(xq::min64(first + count, t.block_end))) {
    const xq::Packed& p = *t.packed;
    const xq::Block* blocks = p.at<xq::Block>(p.blocks);
    const auto at = [&](int64_t offset) { return p.at<int8_t>(p.weights) + offset; };
    weights = weights_end = nullptr;
    if (begin < end) weights = at(blocks[begin].w_off), weights_end = at(blocks[end - 1].w_off + blocks[end - 1].w_size);
  }
  int64_t bytes() const { return weights_end - weights; }
};

// Of a linear with float results on tiles: a block of weights passes over as many rows as stay in L2 beside it, so that
// weights are read once.
inline int64_t rows_beside_a_block(const xq::DenseTask& t, int64_t tile) {
  return xq::max64(xq::round_up(t.packed->caches.l2 * 3 / 8 / xq::max64(t.lda, 1), tile), tile);
}

}  // namespace

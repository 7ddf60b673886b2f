// The GEMM of row codes with float results on AMX tiles: dense_amx with the tiles kept busy.
//
// A block of 32 x 32 sums takes as long to multiply, at some hundred products each, as to be made floats. Tiles and
// vectors are different parts of a core, so the floats of a block are computed between the products of the next one.
#pragma once

#include "amx.h"
#include "dense.h"

namespace {

// Sums that wait to become floats.
template <class V, int ACTIVATION>
struct WaitingSums {
  const xq::DenseTask& task;
  const xq::Block* block = nullptr;
  const int32_t* sums = nullptr;
  int64_t row = 0, left = 0;

  void take(int64_t rows) {
    rows = xq::min64(rows, left);
    if (rows <= 0) return;
    const int64_t width = block->vecs * V::kLanes;
    if (block->vecs == 2) float_rows<V, 2, ACTIVATION>(task, *block, row, rows, sums, width);
    else float_rows<V, 1, ACTIVATION>(task, *block, row, rows, sums, width);
    row += rows, left -= rows, sums += rows * width;
  }
};

template <class V, int ACTIVATION>
void linear_amx_blocks(const xq::DenseTask& t) {
  const xq::Packed& p = *t.packed;
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  alignas(64) int32_t sums[2][32 * 32];
  const int64_t steps = tile_steps(p), quads = TileConfig::tile_quads(p);
  const int64_t chunk = rows_beside_a_block(t, 32);
  const int32_t together = blocks_together(t, 32, p.caches.l2 / 16);
  WaitingSums<V, ACTIVATION> waiting{t};
  int turn = 0;
  for (int64_t first = 0; first < t.rows; first += chunk) {
    const int64_t last = xq::min64(first + chunk, t.rows), tiles = xq::ceil_div(last - first, 32);
    for (int32_t begin = t.block_begin; begin < t.block_end; begin += together) {
      const BlockSpan span(t, begin, together), next(t, span.end, together);
      Prefetches ahead{next.weights, next.weights_end};
      const int64_t lines = xq::ceil_div(next.bytes() / 64, steps * tiles * (span.end - begin));
      TileReads reads{0, t.offsets, quads, pass_by(t, span.bytes()), t.corr};
      for (int64_t m = first; m < last; m += 32) {
        const bool in_tail = m >= t.tail_begin;
        const int64_t rows = xq::min64(32, last - m);
        reads.lda = in_tail ? t.tail_lda : t.lda;
        const uint8_t* a = in_tail ? t.tail + (m - t.tail_begin) * reads.lda : t.a + m * reads.lda;
        for (int32_t b = begin; b < span.end; ++b) {
          const xq::Block& block = blocks[b];
          const int64_t share = xq::ceil_div(waiting.left, steps);
          const auto meanwhile = [&]() XQ_INLINE { waiting.take(share), ahead.take(lines); };
          int32_t* to = sums[turn];
          amx_rows(p, block, a, reads, rows, to, meanwhile);
          waiting.take(waiting.left);
          waiting.block = &block, waiting.sums = to, waiting.row = m, waiting.left = rows;
          turn ^= 1;
        }
      }
    }
  }
  waiting.take(waiting.left);
}

// Tiles take as long for one row as for 16. Of few rows vectors make the same sums, of the same packed weights, in
// less time: the weights pass at the speed of the second-level cache.
constexpr int64_t kFewRows = 4;

template <class V>
void linear_amx(const xq::DenseTask& t) {
  if (t.rows <= kFewRows) return dense<V, FloatEpilogue<V>>(t);
  const TileConfig config(*t.packed);
  _tile_loadconfig(&config);
  switch (t.packed->activation) {
    case XQ_ACT_RELU: linear_amx_blocks<V, XQ_ACT_RELU>(t); break;
    case XQ_ACT_GELU: linear_amx_blocks<V, XQ_ACT_GELU>(t); break;
    case XQ_ACT_GELU_TANH: linear_amx_blocks<V, XQ_ACT_GELU_TANH>(t); break;
    case XQ_ACT_SILU: linear_amx_blocks<V, XQ_ACT_SILU>(t); break;
    case XQ_ACT_SIGMOID: linear_amx_blocks<V, XQ_ACT_SIGMOID>(t); break;
    case XQ_ACT_TANH: linear_amx_blocks<V, XQ_ACT_TANH>(t); break;
    default: linear_amx_blocks<V, XQ_ACT_NONE>(t); break;
  }
  _tile_release();
}

}  // namespace

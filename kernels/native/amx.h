// The matrix product of dense.h on AMX tiles: 32 pixels by 32 output channels stay in four tiles.
// Weights have the same layout as for vectors; a run's quads come in sixteens, one tile deep.
#pragma once

#include "dense.h"

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles 0 to 3 hold sums, 4 and 5 pixels, 6 and 7 weights.
template <int M, int N>
void amx_tile(const xq::Packed& p, const uint8_t* a, int64_t lda, const int64_t* offsets,
              const xq::Block& block, int32_t* sums) {
  const xq::Run* runs = p.at<xq::Run>(p.runs);
  const int8_t* w = p.at<int8_t>(p.weights) + block.w_off;
  const int32_t* corr = p.at<int32_t>(p.corr) + block.s_off;
  if (p.in_zp == 0) {
    _tile_zero(0);
    if constexpr (N == 2) _tile_zero(1);
    if constexpr (M == 2) _tile_zero(2);
    if constexpr (M == 2 && N == 2) _tile_zero(3);
  } else {  // a stride of zero repeats one row of corrections sixteen times
    _tile_loadd(0, corr, 0);
    if constexpr (N == 2) _tile_loadd(1, corr + 16, 0);
    if constexpr (M == 2) _tile_loadd(2, corr, 0);
    if constexpr (M == 2 && N == 2) _tile_loadd(3, corr + 16, 0);
  }
  for (int i = 0; i < p.n_runs; ++i) {
    const uint8_t* at = a + offsets[i];
    for (int q = 0; q < runs[i].quads; q += 16, at += 64, w += N * 1024) {
      _tile_loadd(6, w, N * 64);
      _tile_loadd(4, at, lda);
      _tile_dpbusd(0, 4, 6);
      if constexpr (N == 2) {
        _tile_loadd(7, w + 64, N * 64);
        _tile_dpbusd(1, 4, 7);
      }
      if constexpr (M == 2) {
        _tile_loadd(5, at + 16 * lda, lda);
        _tile_dpbusd(2, 5, 6);
        if constexpr (N == 2) _tile_dpbusd(3, 5, 7);
      }
    }
  }
  _tile_stored(0, sums, N * 64);
  if constexpr (N == 2) _tile_stored(1, sums + 16, N * 64);
  if constexpr (M == 2) _tile_stored(2, sums + 16 * N * 16, N * 64);
  if constexpr (M == 2 && N == 2) _tile_stored(3, sums + 16 * N * 16 + 16, N * 64);
}

template <class V, class Out = Epilogue<V>>
void dense_amx(const xq::DenseTask& t) {
  const xq::Packed& p = *t.packed;
  const Out epilogue(p);
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  alignas(64) int32_t sums[32 * 32];
  const TileConfig config;
  _tile_loadconfig(&config);
  const int64_t chunk = chunk_rows(t, 32);
  const int64_t tiles = xq::ceil_div(t.rows, 32), per_chunk = chunk / 32;
  // Segments follow one another, so that weights are read once for several small images.
  for (int64_t first = 0; first < t.segments * tiles; first += per_chunk)
    for (int b = t.block_begin; b < t.block_end; ++b) {
      const int64_t last = xq::min64(first + per_chunk, t.segments * tiles);
      int64_t s = first / tiles, m = first % tiles * 32;
      for (int64_t i = first; i < last; ++i) {
        const int64_t rows = xq::min64(32, t.rows - m);
        const bool in_tail = m >= t.tail_begin;
        const int64_t lda = in_tail ? t.tail_lda : t.lda;
        const uint8_t* a = (in_tail ? t.tail + (m - t.tail_begin) * lda
                                    : t.a + s * t.a_segment + m * lda) + blocks[b].a_off;
        if (blocks[b].vecs == 2) {
          rows > 16 ? amx_tile<2, 2>(p, a, lda, t.offsets, blocks[b], sums)
                    : amx_tile<1, 2>(p, a, lda, t.offsets, blocks[b], sums);
          put_rows<V, 2>(epilogue, t, blocks[b], s, m, rows, sums, 32);
        } else {
          rows > 16 ? amx_tile<2, 1>(p, a, lda, t.offsets, blocks[b], sums)
                    : amx_tile<1, 1>(p, a, lda, t.offsets, blocks[b], sums);
          put_rows<V, 1>(epilogue, t, blocks[b], s, m, rows, sums, 16);
        }
        m += 32;
        if (m >= t.rows) m = 0, ++s;
      }
    }
  _tile_release();
}

}  // namespace

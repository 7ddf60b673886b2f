// The GEMM of dense.h on AMX tiles: 32 pixels by 32 output channels stay in four tiles.
// Weights have the same layout as for vectors; a run's quads come in sixteens, one tile deep, or are one tile of fewer.
#pragma once

#include "dense.h"

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  TileConfig() = default;
  // Tiles 4 to 7 hold no more of K than runs are long. A row that lies in two cache lines takes several times as long to load,
  // and of short rows fewer do.
  explicit TileConfig(const xq::Packed& p) {
    const int quads = static_cast<int>(tile_quads(p));
    bytes[4] = bytes[5] = static_cast<uint16_t>(4 * quads);
    rows[6] = rows[7] = static_cast<uint8_t>(quads);
  }

  // Of a product; all runs are alike, and longer ones are whole tiles.
  static int64_t tile_quads(const xq::Packed& p) { return xq::min64(p.at<xq::Run>(p.runs)->quads, 16); }
};

// Products of K of a row: one a tile.
inline int64_t tile_steps(const xq::Packed& p) {
  return p.n_runs * xq::ceil_div(p.at<xq::Run>(p.runs)->quads, 16);
}

// Lines of memory that will be read soon, asked for a few at a time.
struct Prefetches {
  const int8_t *at, *end;

  void take(int64_t lines) {
    for (; lines > 0 && at < end; --lines, at += 64) xq::prefetch_to_l2(at);
  }
};

// How the tiles of a product are read.
struct TileReads {
  int64_t lda;
  const int64_t* offsets;  // of runs
  int64_t quads;           // of K that a tile takes
  bool pass_by;            // whether weights pass L1 by
  const int32_t* corr;     // what sums begin with
};

// Sums of 16 M rows and 16 N outputs: tiles 0 to 3 hold sums, 4 and 5 pixels, 6 and 7 weights. `meanwhile` is called
// once for every 64 bytes of K.
template <int M, int N, class Meanwhile>
XQ_INLINE inline void amx_tile(const xq::Packed& p, const xq::Block& block, const uint8_t* a, const TileReads& reads,
                               int32_t* sums, const Meanwhile& meanwhile) {
  const xq::Run* runs = p.at<xq::Run>(p.runs);
  const int8_t* w = p.at<int8_t>(p.weights) + block.w_off;
  const int32_t* corr = reads.corr + block.s_off;
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
  const int64_t lda = reads.lda, step = reads.quads * N * 64;
  const bool pass_by = reads.pass_by;
  for (int i = 0; i < p.n_runs; ++i) {
    if (reads.offsets[i] == xq::kNoInput) {
      w += xq::ceil_div(runs[i].quads, 16) * step;
      continue;
    }
    const uint8_t* at = a + reads.offsets[i];
    for (int q = 0; q < runs[i].quads; q += 16, at += 64, w += step) {
      if (pass_by) _tile_stream_loadd(6, w, N * 64);
      else _tile_loadd(6, w, N * 64);
      _tile_loadd(4, at, lda);
      _tile_dpbusd(0, 4, 6);
      if constexpr (N == 2) {
        if (pass_by) _tile_stream_loadd(7, w + 64, N * 64);
        else _tile_loadd(7, w + 64, N * 64);
        _tile_dpbusd(1, 4, 7);
      }
      if constexpr (M == 2) {
        _tile_loadd(5, at + 16 * lda, lda);
        _tile_dpbusd(2, 5, 6);
        if constexpr (N == 2) _tile_dpbusd(3, 5, 7);
      }
      meanwhile();
    }
  }
  _tile_stored(0, sums, N * 64);
  if constexpr (N == 2) _tile_stored(1, sums + 16, N * 64);
  if constexpr (M == 2) _tile_stored(2, sums + 16 * N * 16, N * 64);
  if constexpr (M == 2 && N == 2) _tile_stored(3, sums + 16 * N * 16 + 16, N * 64);
}

template <class Meanwhile>
XQ_INLINE inline void amx_rows(const xq::Packed& p, const xq::Block& block, const uint8_t* a, const TileReads& reads,
                               int64_t rows, int32_t* sums, const Meanwhile& meanwhile) {
  if (block.vecs == 2 && rows > 16) amx_tile<2, 2>(p, block, a, reads, sums, meanwhile);
  else if (block.vecs == 2) amx_tile<1, 2>(p, block, a, reads, sums, meanwhile);
  else if (rows > 16) amx_tile<2, 1>(p, block, a, reads, sums, meanwhile);
  else amx_tile<1, 1>(p, block, a, reads, sums, meanwhile);
}

// Whether weights pass L1 by: those that would not stay there until the next rows come only put out rows that would.
inline bool pass_by(const xq::DenseTask& t, int64_t weights) {
  return t.rows > 32 && rows_stay(t, 32) && weights > t.packed->caches.l1 * 5 / 8;
}

// Sums of a tile that wait to become bytes.
template <class V>
class WaitingBytes {
 public:
  explicit WaitingBytes(const xq::DenseTask& task) : task_(task), epilogue_(*task.packed) {
    ways_[0] = epilogue_.template put_rows_way<1>(task.res), ways_[1] = epilogue_.template put_rows_way<2>(task.res);
  }

  // The sums of `rows` rows of a segment from `begin` on.
  void wait(const xq::Block& block, int64_t segment, int64_t begin, int64_t rows, const int32_t* sums) {
    const xq::Packed& p = *task_.packed;
    left_ = rows;
    way_ = ways_[block.vecs - 1];
    // The division is worth avoiding: flat tensors are one long row.
    const int64_t y = begin < task_.row_len ? 0 : begin / task_.row_len;
    x_ = begin - y * task_.row_len;
    pixels_.sums = sums, pixels_.lds = block.vecs * V::kLanes;
    pixels_.mult = p.at<float>(p.mult) + block.s_off, pixels_.bias = p.at<float>(p.bias) + block.s_off;
    pixels_.out = task_.out + segment * task_.out_segment + block.out_c + y * task_.out_row + x_ * task_.out_pixel;
    pixels_.stride = task_.out_pixel, pixels_.res_stride = task_.res_pixel, pixels_.count = block.count;
    if (task_.res)
      pixels_.res = task_.res + segment * task_.res_segment + block.out_c + y * task_.res_row + x_ * task_.res_pixel;
  }

  int64_t left() const { return left_; }

  XQ_INLINE inline void take(int64_t rows) {
    if (left_ > 0) put(xq::min64(rows, left_));
  }

 private:
  void put(int64_t rows) {
    left_ -= rows;
    while (rows > 0) {
      const int64_t valid = xq::min64(task_.row_valid - x_, rows), here = xq::min64(task_.row_len - x_, rows);
      if (valid > 0) way_(epilogue_, pixels_, valid);
      move(here);
      rows -= here, x_ += here;
      if (x_ < task_.row_len) return;
      x_ = 0;
      pixels_.out += task_.out_row - task_.row_len * task_.out_pixel;
      if (task_.res) pixels_.res += task_.res_row - task_.row_len * task_.res_pixel;
    }
  }

  void move(int64_t rows) {
    pixels_.sums += rows * pixels_.lds, pixels_.out += rows * task_.out_pixel;
    if (task_.res) pixels_.res += rows * task_.res_pixel;
  }

  const xq::DenseTask& task_;
  const Epilogue<V> epilogue_;
  typename Epilogue<V>::PutRows ways_[2], way_ = nullptr;
  typename Epilogue<V>::Pixels pixels_{};
  int64_t x_ = 0, left_ = 0;
};

// A block of 32 x 32 sums takes about as long to multiply, at some hundred products each, as to become bytes. Tiles
// and vectors are different parts of a core, so the bytes of a block are made between the products of the next one.
template <class V>
void dense_amx(const xq::DenseTask& t) {
  const xq::Packed& p = *t.packed;
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  alignas(64) int32_t sums[2][32 * 32];
  const TileConfig config(p);
  _tile_loadconfig(&config);
  const int64_t steps = tile_steps(p), quads = TileConfig::tile_quads(p);
  const int64_t tiles = xq::ceil_div(t.rows, 32);
  const bool once = weights_pass_once(t);
  const int64_t per_chunk = once ? t.segments * tiles : chunk_rows(t, 32) / 32;
  // A block that stays in L1 beside rows that pass is as quick.
  const bool large = blocks[t.block_begin].w_size > p.caches.l1 * 3 / 8;
  const int32_t together = once && large ? blocks_together(t, 32, p.caches.l2 / 32) : 1;
  WaitingBytes<V> waiting(t);
  int turn = 0;
  // Segments follow one another, so that weights are read once for several small images.
  for (int64_t first = 0; first < t.segments * tiles; first += per_chunk) {
    const int64_t last = xq::min64(first + per_chunk, t.segments * tiles);
    for (int32_t begin = t.block_begin; begin < t.block_end; begin += together) {
      const BlockSpan span(t, begin, together), next(t, span.end, once ? together : 0);
      Prefetches ahead{next.weights, next.weights_end};
      const int64_t lines = xq::ceil_div(next.bytes() / 64, steps * per_chunk * (span.end - begin));
      TileReads reads{0, t.offsets, quads, pass_by(t, span.bytes()), t.corr};
      int64_t s = first / tiles, m = first % tiles * 32;
      for (int64_t i = first; i < last; ++i) {
        const int64_t rows = xq::min64(32, t.rows - m);
        const bool in_tail = m >= t.tail_begin;
        reads.lda = in_tail ? t.tail_lda : t.lda;
        const uint8_t* a = in_tail ? t.tail + (m - t.tail_begin) * reads.lda : t.a + s * t.a_segment + m * reads.lda;
        for (int32_t b = begin; b < span.end; ++b) {
          const xq::Block& block = blocks[b];
          const int64_t share = xq::round_up(xq::ceil_div(waiting.left(), steps), 8);
          const auto meanwhile = [&]() XQ_INLINE { waiting.take(share), ahead.take(lines); };
          amx_rows(p, block, a + block.a_off, reads, rows, sums[turn], meanwhile);
          waiting.take(waiting.left());
          waiting.wait(block, s, m, rows, sums[turn]);
          turn ^= 1;
        }
        m += 32;
        if (m >= t.rows) m = 0, ++s;
      }
    }
  }
  waiting.take(waiting.left());
  _tile_release();
}

}  // namespace

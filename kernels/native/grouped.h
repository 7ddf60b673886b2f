// Convolutions with 4 or 8 channels a group. Each lane of a dot product needs its own group's quad,
// so a register of the pixel's channels is permuted rather than one quad broadcast: no product is
// wasted on channels of other groups.
#pragma once

#include "epilogue.h"

namespace {

// For each vector of a block and each quad of a group, which quad of the pixel every lane takes.
template <class V, int VECS>
struct GroupLanes {
  alignas(64) int32_t index[2][VECS][V::kLanes];
  int64_t quads;
  explicit GroupLanes(const xq::Packed& p) : quads(p.conv.in_channels / p.conv.groups / 4) {
    if (!V::kVnni) return;  // nobody asks: grouped_tile_ordered has places of its own
    for (int q = 0; q < quads; ++q)
      for (int v = 0; v < VECS; ++v)
        for (int lane = 0; lane < V::kLanes; ++lane)
          index[q][v][lane] = static_cast<int32_t>(xq::channel_of(VECS, v, lane) / (4 * quads) * quads + q);
  }
};

// Without VNNI: each lane's bytes are picked in an order that makes its pairs of products safe; the quads of the
// few taps where not all lanes have one come last.
template <class V, int ROWS, int VECS>
void grouped_tile_ordered(const Tile<Epilogue<V>>& tile, const uint8_t* a, int64_t lda, const int64_t* offsets) {
  using I = typename V::I;
  constexpr int kWidth = VECS * V::kLanes;
  const xq::Packed& p = *tile.task.packed;
  const xq::Block& block = tile.block;
  const int64_t index = &block - p.at<xq::Block>(p.blocks);
  const int8_t* w = p.at<int8_t>(p.weights) + block.w_off;
  const int32_t* corr = p.at<int32_t>(p.corr) + block.s_off;
  const int32_t* run = p.at<int32_t>(p.order) + index * p.order_stride;
  const uint8_t* places = p.at<uint8_t>(p.regroup) + index * p.regroup_stride;
  I acc[ROWS * VECS];
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { acc[i] = V::load(corr + i % VECS * V::kLanes); });
  const auto step = [&](auto dot) XQ_INLINE {
    const uint8_t* at[(ROWS + 2) / 3];
    unroll<(ROWS + 2) / 3>([&](int r) XQ_INLINE { at[r] = a + offsets[*run] + 3 * r * lda; });
    unroll<ROWS>([&](int r) XQ_INLINE {
      const I pixel = V::template spread<kWidth>(at[r / 3] + r % 3 * lda);
      unroll<VECS>([&](int v) XQ_INLINE {
        const I x = V::shuffle_windows(pixel, V::load(places + v * V::kLanes * 4));
        acc[r * VECS + v] = dot(acc[r * VECS + v], x, V::load(w + v * V::kLanes * 4));
      });
    });
    w += kWidth * 4, places += kWidth * 4;
  };
  const int32_t *safe_end = run + 1 + *run, *end = run + p.order_stride;
  for (++run; run < safe_end; ++run) step(V::dot_safe);
  for (; run < end; ++run) step(V::dot);
  put_tile<V, ROWS, VECS>(tile, acc);
}

template <class V, int ROWS, int VECS>
void grouped_tile(const Tile<Epilogue<V>>& tile, const GroupLanes<V, VECS>& lanes, const uint8_t* a, int64_t lda,
                  const int64_t* offsets) {
  using I = typename V::I;
  constexpr int kWidth = VECS * V::kLanes;
  if constexpr (!V::kVnni) return grouped_tile_ordered<V, ROWS, VECS>(tile, a, lda, offsets);
  const xq::Packed& p = *tile.task.packed;
  const xq::Block& block = tile.block;
  const int8_t* w = p.at<int8_t>(p.weights) + block.w_off;
  const int32_t* corr = p.at<int32_t>(p.corr) + block.s_off;
  I acc[ROWS * VECS];
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { acc[i] = V::load(corr + i % VECS * V::kLanes); });
  for (int i = 0; i < p.n_runs; ++i)
    for (int q = 0; q < lanes.quads; ++q, w += kWidth * 4) {
      I at[VECS], weights[VECS];
      unroll<VECS>([&](int v) XQ_INLINE {
        at[v] = V::load(lanes.index[q][v]);
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
  put_tile<V, ROWS, VECS>(tile, acc);
}

template <class V>
void grouped(const xq::DenseTask& t) {
  const xq::Packed& p = *t.packed;
  const Epilogue<V> epilogue(p);
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  const GroupLanes<V, 1> one(p);
  const GroupLanes<V, 2> two(p);
  constexpr int kRows = V::kGroupedRows;
  for (int64_t s = 0; s < t.segments; ++s)
    for (int64_t m = 0; m < t.rows; m += kRows)
      for (int b = t.block_begin; b < t.block_end; ++b) {
        const int64_t rows = xq::min64(kRows, t.rows - m);
        const uint8_t* a = t.a + s * t.a_segment + m * t.lda + blocks[b].a_off;
        const Tile<Epilogue<V>> tile{epilogue, t, blocks[b], s, m, rows};
        if (blocks[b].vecs == 2) grouped_tile<V, kRows, 2>(tile, two, a, t.lda, t.offsets);
        else grouped_tile<V, kRows, 1>(tile, one, a, t.lda, t.offsets);
      }
}

}  // namespace

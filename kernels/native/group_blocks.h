// Products of many rows by codes of 4 bits with scales for groups: the codes of a block become signed bytes in L1 once
// for all rows that pass over it, not once for each tile of rows. See groups.h.
//
// Without VNNI weights are -8 to 7 and codes of rows 0 to 255, so that 16 products, those of a lane in 32 features, are at most
// 16 · 255 · 8 = 32640 in size together: they are added in 16 bits, and become 32 bits once.
#pragma once

#include "group_loops.h"

namespace {

// Features of a lane whose products are added in 16 bits, by quads: each of its two sums takes half of them.
constexpr int64_t kShortQuads = 8;
static_assert(kShortQuads * 2 * 255 * 8 <= 32767);

// Bytes of weights that are unpacked together: half of L1, beside the rows of a tile and its floats.
constexpr int64_t kBlockBytes = 16 << 10;

// Rows that pass over a block together: its weights are unpacked once for so many.
constexpr int64_t kBlockRows = 120;

// Rows of a tile: as many as registers have room for the sums of two vectors of each of.
template <class V>
constexpr int kBlockTile = V::kLanes == 16 ? 12 : 6;

// Groups of a block that are unpacked together.
template <class V, int VECS>
struct BlockCodes {
  static constexpr int64_t kWidth = VECS * V::kLanes, kMostGroups = kBlockBytes / kWidth / 8;

  int64_t groups;
  alignas(64) int8_t codes[kBlockBytes];  // [group][quad][vector][lane][4]
  alignas(64) float scales[kMostGroups * kWidth], offsets[kMostGroups * kWidth];
};

// Rows of codes from the first of these groups on. `sums` are what the codes of each group add up to, where there are
// offsets; `values` are VECS vectors a row.
struct BlockRows {
  const uint8_t* a;
  int64_t lda;
  const int32_t* sums;
  float* values;
};

template <class V>
XQ_INLINE inline typename V::F load_scales(const uint8_t* from, bool half) {
  return half ? load_halves<V>(from) : V::loadf(reinterpret_cast<const float*>(from));
}

// The groups that begin at `from`; returns where the next one does.
template <class V, int VECS>
const uint8_t* unpack_groups(const xq::Packed& p, const uint8_t* from, BlockCodes<V, VECS>& to) {
  using I = typename V::I;
  constexpr int64_t kVector = V::kLanes * 4;
  const I low = V::set8(15), eight = V::set8(8);
  const int64_t features = p.conv.in_channels / p.groups, each = V::kLanes * (p.half_scales ? 2 : 4);
  int8_t* codes = to.codes;
  for (int64_t g = 0; g < to.groups; ++g) {
    for (int64_t k = 0; k < features; k += 8, from += VECS * kVector, codes += 2 * VECS * kVector)
      unroll<VECS>([&](int v) XQ_INLINE {
        const I bytes = V::load(from + v * kVector);
        V::store(codes + v * kVector, V::sub8(V::both(bytes, low), eight));
        V::store(codes + (VECS + v) * kVector, V::sub8(V::both(V::template right16<4>(bytes), low), eight));
      });
    const auto take = [&](float* scales) XQ_INLINE {
      unroll<VECS>([&](int v) XQ_INLINE {
        V::store(scales + (g * VECS + v) * V::kLanes, V::as_bits(load_scales<V>(from, p.half_scales)));
        from += each;
      });
    };
    take(to.scales);
    if (p.has_offsets) take(to.offsets);
  }
  return from;
}

// ROWS rows times the groups of a block, which are longer than 16 bits hold the sums of if they are LONG.
template <class V, int ROWS, int VECS, bool LONG>
__attribute__((noinline)) void block_tile(const xq::Packed& p, const BlockCodes<V, VECS>& block, const BlockRows& rows) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr int kBases = (ROWS + 2) / 3, kCount = ROWS * VECS;
  constexpr int64_t kVector = V::kLanes * 4, kStep = VECS * kVector;
  const int64_t quads = p.conv.in_channels / p.groups / 4, lda = rows.lda;
  const uint8_t* at[kBases];  // three rows an address register
  unroll<kBases>([&](int i) XQ_INLINE { at[i] = rows.a + 3 * i * lda; });
  const int8_t* w = block.codes;
  const float* scales = block.scales;
  float* values = rows.values;
  alignas(64) int32_t wide[LONG ? kCount * V::kLanes : 1];
  I acc[kCount];
  for (int64_t g = 0; g < block.groups; ++g, scales += VECS * V::kLanes) {
    int64_t left = quads;
    do {
      unroll<kCount>([&](int i) XQ_INLINE {
        acc[i] = V::set32(0);
        keep_apart(acc[i]);
      });
      for (int64_t q = LONG ? xq::min64(left, kShortQuads) : left; q > 0; --q) {
        I weights[VECS];
        unroll<VECS>([&](int v) XQ_INLINE { weights[v] = V::load(w + v * kVector); });
        unroll<ROWS>([&](int r) XQ_INLINE {
          const I x = V::quad(at[r / 3] + r % 3 * lda);
          unroll<VECS>([&](int v) XQ_INLINE {
            I& to = acc[r * VECS + v];
            if constexpr (V::kVnni) to = V::dot(to, x, weights[v]);
            else to = V::add16(to, V::multiply_pairs(x, weights[v]));
          });
        });
        w += kStep;
        unroll<kBases>([&](int i) XQ_INLINE {
          at[i] += 4;
          __asm__("" : "+r"(at[i]));  // no vector of addresses
        });
        unroll<kCount>([&](int i) XQ_INLINE { keep_apart(acc[i]); });
      }
      if constexpr (LONG) {
        unroll<kCount>([&](int i) XQ_INLINE {
          const I sum = V::multiply16(acc[i], V::set16(1));
          V::store(wide + i * V::kLanes, left == quads ? sum : V::add32(V::load(wide + i * V::kLanes), sum));
        });
      }
      left -= kShortQuads;
    } while (LONG && left > 0);
    unroll<kCount>([&](int i) XQ_INLINE {
      const I sum = LONG ? V::load(wide + i * V::kLanes) : V::kVnni ? acc[i] : V::multiply16(acc[i], V::set16(1));
      float* value = values + i * V::kLanes;
      V::store(value, V::as_bits(V::fma(V::to_float(sum), V::loadf(scales + i % VECS * V::kLanes), V::loadf(value))));
    });
    if (!p.has_offsets) continue;
    unroll<kCount>([&](int i) XQ_INLINE {
      const F sum = V::setf(static_cast<float>(rows.sums[i / VECS * p.groups + g]));
      const F offset = V::loadf(block.offsets + (scales - block.scales) + i % VECS * V::kLanes);
      float* value = values + i * V::kLanes;
      V::store(value, V::as_bits(V::fma(sum, offset, V::loadf(value))));
    });
  }
}

// Of `count` rows, from ROWS to kBlockTile.
template <class V, int VECS, int ROWS = 1>
void block_rows(const xq::Packed& p, const BlockCodes<V, VECS>& block, const BlockRows& rows, int64_t count) {
  if constexpr (ROWS < kBlockTile<V>) {
    if (count > ROWS) return block_rows<V, VECS, ROWS + 1>(p, block, rows, count);
  }
  if constexpr (!V::kVnni) {
    if (p.conv.in_channels / p.groups > 4 * kShortQuads) return block_tile<V, ROWS, VECS, true>(p, block, rows);
  }
  block_tile<V, ROWS, VECS, false>(p, block, rows);
}

// Rows of a task that lie side by side.
struct RowsTogether {
  const uint8_t* a;
  int64_t lda, first, count;
  const int32_t* sums;
};

template <class V, int VECS>
void block_product(const xq::DenseTask& t, const xq::Block& b, const RowsTogether& rows) {
  const xq::Packed& p = *t.packed;
  const int64_t features = p.conv.in_channels / p.groups, width = VECS * V::kLanes;
  const int64_t together = kBlockBytes / width / features, tiles = xq::ceil_div(rows.count, kBlockTile<V>);
  alignas(64) float values[kBlockRows * VECS * V::kLanes];
  memset(values, 0, static_cast<size_t>(rows.count * width) * sizeof(float));
  BlockCodes<V, VECS> block;
  const uint8_t* from = p.at<uint8_t>(p.weights) + b.w_off;
  for (int64_t g = 0; g < p.groups; g += together) {
    block.groups = xq::min64(together, p.groups - g);
    const uint8_t* next = unpack_groups<V, VECS>(p, from, block);
    // What is unpacked next is asked for meanwhile, by each tile its part. The last weights have none behind them, but
    // asking for what is not there does no harm.
    const int64_t bytes = next - from;
    for (int64_t i = 0; i < tiles; ++i) {
      for (int64_t line = i * bytes / tiles / 64; line < (i + 1) * bytes / tiles / 64; ++line) xq::prefetch_to_l2(next + line * 64);
      const int64_t m = i * rows.count / tiles, end = (i + 1) * rows.count / tiles;
      const int32_t* sums = rows.sums ? rows.sums + m * p.groups + g : nullptr;
      block_rows<V, VECS>(p, block, {rows.a + m * rows.lda + g * features, rows.lda, sums, values + m * width}, end - m);
    }
    from = next;
  }
  put_groups<V, VECS>(t, b, rows.first, static_cast<int>(rows.count), values);
}

// Whether a call of so many rows is to do that; longer groups than are unpacked together never are.
template <class V>
bool unpacks_blocks(const xq::DenseTask& t) {
  const xq::Packed& p = *t.packed;
  if (t.rows < p.unpack_from || (p.unpack_to && t.rows >= p.unpack_to)) return false;
  return p.code_bits == 4 && p.conv.in_channels / p.groups <= kBlockBytes / (2 * V::kLanes);
}

template <class V>
void group_blocks(const xq::DenseTask& t) {
  // What the codes of each group add up to, of as many rows as pass over all blocks together.
  constexpr int64_t kSums = 16 << 10;
  static_assert(kSums >= xq::kMostGroups);
  int32_t sums[kSums];
  const xq::Packed& p = *t.packed;
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  const int64_t most = p.has_offsets ? xq::min64(kBlockRows, kSums / p.groups) : kBlockRows;
  const int64_t border = xq::min64(t.tail_begin, t.rows);
  for (int64_t begin = 0; begin < t.rows;) {
    const bool in_tail = begin >= border;
    const int64_t stop = in_tail ? t.rows : border, lda = in_tail ? t.tail_lda : t.lda;
    // Even numbers of rows rather than full ones and a remnant.
    const int64_t end = begin + xq::ceil_div(stop - begin, xq::ceil_div(stop - begin, most));
    const uint8_t* a = in_tail ? t.tail + (begin - border) * lda : t.a + begin * lda;
    for (int64_t m = begin; p.has_offsets && m < end; ++m)
      sum_groups(a + (m - begin) * lda, p.groups, p.conv.in_channels / p.groups, 1, sums + (m - begin) * p.groups);
    const RowsTogether rows{a, lda, begin, end - begin, p.has_offsets ? sums : nullptr};
    for (int b = t.block_begin; b < t.block_end; ++b)
      (blocks[b].vecs == 2 ? block_product<V, 2> : block_product<V, 1>)(t, blocks[b], rows);
    begin = end;
  }
}

}  // namespace

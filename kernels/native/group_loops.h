// Products by weights with scales for groups of input features: see groups.h.
//
// A tile of rows by one or two vectors of outputs keeps the integer sums of one group, and floats of all groups. Codes of
// 4 bits become bytes in registers, for as many rows as a tile has, so that memory gives half a byte a weight.
#pragma once

#include "float_epilogue.h"
#include "internal.h"
#include "unroll.h"

namespace {

enum class GroupCodes { kNibbles, kNarrow, kBytes };

// Without VNNI a pair of products meets in 16 bits, which saturate at 32767. Nibbles are multiplied as numbers from 0 to
// 15, and 8 times the sum of the row's codes is taken off before: a pair is at most 2 · 255 · 15 = 7650, two pairs, which are
// added in 16 bits, 15300. Narrow bytes are at most 64, so that a pair is at most 2 · 255 · 64 = 32640; others are widened first.
template <class V, GroupCodes CODES>
XQ_INLINE inline typename V::I dot_two_quads(typename V::I acc, typename V::I x, typename V::I w, typename V::I y, typename V::I u) {
  if constexpr (V::kVnni) return V::dot(V::dot(acc, x, w), y, u);
  if constexpr (CODES == GroupCodes::kNibbles) return V::dot_couple(acc, x, w, y, u);
  if constexpr (CODES == GroupCodes::kNarrow) return V::dot_safe(V::dot_safe(acc, x, w), y, u);
  return V::dot_wide(V::dot_wide(acc, x, w), y, u);
}

// Floats of 16 bits, which every CPU with FMA can read.
template <class V>
XQ_INLINE inline typename V::F load_halves(const uint8_t* from) {
  if constexpr (V::kLanes == 16) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  else return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// Rows of codes side by side, and what the codes of each of their groups add up to: of nibbles -8 times that, where their
// products begin.
struct GroupRows {
  const uint8_t* a;
  int64_t lda;
  const int32_t* sums;
  const uint8_t* ahead;  // what of the next block is asked for meanwhile, by tiles of more than kStreamRows rows
  int64_t beside;
};

// Up to so many rows take no longer than their weights come. CPUs with VNNI fetch those ahead sooner where they are not
// asked to; those without stop at the end of each page, and read a quarter more a second where they are asked so far ahead.
constexpr int kStreamRows = 2;
constexpr int64_t kStreamAhead = 3072;
template <class V>
constexpr bool kAsksAhead = V::kLanes == 8 && !V::kVnni;

constexpr int32_t kNibbleZero = -8;

template <class V, int VECS, int ACTIVATION>
void put_groups_as(const xq::DenseTask& t, const xq::Block& b, int64_t first, int rows, const float* values) {
  using F = typename V::F;
  const xq::Packed& p = *t.packed;
  const float *totals = p.at<float>(p.mult) + b.s_off, *biases = p.at<float>(p.bias) + b.s_off;
  for (int r = 0; r < rows; ++r, values += VECS * V::kLanes) {
    const F minus_zp = V::setf(-static_cast<float>(t.row_zp[first + r])), scale = V::setf(t.row_scale[first + r]);
    uint8_t* out = t.out + (first + r) * t.out_pixel + int64_t{b.out_c} * 4;
    unroll<VECS>([&](int v) XQ_INLINE {
      const int64_t at = v * V::kLanes, left = b.count - at;
      if (left <= 0) return;
      const F x = V::fma(minus_zp, V::loadf(totals + at), V::loadf(values + at));
      const F y = activate<V, ACTIVATION>(V::fma(x, scale, V::loadf(biases + at)));
      if (left >= V::kLanes) V::store(out + at * 4, V::as_bits(y));
      else V::store_floats(out + at * 4, y, left);
    });
  }
}

template <class V, int VECS>
void put_groups(const xq::DenseTask& t, const xq::Block& b, int64_t first, int rows, const float* values) {
  switch (t.packed->activation) {
    case XQ_ACT_RELU: return put_groups_as<V, VECS, XQ_ACT_RELU>(t, b, first, rows, values);
    case XQ_ACT_GELU: return put_groups_as<V, VECS, XQ_ACT_GELU>(t, b, first, rows, values);
    case XQ_ACT_GELU_TANH: return put_groups_as<V, VECS, XQ_ACT_GELU_TANH>(t, b, first, rows, values);
    case XQ_ACT_SILU: return put_groups_as<V, VECS, XQ_ACT_SILU>(t, b, first, rows, values);
    case XQ_ACT_SIGMOID: return put_groups_as<V, VECS, XQ_ACT_SIGMOID>(t, b, first, rows, values);
    case XQ_ACT_TANH: return put_groups_as<V, VECS, XQ_ACT_TANH>(t, b, first, rows, values);
    default: return put_groups_as<V, VECS, XQ_ACT_NONE>(t, b, first, rows, values);
  }
}

// Sums that begin alike keep registers of their own, through a loop and behind it: GCC would move and store them otherwise.
template <class I>
XQ_INLINE inline void keep_apart(I& sum) {
  __asm__("" : "+v"(sum));
}

// Floats of a tile, which wait in registers for the end of a group where sums and weights leave room for them, else in
// memory: left to choose, compilers move sums out of registers as well.
template <class V, int ROWS, int VECS>
class GroupFloats {
  using F = typename V::F;
  static constexpr int kCount = ROWS * VECS;
  static constexpr bool kInRegisters = 2 * kCount + 2 * VECS + 3 <= (V::kLanes == 16 ? 32 : 16);

 public:
  GroupFloats() {
    unroll<kCount>([&](int i) XQ_INLINE { put(i, V::setf(0)); });
  }
  XQ_INLINE inline void add(int i, F x, F y) { put(i, V::fma(x, y, get(i))); }
  // Of an end of a group: what is in memory is not held in registers until the next one.
  XQ_INLINE inline void settle() {
    if constexpr (!kInRegisters) __asm__ volatile("" : "+m"(all_));
  }
  const float* data() {
    if constexpr (kInRegisters) unroll<kCount>([&](int i) XQ_INLINE { V::store(all_ + i * V::kLanes, V::as_bits(kept_[i])); });
    return all_;
  }

 private:
  XQ_INLINE inline F get(int i) const {
    if constexpr (kInRegisters) return kept_[i];
    else return V::loadf(all_ + i * V::kLanes);
  }
  XQ_INLINE inline void put(int i, F x) {
    if constexpr (kInRegisters) kept_[i] = x;
    else V::store(all_ + i * V::kLanes, V::as_bits(x));
  }
  F kept_[kInRegisters ? kCount : 1];
  alignas(64) float all_[kCount * V::kLanes];
};

// Rows [first, first + ROWS) of a task times one block.
template <class V, int ROWS, int VECS, GroupCodes CODES, bool HALF>
void group_tile(const xq::DenseTask& t, const xq::Block& b, const GroupRows& rows, int64_t first) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr bool kNibbles = CODES == GroupCodes::kNibbles;
  constexpr int kVector = V::kLanes * 4, kStep = VECS * kVector, kScales = VECS * V::kLanes * (HALF ? 2 : 4);
  constexpr int kBases = (ROWS + 2) / 3, kAsked = min_of(2 * 64, kStep);
  const xq::Packed& p = *t.packed;
  const uint8_t* w = p.at<uint8_t>(p.weights) + b.w_off;
  const int64_t groups = p.groups, features = p.conv.in_channels / groups, lda = rows.lda;
  const uint8_t* at[kBases];  // three rows an address register
  unroll<kBases>([&](int i) XQ_INLINE { at[i] = rows.a + 3 * i * lda; });
  const auto row_at = [&](int r) XQ_INLINE { return at[r / 3] + r % 3 * lda; };
  const auto scale_at = [](const uint8_t* from) XQ_INLINE {
    if constexpr (HALF) return load_halves<V>(from);
    else return V::loadf(reinterpret_cast<const float*>(from));
  };
  const I low = V::set8(15);
  GroupFloats<V, ROWS, VECS> values;
  const int32_t* sums = rows.sums;
  [[maybe_unused]] const uint8_t* ahead = rows.ahead;
  I acc[ROWS * VECS];
  for (int64_t g = 0; g < groups; ++g, ++sums) {
    unroll<ROWS>([&](int r) XQ_INLINE {
      const I start = V::set32(kNibbles ? sums[r * groups] : 0);
      unroll<VECS>([&](int v) XQ_INLINE {
        acc[r * VECS + v] = start;
        if constexpr (ROWS > 1) keep_apart(acc[r * VECS + v]);
      });
    });
    for (int64_t k = 0; k < features; k += 8) {
      I weights[2 * VECS];
      unroll<VECS>([&](int v) XQ_INLINE {
        const I bytes = V::load(w + v * kVector);
        if constexpr (kNibbles) {
          weights[v] = V::both(bytes, low), weights[VECS + v] = V::both(V::template right16<4>(bytes), low);
        } else {
          weights[v] = bytes, weights[VECS + v] = V::load(w + kStep + v * kVector);
        }
      });
      if constexpr (ROWS <= kStreamRows && kAsksAhead<V>) {
        xq::prefetch_to_l2(w + kStreamAhead);
        if constexpr (!kNibbles || kStep > 64) xq::prefetch_to_l2(w + kStreamAhead + 64);
      }
      w += kNibbles ? kStep : 2 * kStep;
      if constexpr (ROWS > kStreamRows) xq::prefetch_to_l2(ahead), xq::prefetch_to_l2(ahead + rows.beside), ahead += kAsked;
      unroll<ROWS>([&](int r) XQ_INLINE {
        const I x = V::quad(row_at(r)), y = V::quad(row_at(r) + 4);
        unroll<VECS>([&](int v) XQ_INLINE {
          I& to = acc[r * VECS + v];
          to = dot_two_quads<V, CODES>(to, x, weights[v], y, weights[VECS + v]);
        });
      });
      unroll<kBases>([&](int i) XQ_INLINE {
        at[i] += 8;
        __asm__("" : "+r"(at[i]));  // no vector of addresses
      });
      if constexpr (ROWS > 1) unroll<ROWS * VECS>([&](int i) XQ_INLINE { keep_apart(acc[i]); });
    }
    unroll<VECS>([&](int v) XQ_INLINE {
      const F scale = scale_at(w + v * (kScales / VECS));
      unroll<ROWS>([&](int r) XQ_INLINE { values.add(r * VECS + v, V::to_float(acc[r * VECS + v]), scale); });
    });
    values.settle();
    w += kScales;
    if (!p.has_offsets) continue;
    unroll<VECS>([&](int v) XQ_INLINE {
      const F offset = scale_at(w + v * (kScales / VECS));
      unroll<ROWS>([&](int r) XQ_INLINE {
        const F sum = V::setf(static_cast<float>(sums[r * groups]) / (kNibbles ? kNibbleZero : 1));  // exact
        values.add(r * VECS + v, sum, offset);
      });
    });
    values.settle();
    w += kScales;
  }
  put_groups<V, VECS>(t, b, first, ROWS, values.data());
}

// As many rows as vectors have registers for the sums of.
template <class V>
constexpr int kGroupRows = V::kLanes == 16 ? 8 : 4;

// Of `count` rows, from ROWS to kGroupRows.
template <class V, int VECS, GroupCodes CODES, bool HALF, int ROWS = 1>
void group_rows(const xq::DenseTask& t, const xq::Block& b, const GroupRows& rows, int64_t first, int64_t count) {
  if constexpr (ROWS < kGroupRows<V>) {
    if (count > ROWS) return group_rows<V, VECS, CODES, HALF, ROWS + 1>(t, b, rows, first, count);
  }
  group_tile<V, ROWS, VECS, CODES, HALF>(t, b, rows, first);
}

using GroupRun = void (*)(const xq::DenseTask&, const xq::Block&, const GroupRows&, int64_t, int64_t);

template <class V, int VECS>
GroupRun group_run_of(const xq::Packed& p) {
  constexpr auto kNibbles = GroupCodes::kNibbles, kNarrow = GroupCodes::kNarrow, kBytes = GroupCodes::kBytes;
  if (p.code_bits == 4) return p.half_scales ? group_rows<V, VECS, kNibbles, true> : group_rows<V, VECS, kNibbles, false>;
  if constexpr (!V::kVnni) {
    if (p.narrow) return p.half_scales ? group_rows<V, VECS, kNarrow, true> : group_rows<V, VECS, kNarrow, false>;
  }
  return p.half_scales ? group_rows<V, VECS, kBytes, true> : group_rows<V, VECS, kBytes, false>;
}

// What the codes of each group of a row add up to, times a factor.
inline void sum_groups(const uint8_t* row, int64_t groups, int64_t features, int32_t factor, int32_t* sums) {
  const __m128i none = _mm_setzero_si128();
  for (int64_t g = 0; g < groups; ++g) {
    __m128i sum = none;
    int64_t k = 0;
    for (; k + 16 <= features; k += 16, row += 16)
      sum = _mm_add_epi32(sum, _mm_sad_epu8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)), none));
    if (k < features) {
      sum = _mm_add_epi32(sum, _mm_sad_epu8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row)), none));
      row += 8;
    }
    sums[g] = factor * (_mm_cvtsi128_si32(sum) + _mm_extract_epi32(sum, 2));
  }
}

template <class V>
void group_product(const xq::DenseTask& t) {
  // Sums of as many rows as pass over all blocks together.
  constexpr int64_t kSums = 16 << 10;
  static_assert(kSums >= xq::kMostGroups);
  int32_t sums[kSums];
  const xq::Packed& p = *t.packed;
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  const int64_t groups = p.groups, features = p.conv.in_channels / groups;
  const GroupRun wide = group_run_of<V, 2>(p), slim = group_run_of<V, 1>(p);
  const int64_t fit = xq::min64(kSums / groups, p.caches.l2 / 2 / xq::max64(t.lda, 1));
  const int64_t chunk = fit < kGroupRows<V> ? xq::max64(fit, 1) : fit / kGroupRows<V> * kGroupRows<V>;
  const int64_t border = xq::min64(t.tail_begin, t.rows);
  for (int64_t begin = 0; begin < t.rows;) {
    const bool in_tail = begin >= border;
    const int64_t end = xq::min64(begin + chunk, in_tail ? t.rows : border), lda = in_tail ? t.tail_lda : t.lda;
    const uint8_t* a = in_tail ? t.tail + (begin - border) * lda : t.a + begin * lda;
    for (int64_t m = begin; m < end; ++m)
      sum_groups(a + (m - begin) * lda, groups, features, p.code_bits == 4 ? kNibbleZero : 1, sums + (m - begin) * groups);
    for (int b = t.block_begin; b < t.block_end; ++b) {
      const GroupRun run = blocks[b].vecs == 2 ? wide : slim;
      const uint8_t* ahead = p.at<uint8_t>(p.weights) + blocks[b].w_off + blocks[b].w_size;
      // Even tiles rather than full ones and a remnant.
      const int64_t tiles = xq::ceil_div(end - begin, kGroupRows<V>);
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t from = i * (end - begin) / tiles, to = (i + 1) * (end - begin) / tiles;
        run(t, blocks[b], {a + from * lda, lda, sums + from * groups, ahead + i % 2 * 64, tiles == 1 ? 64 : 0}, begin + from, to - from);
      }
    }
    begin = end;
  }
}

}  // namespace

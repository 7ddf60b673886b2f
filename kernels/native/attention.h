// Attention of a tile of queries to the keys of one head, block by block, with a running maximum and sum.
#pragma once

#include "row_tasks.h"
#include "unroll.h"

namespace {

// 2^y, by a polynomial of what is left of y beside a whole number: to within 3e-7, or where SHORT to within 3e-6, which
// is far below what bfloat16 keeps. 0 for y from -127 down.
template <class V, bool SHORT>
XQ_INLINE inline typename V::F power_of_two(typename V::F y) {
  using F = typename V::F;
  constexpr float kLong[] = {0.000154035f, 0.00133335581f, 0.00961812911f, 0.0555041087f, 0.240226507f, 0.693147181f, 1.0f};
  constexpr float kShort[] = {0.00957010165f, 0.0559178621f, 0.240247448f, 0.693121815f, 0.999999261f};
  const float* terms = SHORT ? kShort : kLong;
  constexpr int kDegree = SHORT ? 4 : 6;
  // A float this large has no bits for fractions, so the sum is rounded to a whole number; that stands in its low bits,
  // more by an exponent's bias.
  const F large = V::setf(12582912.0f + 127.0f);
  y = V::max(V::setf(-127), y);  // in this order NaN stays
  const F biased = V::add(y, large), rest = V::sub(y, V::sub(biased, large));
  F p = V::setf(terms[0]);
  for (int i = 1; i <= kDegree; ++i) p = V::fma(p, rest, V::setf(terms[i]));
  return V::mul(p, V::exponent_bits(biased));
}

constexpr float kLog2e = 1.44269504f;

template <class V>
XQ_INLINE inline typename V::F exponential(typename V::F x) {
  return power_of_two<V, false>(V::mul(x, V::setf(kLog2e)));
}

// The mask of one query, from the first key of a block on.
struct MaskRow {
  const uint8_t* seen = nullptr;  // bool
  const float* added = nullptr;   // or additive
};

// The numbers of the lanes.
alignas(64) constexpr float kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Scores of which `count` are seen; minus infinity stands for the others.
template <class V>
XQ_INLINE inline typename V::F seen_scores(const float* scores, int64_t count) {
  const auto none = V::setf(-__builtin_inff());
  if (count <= 0) return none;
  const auto s = V::loadf(scores);
  return count >= V::kLanes ? s : V::if_greater(V::setf(static_cast<float>(count)), V::loadf(kLaneNumbers), s, none);
}

// What the queries of a tile have seen so far: shares of later blocks are relative to larger maxima.
struct Seen {
  alignas(64) float most[xq::kAttentionRows], sum[xq::kAttentionRows];
};

// Scores of a query to `keys` keys, of which it may see the first `visible`, are scaled and masked where they lie.
// Returns the greatest: NaN only if that is what all are, or the last of them.
template <class V>
XQ_INLINE inline float masked_scores(float* scores, int64_t keys, int64_t visible, float scale, MaskRow mask) {
  using F = typename V::F;
  const F none = V::setf(-__builtin_inff()), factor = V::setf(scale), zero = V::setf(0);
  F most = none;
  for (int64_t k = 0; k < keys; k += V::kLanes) {
    const int64_t count = visible - k;
    F s = none;
    if (count > 0) {
      s = V::mul(V::load_floats(scores + k, V::kLanes), factor);
      if (mask.added) s = V::add(s, V::load_floats(mask.added + k, count));
      if (mask.seen) {
        alignas(64) uint8_t copy[16] = {};
        const uint8_t* at = mask.seen + k;
        if (count < 16) memcpy(copy, at, static_cast<size_t>(xq::min64(count, V::kLanes))), at = copy;
        s = V::if_greater(V::to_float(V::widen_at(at)), zero, s, none);
      }
      if (count < V::kLanes)
        s = V::if_greater(V::setf(static_cast<float>(count)), V::loadf(kLaneNumbers), s, none);
    }
    most = V::max(most, s);
    V::store_floats(scores + k, s, V::kLanes);
  }
  return V::greatest(most);
}

// The greatest score of a query to the keys that it may see, of which there is at least one.
template <class V>
XQ_INLINE inline float greatest_score(const float* scores, int64_t visible) {
  using F = typename V::F;
  const F none = V::setf(-__builtin_inff());
  F most[2] = {none, none};
  int64_t k = 0;
  for (; k + 2 * V::kLanes <= visible; k += 2 * V::kLanes)
    unroll<2>([&](int i) XQ_INLINE { most[i] = V::max(most[i], V::loadf(scores + k + i * V::kLanes)); });
  for (; k < visible; k += V::kLanes) most[0] = V::max(most[0], seen_scores<V>(scores + k, visible - k));
  return V::greatest(V::max(most[0], most[1]));
}

// Scores of a query become shares: those of keys beyond the visible ones 0. Returns their sum.
template <class V, bool SHORT, class Put>
XQ_INLINE inline float shares_of(const float* scores, int64_t keys, int64_t visible, float factor, float most, const Put& put) {
  using F = typename V::F;
  const F times = V::setf(factor), less = V::setf(most);
  F sums[2] = {V::setf(0), V::setf(0)};
  // Scores may be as large as floats come: multiplied first, they would be infinite, and equal ones not equal.
  const auto power = [&](F x) XQ_INLINE { return power_of_two<V, SHORT>(V::mul(V::sub(x, less), times)); };
  const auto pair = [&](int64_t k, F a, F b) XQ_INLINE {
    a = power(a), b = power(b);
    sums[0] = V::add(sums[0], a), sums[1] = V::add(sums[1], b);
    put(k, a, b);
  };
  int64_t k = 0;
  for (; k + 2 * V::kLanes <= visible; k += 2 * V::kLanes) pair(k, V::loadf(scores + k), V::loadf(scores + k + V::kLanes));
  if (k < visible) {
    pair(k, seen_scores<V>(scores + k, visible - k), seen_scores<V>(scores + k + V::kLanes, visible - k - V::kLanes));
    k += 2 * V::kLanes;
  }
  for (; k < keys; k += 2 * V::kLanes) put(k, V::setf(0), V::setf(0));
  return V::total(V::add(sums[0], sums[1]));
}

// Takes in the greatest scores of a block. `base` gets what its shares are relative to, `before` what earlier shares must be
// multiplied by.
template <class V>
XQ_INLINE inline void take_maxima(const float* block_most, float scale, Seen& seen, float* base, float* before) {
  const auto none = V::setf(-__builtin_inff()), factor = V::setf(scale);
  for (int64_t m = 0; m < xq::kAttentionRows; m += V::kLanes) {
    const auto was = V::loadf(seen.most + m), most = V::max(V::loadf(block_most + m), was);  // `was` beside what is no number
    // Where nothing has been seen, minus infinity less itself would be no number.
    const auto from = V::if_greater(most, none, most, V::setf(0));
    V::store_floats(seen.most + m, most, V::kLanes);
    V::store_floats(base + m, from, V::kLanes);
    V::store_floats(before + m, exponential<V>(V::mul(V::sub(was, from), factor)), V::kLanes);
  }
}

// 32-bit elements of kLanes rows, transposed.
template <class V>
XQ_INLINE inline void transpose_words(typename V::I rows[V::kLanes]) {
  constexpr int kQuads = V::kLanes / 4;
  unroll<kQuads>([&](int i) XQ_INLINE { V::transpose_quads(rows + 4 * i); });
  unroll<4>([&](int i) XQ_INLINE {
    typename V::I apart[kQuads];
    unroll<kQuads>([&](int g) XQ_INLINE { apart[g] = rows[4 * g + i]; });
    V::transpose_lanes(apart);
    unroll<kQuads>([&](int g) XQ_INLINE { rows[4 * g + i] = apart[g]; });
  });
}

// C[ROWS][VECS vectors] = A B, or A B + before C, by rows.
template <class V, int ROWS, int VECS>
XQ_INLINE inline void float_product_tile(int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                                         int64_t ldc, const float* before) {
  using F = typename V::F;
  F acc[ROWS * VECS];
  unroll<ROWS * VECS>([&](int i) XQ_INLINE {
    acc[i] = before ? V::mul(V::loadf(c + i / VECS * ldc + i % VECS * V::kLanes), V::setf(before[i / VECS])) : V::setf(0);
  });
  for (int64_t k = 0; k < depth; ++k, b += ldb) {
    F right[VECS];
    unroll<VECS>([&](int v) XQ_INLINE { right[v] = V::loadf(b + v * V::kLanes); });
    unroll<ROWS>([&](int r) XQ_INLINE {
      const F x = V::setf(a[r * lda + k]);
      unroll<VECS>([&](int v) XQ_INLINE { acc[r * VECS + v] = V::fma(x, right[v], acc[r * VECS + v]); });
    });
  }
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { V::store_floats(c + i / VECS * ldc + i % VECS * V::kLanes, acc[i], V::kLanes); });
}

// Queries as the products of a tile read them: rows `stride` elements apart.
template <class Element>
struct QueryRows {
  const Element* at;
  int64_t stride;
};

template <int N>
struct Count {
  constexpr int operator()() const { return N; }
};

// Calls `tile` with the first row and the number of rows of each tile, ROWS at most.
template <int ROWS, class Tile>
XQ_INLINE inline void each_tile(int64_t rows, const Tile& tile) {
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS) tile(r, Count<ROWS>());
  if (r + 4 <= rows) tile(r, Count<4>()), r += 4;
  if (r + 2 <= rows) tile(r, Count<2>()), r += 2;
  if (r < rows) tile(r, Count<1>());
}

// Products of floats, for what has no tiles. Keys, transposed, and values lie in panels of kColumns columns: a panel's
// rows follow one another. Shares take the places of their scores.
template <class V>
struct FloatProducts {
  using Share = float;
  static constexpr bool kInPlace = true, kScaledValues = false;
  // Sums that keep both multipliers busy while the operands of the next ones are loaded, and fit the registers.
  static constexpr int kRows = V::kLanes == 8 ? 6 : 8;
  static constexpr int64_t kColumns = 2 * V::kLanes;

  static int64_t padded(int64_t size) { return xq::round_up(size, kColumns); }
  static int64_t key_bytes(int64_t keys, int64_t size) { return keys * padded(size) * 4; }
  static int64_t value_bytes(int64_t keys, int64_t size) { return key_bytes(keys, size); }
  static int64_t query_bytes(int64_t) { return 0; }
  static void begin() {}
  static void end() {}

  static void pack_keys(const xq::HeadTask& t, void* to) {
    auto* out = static_cast<float*>(to);
    const int64_t width = padded(t.size), keys = xq::round_up(t.keys, V::kLanes);
    for (int64_t i = 0; i < keys; i += V::kLanes)
      for (int64_t d = 0; d < t.size; d += V::kLanes) {
        typename V::I rows[V::kLanes];
        unroll<V::kLanes>([&](int r) XQ_INLINE {
          rows[r] = V::as_bits(i + r < t.keys ? V::load_floats(t.k + (i + r) * t.k_stride + d, t.size - d) : V::setf(0));
        });
        transpose_words<V>(rows);
        float* panel = out + i / kColumns * kColumns * width + d * kColumns + i % kColumns;
        unroll<V::kLanes>([&](int r) XQ_INLINE { V::store(panel + r * kColumns, rows[r]); });
      }
  }
  static void pack_values(const xq::HeadTask& t, void* to) {
    auto* out = static_cast<float*>(to);
    for (int64_t d = 0; d < t.size; d += kColumns)
      for (int64_t i = 0; i < t.keys; ++i, out += kColumns)
        for (int64_t at = 0; at < kColumns; at += V::kLanes) {
          const int64_t count = t.size - d - at;
          V::store_floats(out + at, count > 0 ? V::load_floats(t.v + i * t.v_stride + d + at, count) : V::setf(0), V::kLanes);
        }
  }
  static QueryRows<float> queries(const xq::HeadTask&, const float* q, int64_t q_stride, int64_t, void*) {
    return {q, q_stride};
  }
  static void scores(const xq::HeadTask& t, QueryRows<float> q, int64_t rows, const void* k, int64_t first, int64_t keys,
                     float* out, int64_t stride) {
    const int64_t width = padded(t.size);
    const auto* b = static_cast<const float*>(k) + first * width;
    const auto columns = [&](auto vecs, int64_t c) XQ_INLINE {
      each_tile<kRows>(rows, [&](int64_t r, auto count) XQ_INLINE {
        float_product_tile<V, count(), vecs()>(t.size, q.at + r * q.stride, q.stride, b + c * width, kColumns,
                                               out + r * stride + c, stride, nullptr);
      });
    };
    int64_t c = 0;
    for (; c + V::kLanes < keys; c += kColumns) columns(Count<2>(), c);
    if (c < keys) columns(Count<1>(), c);
  }
  static float shares(const float* scores, int64_t keys, int64_t visible, float factor, float most, Share* to) {
    return shares_of<V, false>(scores, keys, visible, factor, most, [&](int64_t k, auto a, auto b) XQ_INLINE {
      V::store_floats(to + k, a, V::kLanes), V::store_floats(to + k + V::kLanes, b, V::kLanes);
    });
  }
  static void values(const xq::HeadTask& t, const Share* shares, int64_t stride, int64_t rows, const void* v, int64_t first,
                     int64_t keys, float* out, const float* before) {
    const int64_t width = padded(t.size);
    const auto* b = static_cast<const float*>(v) + first * kColumns;
    for (int64_t c = 0; c < width; c += kColumns, b += t.keys * kColumns)
      each_tile<kRows>(rows, [&](int64_t r, auto count) XQ_INLINE {
        float_product_tile<V, count(), 2>(keys, shares + r * stride, stride, b, kColumns, out + r * width + c, width,
                                         before ? before + r : nullptr);
      });
  }
};

// Memory of one running thread.
template <class P>
struct AttentionScratch {
  uint8_t *keys, *values, *queries;
  float* scores;
  typename P::Share* shares;
  float* out;
  int64_t stride, size;  // of scores and shares, from query to query; of it all

  AttentionScratch(int64_t n_keys, int64_t head, void* memory) {
    auto* at = static_cast<uint8_t*>(memory);
    const auto take = [&](int64_t bytes) {
      uint8_t* mine = at;
      at += xq::round_up(bytes, 64);
      return mine;
    };
    const int64_t all = xq::round_up(n_keys, 32);
    // Rows a power of two apart would share their place in L1.
    stride = xq::min64(all, xq::kAttentionKeys) + 32;
    const int64_t cells = xq::kAttentionRows * stride;
    keys = take(P::key_bytes(all, head)), values = take(P::value_bytes(all, head)), queries = take(P::query_bytes(head));
    scores = reinterpret_cast<float*>(take(cells * 4));
    if constexpr (P::kInPlace) shares = scores;
    else shares = reinterpret_cast<typename P::Share*>(take(cells * int64_t{sizeof(typename P::Share)}));
    out = reinterpret_cast<float*>(take(xq::kAttentionRows * P::padded(head) * 4));
    size = at - static_cast<uint8_t*>(memory);
  }
};

// How many keys a head's queries may see where they are the first ones and the same for all queries, as with padding;
// -1 where the mask says more than that.
inline int64_t first_keys(const xq::HeadTask& t, int64_t head) {
  if (!t.mask) return t.keys;
  if (!t.mask_is_bool || t.mask_query != 0) return -1;
  const uint8_t* seen = static_cast<const uint8_t*>(t.mask) + head * t.mask_head;
  int64_t n = 0, k = 0;
  while (n < t.keys && seen[n]) ++n;
  for (k = n; k < t.keys && !seen[k];) ++k;
  return k == t.keys ? n : -1;
}

// A tile of at most kAttentionRows queries, the first of which is number `first`.
template <class V, class P>
void attend(const xq::HeadTask& t, int64_t head, int64_t first, int64_t rows, int64_t first_keys, const AttentionScratch<P>& at) {
  Seen seen;
  for (int64_t m = 0; m < xq::kAttentionRows; ++m) seen.most[m] = -__builtin_inff(), seen.sum[m] = 0;
  const int64_t width = P::padded(t.size);
  const float* q = t.q + head * t.q_head + first * t.q_stride;
  const auto queries = P::queries(t, q, t.q_stride, rows, at.queries);
  const int64_t seen_keys = first_keys < 0 ? t.keys : first_keys;
  const int64_t last = t.causal ? xq::min64(seen_keys, first + rows + t.past) : seen_keys;
  // A score of minus infinity is no number once it is multiplied by a scale of 0, and none is hidden by a negative one.
  const bool plain = first_keys >= 0 && t.scale > 0;
  bool any = false;
  for (int64_t k = 0; k < last; k += xq::kAttentionKeys) {
    const int64_t keys = xq::min64(xq::kAttentionKeys, last - k), whole = xq::round_up(keys, 32);
    P::scores(t, queries, rows, at.keys, k, keys, at.scores, at.stride);
    const auto seen_by = [&](int64_t query) { return t.causal ? xq::min64(keys, query + 1 + t.past - k) : keys; };
    alignas(64) float most[xq::kAttentionRows] = {}, base[xq::kAttentionRows], before[xq::kAttentionRows];
    // First of all queries: each number is the end of a chain, and chains of several run side by side.
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t query = first + m, visible = seen_by(query), cell = head * t.mask_head + query * t.mask_query + k;
      float* scores = at.scores + m * at.stride;
      MaskRow mask;
      if (first_keys < 0 && t.mask_is_bool) mask.seen = static_cast<const uint8_t*>(t.mask) + cell;
      if (first_keys < 0 && !t.mask_is_bool) mask.added = static_cast<const float*>(t.mask) + cell;
      if (!plain) most[m] = masked_scores<V>(scores, whole, visible, t.scale, mask);
      else most[m] = visible > 0 ? greatest_score<V>(scores, visible) : -__builtin_inff();
    }
    const float factor = plain ? t.scale : 1.0f;  // masked scores have theirs already
    take_maxima<V>(most, factor, seen, base, before);
    for (int64_t m = 0; m < rows; ++m) {
      typename P::Share* shares = at.shares + m * at.stride;
      const float* scores = at.scores + m * at.stride;
      const float sum = P::shares(scores, whole, plain ? seen_by(first + m) : whole, factor * kLog2e, base[m], shares);
      seen.sum[m] = seen.sum[m] * before[m] + sum;
    }
    P::values(t, at.shares, at.stride, rows, at.values, k, keys, at.out, any ? before : nullptr);
    any = true;
  }
  for (int64_t m = 0; m < rows; ++m) {
    float* out = t.out + head * t.size + (first + m) * t.out_stride;
    const auto share = V::setf(seen.sum[m] == 0 ? 0.0f : 1.0f / seen.sum[m]);
    for (int64_t d = 0; d < t.size; d += V::kLanes) {
      auto x = any ? V::mul(V::loadf(at.out + m * width + d), share) : V::setf(0);
      if constexpr (P::kScaledValues) x = V::mul(x, P::value_scales(at.values, d));
      V::store_floats(out + d, x, t.size - d);
    }
  }
}

// All heads of queries that share a head of keys.
template <class V, class P>
void attention(const xq::HeadTask& t, void* scratch) {
  const AttentionScratch<P> at(t.keys, t.size, scratch);
  // Rows that a tile computes and nobody reads should be numbers too: arithmetic on others may be slow.
  if constexpr (!P::kInPlace)
    memset(at.shares, 0, static_cast<size_t>(xq::kAttentionRows * at.stride) * sizeof(typename P::Share));
  P::begin();
  P::pack_keys(t, at.keys), P::pack_values(t, at.values);
  for (int64_t head = 0; head < t.heads; ++head) {
    const int64_t keys = first_keys(t, head);
    for (int64_t m = t.query_begin; m < t.query_end; m += xq::kAttentionRows)
      attend<V, P>(t, head, m, xq::min64(xq::kAttentionRows, t.query_end - m), keys, at);
  }
  P::end();
}

template <class P>
size_t attention_scratch(int64_t keys, int64_t size) {
  return static_cast<size_t>(AttentionScratch<P>(keys, size, nullptr).size);
}

}  // namespace

// Lookups over the vector type of float_lanes.h: each bag block of columns by block, whose sums stay in registers.
#pragma once

#include <type_traits>

#include "float_lanes.h"
#include "float_loops.h"
#include "internal.h"
#include "unroll.h"

namespace {

template <class INDEX, class UNSIGNED>
bool all_within(const INDEX* numbers, int64_t count, int64_t bound) {
  // Compared as unsigned numbers a negative one is too large.
  const auto limit = static_cast<UNSIGNED>(bound);
  UNSIGNED wrong = 0;
  for (int64_t i = 0; i < count; ++i) wrong |= static_cast<UNSIGNED>(static_cast<UNSIGNED>(numbers[i]) >= limit);
  return wrong == 0;
}

bool within(const void* numbers, bool are_long, int64_t count, int64_t bound) {
  return are_long ? all_within<int64_t, uint64_t>(static_cast<const int64_t*>(numbers), count, bound)
                  : all_within<int32_t, uint32_t>(static_cast<const int32_t*>(numbers), count, bound);
}

template <class INDEX>
bool none_falls(const INDEX* numbers, int64_t count) {
  bool wrong = false;
  for (int64_t i = 1; i < count; ++i) wrong |= numbers[i] < numbers[i - 1];
  return !wrong;
}

bool rising(const void* numbers, bool are_long, int64_t count) {
  return are_long ? none_falls(static_cast<const int64_t*>(numbers), count)
                  : none_falls(static_cast<const int32_t*>(numbers), count);
}

// Rows fetched ahead of the one that is read. Enough to keep all of a core's line buffers busy.
constexpr int64_t kAhead = 24;
// A row's last line is fetched by its last byte: so few bytes before that are seldom in a line of their own.
constexpr int64_t kSeldom = 16;
// Tables of fewer bytes lie in a core's cache when they are looked up: nothing is fetched ahead.
constexpr int64_t kNearBytes = 1 << 18;
// Vectors of a row of which two bags fit the registers.
constexpr int kMostOfTwo = 4;

// What the loops need of a table and its indices, in registers.
enum class Scale { kFloat, kHalf, kNone };

// PLAIN: no index counts for nothing, and every weight is 1.
template <class INDEX, Scale SCALE, bool PLAIN>
struct Rows {
  static constexpr bool kPlain = PLAIN;
  const uint8_t *rows, *codes;
  int64_t stride, bytes, scale_at;
  const INDEX* indices;
  const float* weights;
  int64_t padding;

  explicit Rows(const xq_lookup& op)
      : rows(op.rows), codes(op.rows + op.codes_at), stride(op.row_stride),
        bytes((int64_t{op.dim} * op.bits + 7) / 8 + xq::scale_bytes(op)), scale_at(op.scale_at),
        indices(static_cast<const INDEX*>(op.indices)), weights(op.weights), padding(op.padding) {}

  XQ_INLINE void fetch(int64_t at) const {
    const uint8_t *row = rows + int64_t{indices[at]} * stride, *last = row + bytes - 1;
    for (; row + kSeldom < last; row += 64) xq::prefetch(row);
    xq::prefetch(last);
  }

  XQ_INLINE xq::RowScale scale(int64_t index) const {
    xq::RowScale found{1, 0};
    if constexpr (SCALE == Scale::kNone) return found;
    const uint8_t* p = rows + index * stride + scale_at;
    if constexpr (SCALE == Scale::kHalf) {
      int32_t halves;
      memcpy(&halves, p, 4);
      const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(halves));
      found = {_mm_cvtss_f32(both), _mm_cvtss_f32(_mm_movehdup_ps(both))};
    } else {  // one by one: as a pair they would go through integers
      memcpy(&found.scale, p, 4);
      memcpy(&found.bias, p + 4, 4);
    }
    return found;
  }
};

// `count` codes of a vector that the row does not fill: nothing behind them is read.
template <int BITS>
XQ_INLINE inline Lanes::F last_codes(const uint8_t* p, int64_t count) {
  alignas(64) uint8_t bytes[Lanes::kLanes * (BITS == 32 ? 4 : 1)] = {};
  memcpy(bytes, p, static_cast<size_t>((count * BITS + 7) / 8));
  return Lanes::codes<BITS>(bytes);
}

// Indices [from, to) of one bag; those up to `fetch_end` may be fetched ahead.
struct Bag {
  int64_t from, to, fetch_end;
  float* out;
};

// Some columns of one bag: VECS vectors, of which the only one may be less than whole.
template <int BITS, bool MAX, int VECS, class ROWS>
struct Pool {
  using F = Lanes::F;
  const ROWS& table;
  int64_t column, count;  // the first, and how many of the last vector
  bool whole;
  F acc[VECS];
  int64_t rows = 0;

  XQ_INLINE Pool(const ROWS& t, int64_t first, int64_t of_last)
      : table(t), column(first), count(of_last), whole(VECS > 1 || of_last == Lanes::kLanes) {
    unroll<VECS>([&](int v) XQ_INLINE { acc[v] = Lanes::set(MAX ? -__builtin_inff() : 0.0f); });
  }

  XQ_INLINE void add(int64_t i) {
    const int64_t index = table.indices[i];
    xq::RowScale own = table.scale(index);
    if constexpr (!ROWS::kPlain) {
      if (index == table.padding) return;
      ++rows;
      const float w = table.weights ? table.weights[i] : 1.0f;
      own = {w * own.scale, BITS == 32 ? 0 : w * own.bias};
    }
    const F scale = Lanes::set(own.scale), bias = Lanes::set(own.bias), one = Lanes::set(1.0f);
    const uint8_t* codes = table.codes + index * table.stride + column * BITS / 8;
    unroll<VECS>([&](int v) XQ_INLINE {
      const F x = whole ? Lanes::codes<BITS>(codes + v * Lanes::kLanes * BITS / 8) : last_codes<BITS>(codes, count);
      if (MAX) acc[v] = Lanes::max(Lanes::fma(x, scale, bias), acc[v]);
      // Every other sum by the unit that multiplies: that which adds has the codes to convert, too.
      else acc[v] = Lanes::fma(x, scale, v % 2 ? Lanes::fma(acc[v], one, bias) : Lanes::add(acc[v], bias));
    });
  }

  // `out` is that of the whole bag, which had so many rows, padding included.
  XQ_INLINE void finish(int64_t all_rows, bool mean, float* out) {
    if (ROWS::kPlain) rows = all_rows;
    if (mean && rows > 0) {
      const F share = Lanes::set(1.0f / static_cast<float>(rows));
      unroll<VECS>([&](int v) XQ_INLINE { acc[v] = Lanes::mul(acc[v], share); });
    }
    unroll<VECS>([&](int v) XQ_INLINE {
      const F x = MAX && rows == 0 ? Lanes::set(0) : acc[v];
      if (whole) Lanes::store(out + column + v * Lanes::kLanes, x);
      else Lanes::store_some(out + column, x, count);
    });
  }
};

// Columns from `column` on of one bag, or of two. Those of two are added in turn: each sum waits for the one before it,
// and a narrow row has not enough of them to keep the units busy.
template <int BITS, bool MAX, int VECS, class ROWS>
XQ_INLINE inline void pool_columns(const ROWS& table, Bag bag, const Bag* other, int64_t column, int64_t count, bool mean) {
  Pool<BITS, MAX, VECS, ROWS> own(table, column, count);
  int64_t i = bag.from;
  if (VECS <= kMostOfTwo && other) {
    Pool<BITS, MAX, VECS, ROWS> next(table, column, count);
    const int64_t both = xq::min64(bag.to - bag.from, other->to - other->from);
    int64_t j = other->from;
    for (const int64_t end = bag.from + both; i < end; ++i, ++j) own.add(i), next.add(j);
    for (; j < other->to; ++j) next.add(j);
    next.finish(other->to - other->from, mean, other->out);
  }
  for (; i < bag.to; ++i) {
    if (i + kAhead < bag.fetch_end) table.fetch(i + kAhead);
    own.add(i);
  }
  own.finish(bag.to - bag.from, mean, bag.out);
}

template <int BITS, bool MAX, class ROWS>
XQ_INLINE inline void pool_bag(const ROWS& table, Bag bag, const Bag* other, int64_t dim, bool mean) {
  constexpr int64_t kLanes = Lanes::kLanes;
  for (int64_t column = 0; column < dim;) {
    const int64_t left = dim - column, count = xq::min64(left, kLanes);
    const int64_t vecs = left >= 8 * kLanes && !other ? 8 : left >= 4 * kLanes ? 4 : left >= 2 * kLanes ? 2 : 1;
    switch (vecs) {
      case 8: pool_columns<BITS, MAX, 8>(table, bag, other, column, count, mean); break;
      case 4: pool_columns<BITS, MAX, 4>(table, bag, other, column, count, mean); break;
      case 2: pool_columns<BITS, MAX, 2>(table, bag, other, column, count, mean); break;
      default: pool_columns<BITS, MAX, 1>(table, bag, other, column, count, mean);
    }
    column += vecs * kLanes;
    bag.fetch_end = 0;  // only the first columns fetch
  }
}

template <int BITS, bool MAX, class ROWS>
void look_up_rows(const xq::LookupTask& t) {
  const xq_lookup op = *t.op;  // here, since what is stored could be another's
  const ROWS table(op);
  const bool mean = op.mode == XQ_POOL_MEAN;
  const int64_t all = xq::lookup_start(op, t.end);
  int64_t from = xq::lookup_start(op, t.begin);
  const auto bag_of = [&](int64_t n, int64_t fetch_end) XQ_INLINE {
    const Bag bag{from, xq::lookup_start(op, n + 1), fetch_end, op.out + n * op.out_stride};
    from = bag.to;
    return bag;
  };
  if (op.row_count * op.row_stride <= kNearBytes) {
    for (int64_t n = t.begin; n < t.end; n += 2) {
      const Bag bag = bag_of(n, 0);
      // Beside the last may be none: what an empty one puts there is replaced.
      const Bag other = n + 1 < t.end ? bag_of(n + 1, 0) : Bag{0, 0, 0, bag.out};
      pool_bag<BITS, MAX>(table, bag, &other, op.dim, mean);
    }
    return;
  }
  for (int64_t i = from; i < all && i < from + kAhead; ++i) table.fetch(i);
  for (int64_t n = t.begin; n < t.end; ++n) pool_bag<BITS, MAX>(table, bag_of(n, all), nullptr, op.dim, mean);
}

template <int BITS, bool MAX, Scale SCALE>
void look_up_scaled(const xq::LookupTask& t) {
  const auto run = [&](auto plain) {
    constexpr bool kPlain = decltype(plain)::value;
    t.op->long_indices ? look_up_rows<BITS, MAX, Rows<int64_t, SCALE, kPlain>>(t)
                       : look_up_rows<BITS, MAX, Rows<int32_t, SCALE, kPlain>>(t);
  };
  // The largest are asked for too seldom to be compiled once more.
  if (MAX || t.op->weights || t.op->padding >= 0) run(std::false_type{});
  else run(std::bool_constant<!MAX>{});
}

template <int BITS, bool MAX>
void look_up_table(const xq::LookupTask& t) {
  if constexpr (BITS == 32) return look_up_scaled<BITS, MAX, Scale::kNone>(t);
  t.op->half ? look_up_scaled<BITS, MAX, Scale::kHalf>(t) : look_up_scaled<BITS, MAX, Scale::kFloat>(t);
}

void look_up(const xq::LookupTask& t) {
  const bool max = t.op->mode == XQ_POOL_MAX;
  switch (t.op->bits) {
    case 32: return max ? look_up_table<32, true>(t) : look_up_table<32, false>(t);
    case 8: return max ? look_up_table<8, true>(t) : look_up_table<8, false>(t);
    case 4: return max ? look_up_table<4, true>(t) : look_up_table<4, false>(t);
    default: return max ? look_up_table<2, true>(t) : look_up_table<2, false>(t);
  }
}

}  // namespace

// Lookups over the vector type of float_lanes.h: each bag block of columns by block, whose sums stay in registers.
#pragma once

#include "float_lanes.h"
#include "float_loops.h"
#include "internal.h"
#include "unroll.h"

namespace {

// Rows fetched ahead of the one that is read. Enough to keep all of a core's line buffers busy.
constexpr int64_t kAhead = 24;

XQ_INLINE inline void fetch_row(const xq_lookup& op, int64_t at) {
  const uint8_t* row = op.rows + xq::lookup_number(op, op.indices, at) * op.row_stride;
  const int64_t bytes = (int64_t{op.dim} * op.bits + 7) / 8 + (op.half ? 4 : 8);
  const auto start = reinterpret_cast<uintptr_t>(row), end = start + static_cast<uintptr_t>(bytes);
  for (uintptr_t line = start / 64 * 64; line < end; line += 64) xq::prefetch(reinterpret_cast<const void*>(line));
}

// `count` codes of a vector that the row does not fill: nothing behind them is read.
template <int BITS>
XQ_INLINE inline Lanes::F last_codes(const uint8_t* p, int64_t count) {
  alignas(64) uint8_t bytes[Lanes::kLanes] = {};
  memcpy(bytes, p, static_cast<size_t>((count * BITS + 7) / 8));
  return Lanes::codes<BITS>(bytes);
}

// Columns [column, column + VECS vectors) of one bag; `count` is less than a vector only where VECS is 1.
template <int BITS, int VECS, bool MAX>
XQ_INLINE inline void pool_columns(const xq_lookup& op, int64_t bag, int64_t from, int64_t to, int64_t fetch_end,
                                   int64_t column, int64_t count) {
  using F = Lanes::F;
  F acc[VECS];
  unroll<VECS>([&](int v) XQ_INLINE { acc[v] = Lanes::set(MAX ? -__builtin_inff() : 0.0f); });
  int64_t rows = 0;
  for (int64_t i = from; i < to; ++i) {
    if (i + kAhead < fetch_end) fetch_row(op, i + kAhead);
    const int64_t index = xq::lookup_number(op, op.indices, i);
    if (index == op.padding) continue;
    ++rows;
    const uint8_t* row = op.rows + index * op.row_stride;
    const xq::RowScale own = xq::row_scale(op, row);
    const float w = op.weights ? op.weights[i] : 1.0f;
    const F scale = Lanes::set(w * own.scale), bias = Lanes::set(w * own.bias);
    const uint8_t* codes = row + op.codes_at + column * BITS / 8;
    unroll<VECS>([&](int v) XQ_INLINE {
      const bool whole = VECS > 1 || count == Lanes::kLanes;
      const F x = whole ? Lanes::codes<BITS>(codes + v * Lanes::kLanes * BITS / 8) : last_codes<BITS>(codes, count);
      if (MAX) acc[v] = Lanes::max(Lanes::fma(x, scale, bias), acc[v]);
      else acc[v] = Lanes::fma(x, scale, Lanes::add(acc[v], bias));
    });
  }
  float* out = op.out + bag * op.out_stride + column;
  const float share = op.mode == XQ_POOL_MEAN && rows > 0 ? 1.0f / static_cast<float>(rows) : 1.0f;
  unroll<VECS>([&](int v) XQ_INLINE {
    const F x = MAX && rows == 0 ? Lanes::set(0) : Lanes::mul(acc[v], Lanes::set(share));
    if (VECS > 1 || count == Lanes::kLanes) Lanes::store(out + v * Lanes::kLanes, x);
    else Lanes::store_some(out, x, count);
  });
}

template <int BITS, bool MAX>
void look_up_rows(const xq::LookupTask& t) {
  const xq_lookup& op = *t.op;
  constexpr int64_t kLanes = Lanes::kLanes;
  const int64_t all = xq::lookup_start(op, t.end);
  int64_t from = xq::lookup_start(op, t.begin);
  for (int64_t i = from; i < all && i < from + kAhead; ++i) fetch_row(op, i);
  for (int64_t bag = t.begin; bag < t.end; ++bag) {
    const int64_t to = xq::lookup_start(op, bag + 1);
    int64_t column = 0, fetch_end = all;  // only the first columns fetch
    while (column < op.dim) {
      const int64_t left = op.dim - column;
      const int64_t vecs = left >= 8 * kLanes ? 8 : left >= 4 * kLanes ? 4 : left >= 2 * kLanes ? 2 : 1;
      const int64_t count = xq::min64(left, kLanes);
      switch (vecs) {
        case 8: pool_columns<BITS, 8, MAX>(op, bag, from, to, fetch_end, column, count); break;
        case 4: pool_columns<BITS, 4, MAX>(op, bag, from, to, fetch_end, column, count); break;
        case 2: pool_columns<BITS, 2, MAX>(op, bag, from, to, fetch_end, column, count); break;
        default: pool_columns<BITS, 1, MAX>(op, bag, from, to, fetch_end, column, count);
      }
      column += vecs * kLanes;
      fetch_end = 0;
    }
    from = to;
  }
}

void look_up(const xq::LookupTask& t) {
  const bool max = t.op->mode == XQ_POOL_MAX;
  switch (t.op->bits) {
    case 8: return max ? look_up_rows<8, true>(t) : look_up_rows<8, false>(t);
    case 4: return max ? look_up_rows<4, true>(t) : look_up_rows<4, false>(t);
    default: return max ? look_up_rows<2, true>(t) : look_up_rows<2, false>(t);
  }
}

}  // namespace

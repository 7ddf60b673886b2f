// The loops on floats that need no more of a CPU than AVX2 or AVX-512: lookups, interactions, gates, sums of
// channels, products.
#pragma once

#include <string.h>

#include "channel_sums.h"
#include "float_products.h"
#include "gates.h"
#include "lookup.h"

namespace xq {

// Bags whose indices and offsets have been found to be within bounds.
struct LookupTask {
  const xq_lookup* op;
  int64_t begin, end;  // bags
};

struct FloatLoops {
  // Whether each of `count` numbers, int64 or int32, is from 0 to below `bound`, which these can hold.
  bool (*within)(const void* numbers, bool are_long, int64_t count, int64_t bound);
  // Whether none of `count` numbers is less than the one before it.
  bool (*rising)(const void* numbers, bool are_long, int64_t count);
  void (*lookup)(const LookupTask&);
  void (*interact)(const xq_interaction&, int64_t begin, int64_t end);
  void (*lstm_gates)(const xq_lstm_gates&, int64_t begin, int64_t end);
  void (*gru_gates)(const xq_gru_gates&, int64_t begin, int64_t end);
  void (*channel_sums)(const xq_channel_sums&, int64_t begin, int64_t end);
  void (*product)(const xq_float_product&, int64_t begin, int64_t end);
  void (*taps)(const xq_float_taps&, int64_t begin, int64_t end);
  void (*functions)(const xq_float_function*, int64_t how_many, float* values, int64_t count);
};

extern const FloatLoops kFloatAvx2, kFloatAvx512;

static inline const FloatLoops& float_loops_of(int isa) {
  return isa >= XQ_ISA_AVX512 ? kFloatAvx512 : kFloatAvx2;
}

static inline int64_t lookup_number(const xq_lookup& op, const void* from, int64_t at) {
  return op.long_indices ? static_cast<const int64_t*>(from)[at] : static_cast<const int32_t*>(from)[at];
}

// Where a bag starts; for `bags` where the last one ends.
static inline int64_t lookup_start(const xq_lookup& op, int64_t bag) {
  if (!op.offsets) return bag * op.each;
  return bag == op.bags && !op.last_offset ? op.index_count : lookup_number(op, op.offsets, bag);
}

static inline int64_t interaction_products(const xq_interaction& op) {
  return int64_t{op.vectors} * (op.vectors + 1) / 2 + (op.squares ? int64_t{op.vectors} + 1 : 0);
}

static inline float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, size = half & 0x7fffu;
  uint32_t bits = size >= 0x7c00 ? 0x7f800000u | (size & 0x3ff) << 13 : (size << 13) + 0x38000000u;
  float value;
  if (size < 0x400) {
    value = static_cast<float>(size) * 0x1p-24f;
    memcpy(&bits, &value, 4);
  }
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}

// Scale and bias of a row.
struct RowScale {
  float scale, bias;
};

// Bytes of scale and bias.
static inline int64_t scale_bytes(const xq_lookup& op) { return op.bits == 32 ? 0 : op.half ? 4 : 8; }

static inline RowScale row_scale(const xq_lookup& op, const uint8_t* row) {
  RowScale found{1, 0};
  if (op.bits == 32) return found;
  if (op.half) {
    uint16_t halves[2];
    memcpy(halves, row + op.scale_at, 4);
    return {float_of_half(halves[0]), float_of_half(halves[1])};
  }
  memcpy(&found, row + op.scale_at, 8);
  return found;
}

}  // namespace xq

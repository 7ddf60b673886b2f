// Products of floats for layers that are kept in float beside int8 ones, and functions of their results.
//
// Every ISA computes the same bytes: a sum starts from the bias and adds its products one after the other, each with
// one rounding (fma).
#pragma once

#include "native.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { XQ_PANEL = 16 };  // output features whose weights lie side by side

// Rows times weights [panel][feature][XQ_PANEL]; features behind out_features, and their biases, are 0. A call may be of
// some features alone: of those of a panel it leaves out the first `skipped`, and where `onto` is set, its sums go on from
// what `out` holds, instead of from the biases.
typedef struct xq_float_product {
  const float *in, *weight, *bias;
  float* out;
  int64_t in_stride, out_stride;  // in floats, from one row to the next
  int64_t features, out_features;
  int64_t panel, skipped;  // features of a panel, and those before the first one
  int32_t onto;
  int32_t isa;
} xq_float_product;

// Rows [begin, end).
XQ_API void xq_float_product_run(const xq_float_product* op, int64_t begin, int64_t end);

// Depthwise: pixels whose channels each meet the same taps: offset `offsets[i]` from the pixel, times weights
// `which[i]` of [tap][channel]. Taps may come `across` at a time, of which each is `in_stride` behind the one before.
typedef struct xq_float_taps {
  const float *in, *weight, *bias;
  float* out;
  const int64_t* offsets;  // in floats
  const int32_t* which;
  int64_t in_stride, out_stride;  // from one pixel to the next
  int64_t channels, taps;
  int32_t across;
  int32_t isa;
} xq_float_taps;

XQ_API void xq_float_taps_run(const xq_float_taps* op, int64_t begin, int64_t end);

// Functions of one value x, of which y is what those before gave. A NaN stays.
typedef enum xq_float_kind {
  XQ_FLOAT_ADD = 0,      // y + a
  XQ_FLOAT_MUL = 1,      // y * a
  XQ_FLOAT_LEAST = 2,    // a where y is less
  XQ_FLOAT_MOST = 3,     // a where y is more
  XQ_FLOAT_SIGMOID = 4,  // as in gates.h
  XQ_FLOAT_TANH = 5,
  XQ_FLOAT_TIMES_X = 6,  // y * x
  XQ_FLOAT_X = 7,        // from now on, x is y
  XQ_FLOAT_KINDS = 8,
} xq_float_kind;

typedef struct xq_float_function {
  int32_t kind;
  float a;
} xq_float_function;

// Values [0, count), in place.
XQ_API void xq_float_functions_run(const xq_float_function* functions, int64_t how_many, float* values, int64_t count,
                                   int32_t isa);

#ifdef __cplusplus
}
#endif

// Rows of quantized embedding tables, looked up and pooled into floats.
//
// A row holds its codes, unsigned, in 8, 4 or 2 bits, low bits first, and a scale and a bias, both float32 or
// both float16, in front of the codes or behind them: `codes_at` and `scale_at` are byte offsets into the row, the
// bias follows the scale. These are FBGEMM's formats, those of torch.ops.quantized.embedding_bag_*_prepack (scale
// behind, float32 for 8 bits, else float16) and of its table-batched operators (float16, in front). Rows of 32 bits
// are floats themselves: scale 1, bias 0, and `half` and `scale_at` mean nothing.
//
// Numerics. For each row of a bag, in order, with the weight w of the sample, 1 where there is none:
//
//     SUM    acc = fma(code, w * scale, acc + w * bias)                 as FBGEMM does
//     MEAN   the sum, times the float32 1 / rows                        without weights
//     MAX    the largest fma(code, scale, bias)                         without weights
//
// all in float32. An empty bag is 0; an index equal to `padding` counts as if it were not there. Every ISA gives
// the same bytes.
//
// Safety. Every index and every offset is compared with its bounds by xq_lookup_run itself, before a row is read.
#pragma once

#include "native.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum xq_pooling {
  XQ_POOL_SUM = 0,
  XQ_POOL_MEAN = 1,
  XQ_POOL_MAX = 2,
} xq_pooling;

typedef struct xq_lookup {
  const uint8_t* rows;
  int64_t row_count, row_stride;  // bytes from row to row
  int32_t dim, bits;              // values of a row; 32, 8, 4 or 2
  int32_t codes_at, scale_at, half;
  int32_t mode, isa;              // xq_pooling, xq_isa
  int32_t long_indices;           // indices and offsets are int64, else int32
  const void* indices;
  const void* offsets;            // where each bag starts; null: each bag has `each` indices
  int64_t index_count, bags, each;
  int32_t last_offset;            // offsets has one more entry, the end of the last bag
  const float* weights;           // one an index, or null
  int64_t padding;                // negative: none
  float* out;
  int64_t out_stride;             // floats from bag to bag
} xq_lookup;

typedef enum xq_fault_kind {
  XQ_FAULT_NONE = 0,
  XQ_FAULT_INDEX = 1,    // the index `value` at `position` is not a row
  XQ_FAULT_FIRST = 2,    // the first offset is `value`, not 0
  XQ_FAULT_OFFSET = 3,   // the offset `value` at `position` is less than the one before, or beyond the indices
  XQ_FAULT_LAST = 4,     // the last offset is `value`, not the number of indices
} xq_fault_kind;

typedef struct xq_lookup_fault {
  int32_t kind;
  int64_t position, value;
} xq_lookup_fault;

XQ_API int xq_lookup_check(const xq_lookup* op);
// Bags [begin, end): any split of [0, bags) from any threads. False where an index or an offset is wrong: then
// `fault` says which, and the output of these bags is unspecified.
XQ_API int xq_lookup_run(const xq_lookup* op, int64_t begin, int64_t end, xq_lookup_fault* fault);
// The comparisons alone, which xq_lookup_run makes too: to measure what they cost.
XQ_API int xq_lookup_verify(const xq_lookup* op, int64_t begin, int64_t end, xq_lookup_fault* fault);

// The dot products of a DLRM. Each of `samples` has `vectors` adjacent vectors of `dim` floats, and one in front of
// them that lies elsewhere, `first`. The output is that first vector, then the products of each vector with all in
// front of it: (1, 0), (2, 0), (2, 1), (3, 0), ...; then, with `squares`, those of each with itself: (0, 0), (1, 1), ...
// A product is 16 sums by fma, one of each column modulo 16, and these are added half to half: 16 to 8, to 4, to 2,
// to 1. Every ISA gives the same bytes.
typedef struct xq_interaction {
  const float *first, *in;
  float* out;
  int64_t samples, first_stride, in_stride, out_stride;  // from sample to sample, in floats
  int32_t vectors, dim, isa, squares;
} xq_interaction;

XQ_API int xq_interaction_check(const xq_interaction* op);
XQ_API void xq_interaction_run(const xq_interaction* op, int64_t begin, int64_t end);

#ifdef __cplusplus
}
#endif

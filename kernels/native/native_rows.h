// The part of the C interface for transformers: rows of codes between products, and attention. See native.h.
#pragma once

#include "native.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------------------------- row codes
//
// Rows between the products of a transformer, where `codes of a row` are its code, scale and zp as above:
//
//     value  = x, or activation(product of in's codes with packed's weights) [* the same of up's]
//     total  = value [+ residual]
//     normed = norm(total): LAYER fma((total - mean) * rstd, weight, bias), rstd = 1 / sqrt(variance + eps);
//              RMS the same with a mean of 0
//     out    = codes of normed, or of total where there is no norm
//
// The product's sums are exact, and value is the same on every level, as in a dynamic linear. Means and variances
// are summed in float32 in no particular order.
//
// All rows are contiguous. Results whose pointers are null are not wanted. A residual may be total itself. Order of
// calls: check; all items of phase 0 (there may be none); then all items of phase 1.

typedef struct xq_codes {
  uint8_t* codes;         // (rows, features)
  float* scale;           // one a row
  int32_t* zp;
} xq_codes;

typedef enum xq_norm { XQ_NORM_NONE = 0, XQ_NORM_LAYER = 1, XQ_NORM_RMS = 2 } xq_norm;

typedef struct xq_rows {
  int32_t isa;
  int64_t rows, features; // of the result
  const void* packed;     // of xq_linear_pack, or null: x is read
  const void* up;         // the same, or null
  xq_codes in;
  const float* x;
  const float* residual;  // or null
  int32_t norm;           // xq_norm
  const float *norm_weight, *norm_bias;  // one a feature, or null
  float eps;
  float *total, *normed;
  xq_codes out;
  int32_t threads;        // how many threads will share the items: 1 or more
} xq_rows;

XQ_API int xq_rows_check(const xq_rows* op);
XQ_API size_t xq_rows_shared(const xq_rows* op);   // bytes for all threads together
XQ_API size_t xq_rows_scratch(const xq_rows* op);  // bytes for each running thread
XQ_API int64_t xq_rows_items(const xq_rows* op, int phase);
XQ_API void xq_rows_run(const xq_rows* op, int phase, int64_t begin, int64_t end, void* shared, void* scratch);

// ----------------------------------------------------------------------------------- attention
//
// out = softmax(scale * q k' + mask) v for each batch and head, without a matrix of scores in memory. A query sees the
// keys where a boolean mask is not 0, an additive one is not minus infinity, and, if causal, those up to its own number
// and `past` more. With `hidden` no query of a batch sees the first so many keys: padding in front, in place of a mask.
// A query that sees no key gives 0. Heads of queries share heads of keys in order: heads / kv_heads each.
//
// Products are taken in float32, or where that is faster in bfloat16 with sums in float32, or, of many keys, in codes of 8
// and 16 bits with sums in int32; softmax is in float32, but of codes its shares have 12 bits. Results do not depend on the
// number of threads; they do differ, by rounding, between levels.
//
// With `starts` batches have numbers of tokens of their own, queries and keys are the most of them, and the rows of all
// lie one behind another: those of batch n, of q, k, v, out and of the keys of a mask, from starts[n] to starts[n + 1].
// Strides from batch to batch do not count then.
//
// With `k_codes` and `v_codes`, in place of k and v, keys and values are what xq_cache_codes made of them, a scale each;
// their strides are in codes. The few newest tokens of a decoder multiply codes as they lie, many make floats of them first.
// These come with neither mask nor starts, and are causal.
typedef struct xq_attention {
  int32_t isa;
  int64_t batch, queries, keys, heads, kv_heads, size;
  const float *q, *k, *v;                                 // the features of a head are adjacent
  int64_t q_stride[3], k_stride[3], v_stride[3];          // from batch to batch, token to token, head to head, in floats
  const void* mask;                                       // null, uint8 or float
  int32_t mask_is_bool;
  int64_t mask_stride[3];                                 // batch, head, query, in elements; its keys are adjacent
  int32_t causal;
  float scale;
  float* out;                                             // (batch, queries, heads, size), contiguous
  const int64_t* starts;                                  // null, or of batch + 1 numbers that never decrease
  const int64_t* hidden;                                  // null, or of batch numbers from 0 to keys
  int64_t past;                                           // keys before that of the first query: 0 or more
  int32_t threads;                                        // how many threads will share the items: 1 or more
  const int8_t *k_codes, *v_codes;                        // null, or the features of a head are adjacent
  const float *k_scale, *v_scale;                         // of a head's tokens are adjacent
  int64_t k_scale_stride[2], v_scale_stride[2];           // from batch to batch, head to head, in floats
} xq_attention;

XQ_API int xq_attention_check(const xq_attention* op);
// Whether an ISA level multiplies in bfloat16 here, which has 8 bits, rather than in float32.
XQ_API int xq_attention_in_bfloat16(int isa);
// From how many keys on an ISA level multiplies codes here, if queries are many; 0: never.
XQ_API int64_t xq_attention_coded_keys(int isa);
XQ_API size_t xq_attention_scratch(const xq_attention* op);  // bytes for each running thread
XQ_API int64_t xq_attention_items(const xq_attention* op);
XQ_API void xq_attention_run(const xq_attention* op, int64_t begin, int64_t end, void* scratch);

// Codes from -127 to 127 of `size` features and their scale, so that real = code * scale: of the largest amount a 127th,
// and never less than 2^-127, so that zeros have one. If a feature is not finite, nor is the scale, and codes are 0.
// The same bytes on every level.
XQ_API void xq_cache_codes(int isa, const float* x, int64_t size, int8_t* codes, float* scale);

// The same for one query a head and keys and values that lie where a decoder keeps them: no mask, all keys are seen
// but those that `hidden` says, which leaves one at least.
// Keys of a head may be any number of floats apart. Products and softmax are in float32 on every level.
typedef struct xq_one_query {
  int32_t isa;
  int64_t batch, keys, heads, kv_heads, size;
  const float *q, *k, *v;
  int64_t q_stride[2];                                    // from batch to batch, head to head, in floats
  int64_t k_stride[3], v_stride[3];                       // from batch to batch, head to head, key to key
  float scale;
  float* out;                                             // (batch, heads, size), contiguous
  const int64_t* hidden;                                  // null, or of batch numbers from 0 to keys - 1
} xq_one_query;

XQ_API int xq_one_query_check(const xq_one_query* op);
XQ_API size_t xq_one_query_scratch(const xq_one_query* op);  // bytes for each running thread
XQ_API int64_t xq_one_query_items(const xq_one_query* op);
XQ_API void xq_one_query_run(const xq_one_query* op, int64_t begin, int64_t end, void* scratch);

#ifdef __cplusplus
}
#endif

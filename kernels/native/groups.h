// The part of the C interface for linears whose weights have scales for groups of input features. See native.h.
//
// Weights are codes, of 8 bits (-128 to 127) or of 4 (0 to 15, each less 8), and a group's real weights are
// scale * code [+ offset]. With the codes of a row, its scale and its zero point, as in a dynamic linear,
//
//     sum_g = Σ code · weight code over the features of a group       an exact int32
//     v     = fma(float(sum_g), scale_g, v)                           group after group, from 0
//     v     = fma(float(Σ code of the group), offset_g, v)            only with offsets
//     v     = fma(-zp, total, v)                                      total: the sum of all real weights, of float64
//     out   = activation(fma(v, row scale, bias))
//
// Every level gives the same bytes as XQ_ISA_REFERENCE, up to activations. A blob is run by the calls that run a linear's.
#pragma once

#include "native.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct xq_groups {
  int32_t in_features, out_features;
  int32_t activation;     // xq_activation
  int32_t groups;         // of equally many features, a multiple of 8; at most 2048
  int32_t bits;           // 4 or 8
  int32_t half;           // whether scales and offsets are float16 rather than float32
  int32_t offsets;        // whether each scale has an offset behind it
  // Calls of so many rows and more, but fewer than unpack_to, make bytes of a block of 4-bit codes once for many rows:
  // see group_blocks.h. Which those are changes times alone. 0: the least that are worth it as a rule; 0: no end.
  int32_t unpack_from, unpack_to;
} xq_groups;

// Bytes that xq_groups_pack will write, or 0 for a description it refuses.
XQ_API size_t xq_groups_packed_size(const xq_groups* linear, int isa);

// codes: (out, in) int8, or (out, in / 2) bytes that hold feature 2 j in the low half of byte j and 2 j + 1 in the high
// half; scale: (out, groups) or (out, groups, 2); bias: one an output, or null. packed: 64-byte aligned.
XQ_API int xq_groups_pack(const xq_groups* linear, int isa, const void* codes, const void* scale, const float* bias,
                          void* packed);

#ifdef __cplusplus
}
#endif

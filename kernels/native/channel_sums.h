// Sums of the codes of each channel, and of their squares: what a normalization over positions needs.
#pragma once

#include "native.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct xq_channel_sums {
  xq_tensor a;       // its n is 1
  int64_t* sums;     // of a.c channels; added to
  int64_t* squares;  // the same
  int32_t isa;
} xq_channel_sums;

// Rows [begin, end) of the d * h ones. Every ISA gives the same numbers, which are exact.
XQ_API void xq_channel_sums_run(const xq_channel_sums* op, int64_t begin, int64_t end);

#ifdef __cplusplus
}
#endif

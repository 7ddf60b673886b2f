// AVX2 and FMA: GEMM by 16-bit pairs, which cannot saturate.
#define XQ_TARGET "avx2,fma"
#include "target.h"

#include "vec256.h"

#include "attention.h"
#include "depthwise.h"
#include "dense.h"
#include "grouped.h"
#include "im2col.h"
#include "cache_codes.h"
#include "one_query.h"
#include "pointwise.h"
#include "rows.h"
#include "weight_only.h"
#include "winograd.h"

namespace xq {
using V = Vec256<false>;
const IsaKernels kAvx2 = {dense<V>, depthwise<V>, grouped<V>, im2col, op_rows<V>,
                               dense<V, FloatEpilogue<V>>, quantize_rows<V>, weight_only<V>, winograd<V>};
const RowKernels kAvx2Rows = {finish_rows<V>, {attention<V, FloatProducts<V>>, attention_scratch<FloatProducts<V>>}, one_query<V, float>, kCodes<V>};
}  // namespace xq

XQ_TARGET_END

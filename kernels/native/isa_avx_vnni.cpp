// AVX-VNNI: 256-bit dot products.
#ifdef XQ_EMULATED
#define XQ_TARGET "avx2,fma"
#else
#define XQ_TARGET "avx2,fma,avxvnni"
#endif
#include "target.h"

#include "emulated_avx_vnni.h"

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
using V = Vec256<true>;
const IsaKernels kAvxVnni = {dense<V>, depthwise<V>, grouped<V>, im2col, op_rows<V>,
                               dense<V, FloatEpilogue<V>>, quantize_rows<V>, weight_only<V>, winograd<V>};
const RowKernels kAvxVnniRows = {finish_rows<V>, {attention<V, FloatProducts<V>>, attention_scratch<FloatProducts<V>>}, one_query<V, float>, kCodes<V>};
}  // namespace xq

XQ_TARGET_END

// AVX-512 with VNNI.
#define XQ_TARGET "avx512f,avx512bw,avx512vl,avx512dq,fma,avx512vnni"
#include "target.h"

#include "vec512.h"

#include "attention.h"
#include "code_attention.h"
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
using V = Vec512<true, false>;
const IsaKernels kAvx512Vnni = {dense<V>, depthwise<V>, grouped<V>, im2col, op_rows<V>,
                               dense<V, FloatEpilogue<V>>, quantize_rows<V>, weight_only<V>, winograd<V>};
const RowKernels kAvx512VnniRows = {finish_rows<V>, {attention<V, FloatProducts<V>>, attention_scratch<FloatProducts<V>>}, one_query<V, float>, kCodes<V>};
const CodeAttention kAvx512VnniCodeAttention = kCodeAttention<V>;
}  // namespace xq

XQ_TARGET_END

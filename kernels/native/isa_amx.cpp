// AMX tiles; AVX-512 VNNI for what is no GEMM.
#define XQ_TARGET "avx512f,avx512bw,avx512vl,avx512dq,fma,avx512vnni,avx512vbmi,amx-tile,amx-int8"
#include "target.h"

#include "emulated_tiles.h"

#include "vec512.h"

#include "amx.h"
#include "amx_linear.h"
#include "attention.h"
#include "depthwise.h"
#include "grouped.h"
#include "im2col.h"
#include "cache_codes.h"
#include "one_query.h"
#include "pointwise.h"
#include "rows.h"
#include "weight_only.h"

namespace xq {
using V = Vec512<true, true>;
const IsaKernels kAmxInt8 = {dense_amx<V>, depthwise<V>, grouped<V>, im2col, op_rows<V>,
                               linear_amx<V>, quantize_rows<V>, weight_only<V>, nullptr};
const RowKernels kAmxRows = {finish_rows<V>, {attention<V, FloatProducts<V>>, attention_scratch<FloatProducts<V>>}, one_query<V, float>, kCodes<V>};
}  // namespace xq

XQ_TARGET_END

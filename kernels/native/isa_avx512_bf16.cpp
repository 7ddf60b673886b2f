// AVX-512 with VNNI and dot products of bfloat16, for attention.
#define XQ_TARGET "avx512f,avx512bw,avx512vl,avx512dq,fma,avx512vnni,avx512bf16"
#include "target.h"

#include "vec512.h"

#include "bf16_attention.h"

namespace xq {
using V = Vec512<true, false>;
const AttentionKernel kAvx512Bf16Attention = {attention<V, PairProducts<V>>, attention_scratch<PairProducts<V>>};
}  // namespace xq

XQ_TARGET_END

// AMX tiles of bfloat16, for attention. A CPU with AMX for bytes has them, but a virtual machine may hide them.
#define XQ_TARGET "avx512f,avx512bw,avx512vl,avx512dq,fma,avx512vnni,avx512vbmi,avx512bf16,amx-tile,amx-int8,amx-bf16"
#include "target.h"

#include "emulated_tiles.h"

#include "vec512.h"

#include "amx_attention.h"

namespace xq {
using V = Vec512<true, true>;
const AttentionKernel kAmxBf16Attention = {attention<V, TileProducts<V>>, attention_scratch<TileProducts<V>>};
}  // namespace xq

XQ_TARGET_END

// Weights with scales for groups of input features: AVX-512 without VNNI.
#define XQ_TARGET "avx512f,avx512bw,avx512vl,avx512dq,fma"
#include "target.h"

#include "vec512.h"

#include "group_blocks.h"
#include "row_tasks.h"

namespace xq {
void linear_groups_avx512(const DenseTask& t) {
  using V = Vec512<false, false>;
  unpacks_blocks<V>(t) ? group_blocks<V>(t) : group_product<V>(t);
}
}  // namespace xq

XQ_TARGET_END

// Weights with scales for groups of input features: AVX-512 with VNNI.
#define XQ_TARGET "avx512f,avx512bw,avx512vl,avx512dq,fma,avx512vnni"
#include "target.h"

#include "vec512.h"

#include "group_blocks.h"
#include "row_tasks.h"

namespace xq {
void linear_groups_avx512_vnni(const DenseTask& t) {
  using V = Vec512<true, false>;
  unpacks_blocks<V>(t) ? group_blocks<V>(t) : group_product<V>(t);
}
}  // namespace xq

XQ_TARGET_END

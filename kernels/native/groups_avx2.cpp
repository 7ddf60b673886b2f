// Weights with scales for groups of input features: AVX2 and FMA.
#define XQ_TARGET "avx2,fma,f16c"
#include "target.h"

#include "vec256.h"

#include "group_blocks.h"
#include "row_tasks.h"

namespace xq {
void linear_groups_avx2(const DenseTask& t) {
  using V = Vec256<false>;
  unpacks_blocks<V>(t) ? group_blocks<V>(t) : group_product<V>(t);
}
}  // namespace xq

XQ_TARGET_END

// Weights with scales for groups of input features: AVX-VNNI.
#ifdef XQ_EMULATED
#define XQ_TARGET "avx2,fma,f16c"
#else
#define XQ_TARGET "avx2,fma,f16c,avxvnni"
#endif
#include "target.h"

#include "emulated_avx_vnni.h"

#include "vec256.h"

#include "group_blocks.h"
#include "row_tasks.h"

namespace xq {
void linear_groups_avx_vnni(const DenseTask& t) {
  using V = Vec256<true>;
  unpacks_blocks<V>(t) ? group_blocks<V>(t) : group_product<V>(t);
}
}  // namespace xq

XQ_TARGET_END

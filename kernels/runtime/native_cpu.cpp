#include "native_cpu.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <atomic>
#include <map>

#include "../native/native.h"

namespace x86quant {
namespace {

std::atomic<int> isa_in_use{XQ_ISA_REFERENCE};

TORCH_LIBRARY_FRAGMENT(x86quant, m) {
  m.def("set_native_cpu(str isa, int l1, int l2) -> str",
        [](std::string isa, int64_t l1, int64_t l2) { return set_native_cpu(isa, l1, l2); });
}

}  // namespace

std::string set_native_cpu(const std::string& isa, int64_t l1, int64_t l2) {
  static const std::map<std::string, int> known = {{"avx2", XQ_ISA_AVX2},
                                                   {"avx_vnni", XQ_ISA_AVX_VNNI},
                                                   {"avx512", XQ_ISA_AVX512},
                                                   {"avx512_vnni", XQ_ISA_AVX512_VNNI},
                                                   {"amx_int8", XQ_ISA_AMX_INT8}};
  auto found = known.find(isa);
  TORCH_CHECK_VALUE(found != known.end(), "x86quant: unknown ISA level ", isa);
  xq_set_caches(l1, l2);
  // Asked here, once, rather than where weights are packed: every pack has the same level.
  if (found->second == XQ_ISA_AMX_INT8 && xq_enable_amx() != XQ_OK) found = known.find("avx512_vnni");
  isa_in_use = found->second;
  return found->first;
}

int native_isa() { return isa_in_use; }

void succeed(int status) {
  TORCH_CHECK(status == XQ_OK, "x86quant: the native kernel refused: ", xq_status_text(status));
}

}  // namespace x86quant

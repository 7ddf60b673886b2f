#include "native_cpu.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "../native/native.h"
#include "errors.h"

namespace x86quant {
namespace {

std::atomic<int> isa_in_use{XQ_ISA_REFERENCE};
std::atomic<int64_t> l2_in_use{0};  // 0: unknown
std::mutex guard;
NativeCpu told{"none", 0, 0};

}  // namespace

std::string set_native_cpu(const std::string& isa, int64_t l1, int64_t l2) {
  static const std::map<std::string, int> known = {{"avx2", XQ_ISA_AVX2},
                                                   {"avx_vnni", XQ_ISA_AVX_VNNI},
                                                   {"avx512", XQ_ISA_AVX512},
                                                   {"avx512_vnni", XQ_ISA_AVX512_VNNI},
                                                   {"amx_int8", XQ_ISA_AMX_INT8}};
  auto found = known.find(isa);
  require(found != known.end(), "unknown ISA level ", isa);
  xq_set_caches(l1, l2);
  l2_in_use = l2;
  // Asked here, once, rather than where weights are packed: every pack has the same level.
  if (found->second == XQ_ISA_AMX_INT8 && xq_enable_amx() != XQ_OK) found = known.find("avx512_vnni");
  isa_in_use = found->second;
  const std::lock_guard<std::mutex> lock(guard);
  told = {found->first, l1, l2};
  return found->first;
}

NativeCpu native_cpu() {
  const std::lock_guard<std::mutex> lock(guard);
  return told;
}

int native_isa() { return isa_in_use; }

int64_t rows_in_l2(int64_t floats) {
  constexpr int64_t kUsualL2 = 1 << 20;
  const int64_t l2 = l2_in_use > 0 ? l2_in_use.load() : kUsualL2;
  return std::max<int64_t>(l2 / 2 / (floats * static_cast<int64_t>(sizeof(float))), 1);
}

double product_nanoseconds(double multiply_adds, double outputs) {
  double products = 80, rounded = 4;  // a nanosecond
  switch (native_isa()) {
    case XQ_ISA_AMX_INT8: products = 1200, rounded = 20; break;
    case XQ_ISA_AVX512_VNNI: products = 300, rounded = 20; break;
    case XQ_ISA_AVX512: products = 130, rounded = 15; break;
    case XQ_ISA_AVX_VNNI: products = 160, rounded = 8; break;
    default: break;
  }
  return multiply_adds / products + outputs / rounded;
}

void succeed(int status) {
  if (status != XQ_OK) throw std::runtime_error(joined("the native kernel refused: ", xq_status_text(status)));
}

}  // namespace x86quant

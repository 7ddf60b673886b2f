#include "this_cpu.h"

#include <cpuid.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "../runtime/native_cpu.h"
#include "failure.h"
#include "quota.h"
#include "x86quant/runtime.h"

namespace x86quant::serving {
namespace {

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Leaf(unsigned leaf, unsigned sub) { __get_cpuid_count(leaf, sub, &a, &b, &c, &d); }
};

bool all(unsigned word, std::initializer_list<int> bits) {
  return std::all_of(bits.begin(), bits.end(), [&](int bit) { return word >> bit & 1; });
}

// The registers that the operating system saves.
uint64_t saved_registers(const Leaf& basic) {
  if (!all(basic.c, {27})) return 0;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

#ifdef XQ_EMULATED  // a build for tests: see kernels/native/emulated_tiles.h
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

// From the lowest to the highest.
std::vector<std::string> levels() {
  const Leaf basic(1, 0), more(7, 0), further(7, 1);
  const auto saved = static_cast<unsigned>(saved_registers(basic));
  std::vector<std::string> found;
  if (!all(basic.c, {12}) || !all(more.b, {5}) || !all(saved, {1, 2})) return found;  // FMA, AVX2
  found.emplace_back("avx2");
  const bool wide = all(more.b, {16, 17, 30, 31}) && all(saved, {5, 6, 7});  // F, DQ, BW, VL
  if (wide) found.emplace_back("avx512");
  if (kEmulated || all(further.a, {4})) found.emplace_back("avx_vnni");
  if (!wide || !all(more.c, {11})) return found;
  found.emplace_back("avx512_vnni");
  const bool tiles = all(more.d, {24, 25}) && all(saved, {17, 18});
  if (kEmulated || tiles) found.emplace_back("amx_int8");
  return found;
}

}  // namespace

int64_t l1_bytes() { return std::max(sysconf(_SC_LEVEL1_DCACHE_SIZE), 0L); }
int64_t l2_bytes() { return std::max(sysconf(_SC_LEVEL2_CACHE_SIZE), 0L); }

std::string choose_level(const std::string& isa) {
  const char* variable = std::getenv("X86QUANT_ISA");
  const std::string wanted = !isa.empty() ? isa : variable != nullptr ? variable : "";
  static const std::vector<std::string> here = levels();
  if (here.empty()) throw Failure(X86QUANT_CPU, "this CPU lacks AVX2 or FMA, which every kernel needs");
  if (!wanted.empty() && std::find(here.begin(), here.end(), wanted) == here.end()) {
    std::string names;
    for (const std::string& name : here) names += (names.empty() ? "" : ", ") + name;
    throw Failure(X86QUANT_CPU, "this CPU does not reach the level \"", wanted, "\"; it reaches ", names);
  }
  return set_native_cpu(wanted.empty() ? here.back() : wanted, l1_bytes(), l2_bytes());
}

int allowed_cpus() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const bool has_mask = sched_getaffinity(0, sizeof(allowed), &allowed) == 0;
  const int cpus = has_mask ? CPU_COUNT(&allowed) : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const double quota = cpu_quota();
  return std::max(1, quota > 0 ? std::min(cpus, static_cast<int>(std::ceil(quota))) : cpus);
}

}  // namespace x86quant::serving

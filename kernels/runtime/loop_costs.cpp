// What it costs to share a loop among threads; `benchmarks/scaling.py` asks.
#include <torch/library.h>

#include <chrono>

#include "parallel.h"

namespace x86quant::runtime {
namespace {

using Clock = std::chrono::steady_clock;

double nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

// Nanoseconds of one of `loops` loops, each of `threads` shares that take `busy` nanoseconds; all in one region or
// each in one of its own.
double loop_nanoseconds(int64_t loops, int64_t threads, double busy, bool together) {
  const auto share = [&](int) {
    for (const auto start = Clock::now(); busy > 0 && nanoseconds_since(start) < busy;) {
    }
  };
  const auto all = [&](int) {
    for (int64_t i = 0; i < loops; ++i) run_on_threads(static_cast<int>(threads), share);
  };
  const auto start = Clock::now();
  together ? with_team(all) : all(0);
  return nanoseconds_since(start) / static_cast<double>(loops);
}

TORCH_LIBRARY_FRAGMENT(x86quant, m) {
  m.def("loop_nanoseconds(int loops, int threads, float busy, bool together) -> float",
        [](int64_t loops, int64_t threads, double busy, bool together) {
          return loop_nanoseconds(loops, threads, busy, together);
        });
}

}  // namespace
}  // namespace x86quant::runtime

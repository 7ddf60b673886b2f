// Sharing work among threads: torch's in torch_threads.cpp, a pool of its own where there is no torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "exported.h"

namespace x86quant::runtime {

// Something to call with the number of a thread, which outlives the reference.
class ThreadBody {
 public:
  template <class Body>
  ThreadBody(const Body& body)
      : body_(&body), call_([](const void* b, int thread) { (*static_cast<const Body*>(b))(thread); }) {}
  void operator()(int thread) const { call_(body_, thread); }

 private:
  const void* body_;
  void (*call_)(const void*, int);
};

// How many there are.
int all_threads();

// How many threads work worth `shares` shares deserves: one inside a parallel region.
X86QUANT_EXPORTED int useful_threads(int64_t shares);

// What sharing a loop costs, in nanoseconds: `call` for each time that the number of threads doubles, in which they tell
// each other by groups (team.h), and `each` for a thread: the lines of operands that another core wrote. Of threads that
// are together (`with_team`), and of threads that have to be gathered. `python -m benchmarks.loop_simulation` shows both.
struct LoopCost {
  double call, each;
};
constexpr LoopCost kTogether{500, 30}, kGathered{3000, 250};
X86QUANT_EXPORTED LoopCost loop_cost();

// How many threads work deserves that takes one so many nanoseconds. On n threads it takes work / n + call * log2(n) +
// each * n, least where each * n² + call / ln(2) * n = work. Short work is left to one: as much is lost as gained where
// half of what a thread reads is in the cache of another core.
constexpr double kShort = 8000;
inline int64_t shares_of(double nanoseconds, LoopCost cost) {
  if (nanoseconds < kShort) return 1;
  const double call = cost.call / std::log(2.0);
  const double shares = (std::sqrt(call * call + 4 * cost.each * nanoseconds) - call) / (2 * cost.each);
  return static_cast<int64_t>(std::min(shares, 1e6));
}
inline int threads_for(double nanoseconds) { return useful_threads(shares_of(nanoseconds, loop_cost())); }

// Runs `body`, of one share, here; the loops in it are shared by threads that stay together from one to the next,
// which costs each less than gathering them. Where nothing can be shared it just runs.
void with_team(ThreadBody body);

// Runs body(i) for i from 0 to threads - 1, on as many threads of the pool as are free. What the bodies throw is
// thrown here, once.
X86QUANT_EXPORTED void run_on_threads(int threads, ThreadBody body);

// Runs `body(begin, end)` over [0, items) on up to `threads` threads, whose shares differ by one item at most.
template <class Body>
void split(int64_t items, int threads, const Body& body) {
  if (items <= 0) return;
  if (threads <= 1 || items == 1) return body(int64_t{0}, items);
  const int64_t shares = std::min<int64_t>(threads, items);
  run_on_threads(static_cast<int>(shares), [&](int i) { body(i * items / shares, (i + 1) * items / shares); });
}

}  // namespace x86quant::runtime

// Sharing work among threads: torch's in torch_threads.cpp, a pool of its own where there is no torch.
#pragma once

#include <algorithm>
#include <cstdint>

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
int useful_threads(int64_t shares);

// The same for so many products. Waking a thread takes some microseconds; half a million products take five at
// 100 per nanosecond, which is what a core with AVX2 does.
inline int threads_for(int64_t multiply_adds) { return useful_threads(multiply_adds / 500'000); }

// Runs body(i) for i from 0 to threads - 1, on as many threads of the pool as are free. What the bodies throw is
// thrown here, once.
void run_on_threads(int threads, ThreadBody body);

// Runs `body(begin, end)` over [0, items) on up to `threads` threads.
template <class Body>
void split(int64_t items, int threads, const Body& body) {
  if (items <= 0) return;
  if (threads <= 1 || items == 1) return body(int64_t{0}, items);
  const int64_t each = (items + threads - 1) / threads;
  const auto share = [&](int thread) { body(thread * each, std::min(items, (thread + 1) * each)); };
  run_on_threads(static_cast<int>((items + each - 1) / each), share);
}

}  // namespace x86quant::runtime

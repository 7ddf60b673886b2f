// Sharing work among torch's threads.
#pragma once

#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <cstdint>

namespace x86quant::runtime {

// How many threads work worth `shares` shares deserves: one inside a parallel region.
int useful_threads(int64_t shares);

// The same for so many products. Waking a thread takes some microseconds; half a million products take five at
// 100 per nanosecond, which is what a core with AVX2 does.
inline int threads_for(int64_t multiply_adds) { return useful_threads(multiply_adds / 500'000); }

// Runs body(i) for i from 0 to threads - 1, each on a thread of the pool that torch's own loops use. What the
// bodies throw is thrown here, once.
void run_on_threads(int threads, c10::function_ref<void(int)> body);

// Runs `body(begin, end)` over [0, items) on up to `threads` threads.
template <class Body>
void split(int64_t items, int threads, const Body& body) {
  if (items <= 0) return;
  if (threads <= 1 || items == 1) return body(int64_t{0}, items);
  const int64_t each = (items + threads - 1) / threads;
  run_on_threads(static_cast<int>((items + each - 1) / each), [&](int thread) {
    body(thread * each, std::min(items, (thread + 1) * each));
  });
}

}  // namespace x86quant::runtime

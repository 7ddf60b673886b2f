// Sharing work among torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

namespace x86quant::runtime {

// How many threads work worth `shares` shares deserves: one inside a parallel region.
inline int useful_threads(int64_t shares) {
  if (shares <= 1 || at::in_parallel_region()) return 1;
  return static_cast<int>(std::min<int64_t>(at::get_num_threads(), shares));
}

// The same for so many products, of which fewer than half a million are not worth waking a thread for.
inline int threads_for(int64_t multiply_adds) { return useful_threads(multiply_adds / 500'000); }

// Runs `body(begin, end)` over [0, items) on up to `threads` threads.
template <class Body>
void split(int64_t items, int threads, const Body& body) {
  if (items <= 0) return;
  if (threads <= 1 || items == 1) return body(int64_t{0}, items);
  at::parallel_for(0, items, (items + threads - 1) / threads, body);
}

}  // namespace x86quant::runtime

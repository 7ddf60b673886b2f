// Packing the weights of a layer on as many threads as that is worth.
#pragma once

#include <optional>

#include "../native/pack_shared.h"
#include "parallel.h"
#include "table.h"

namespace x86quant::runtime {

// Shares the packing of so many weights.
inline xq::Share share_of_packing(int64_t weights) {
  constexpr double kNanosecondsEach = 1;  // with VNNI, which takes least
  const int threads = threads_for(kNanosecondsEach * static_cast<double>(weights));
  return [threads](int64_t blocks, const std::function<void(int64_t, int64_t)>& body) { split(blocks, threads, body); };
}

// Whether `packed`, which came from elsewhere, has the size and the place of a pack of `size` bytes.
inline bool fits(const std::optional<Table>& packed, size_t size) {
  return packed && packed->count == static_cast<int64_t>(size) && reinterpret_cast<uintptr_t>(packed->data) % 64 == 0;
}

}  // namespace x86quant::runtime

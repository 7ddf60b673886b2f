#include "weights_memory.h"

#include <algorithm>
#include <mutex>

#include "fork_lock.h"

namespace x86quant::runtime {

Buffer among_others(size_t size) {
  constexpr size_t kChunk = size_t{8} << 20, kLeast = size_t{64} << 10, kLine = 64;
  if (size < kLeast || size > kChunk / 2) return Buffer(size, Readers::kAll);
  struct Chunk;
  static std::weak_ptr<Buffer> latest;  // gone once nobody has a part of it
  static size_t used = 0;
  const std::lock_guard<std::mutex> lock(fork_lock<Chunk>());
  std::shared_ptr<Buffer> chunk = latest.lock();
  if (!chunk || chunk->size() - used < size) {
    chunk = std::make_shared<Buffer>(kChunk, Readers::kAll);
    latest = chunk, used = 0;
  }
  uint8_t* const mine = chunk->data() + used;
  used += (size + kLine - 1) / kLine * kLine;
  used = std::min(used, kChunk);
  return Buffer(size, std::shared_ptr<void>(chunk, mine));
}

}  // namespace x86quant::runtime

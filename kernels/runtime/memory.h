// Memory of a running program: where tensors lie, and buffers that are reused between runs.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "../native/native.h"
#include "numa.h"

namespace x86quant::runtime {

// Whose threads read what is large: those of the one that fills it, or of every node.
enum class Readers { kOne, kAll };

// 64-byte aligned memory.
class Buffer {
 public:
  explicit Buffer(size_t size = 0, Readers readers = Readers::kOne)
      : size_(size), memory_(size ? allocated(size, readers) : nullptr, &std::free) {}
  // Of a part of memory that lasts as long as its parts.
  Buffer(size_t size, std::shared_ptr<void> memory) : size_(size), memory_(std::move(memory)) {}
  uint8_t* data() const { return static_cast<uint8_t*>(memory_.get()); }
  size_t size() const { return size_; }

 private:
  static void* allocated(size_t size, Readers readers) {
    // Weights and arenas are read from end to end: huge pages, where there are some, save a walk every 4 KiB.
    constexpr size_t kHugePage = size_t{2} << 20;
    const bool is_huge = size >= kHugePage;
    void* memory = nullptr;
    if (posix_memalign(&memory, is_huge ? kHugePage : 64, size) != 0) throw std::bad_alloc();
    if (is_huge) (void)madvise(memory, size, MADV_HUGEPAGE);
    if (is_huge && readers == Readers::kAll) spread_over_nodes(memory, size);
    return memory;
  }

  size_t size_;
  std::shared_ptr<void> memory_;
};

// The addresses a run works on: the arena, then the call's inputs, its outputs, and what stages leave to each other.
using Bases = std::vector<uint8_t*>;

// Where a tensor of a program begins, for steps that know its shape.
struct Address {
  int32_t base = -1;  // none
  int64_t offset = 0;

  explicit operator bool() const { return base >= 0; }
  // Without bases, any address: checks look whether there is one.
  template <class T>
  T* any() const {
    return base < 0 ? nullptr : reinterpret_cast<T*>(uintptr_t{64});
  }
  template <class T>
  T* at(const Bases& bases) const {
    return base < 0 ? nullptr : reinterpret_cast<T*>(bases[base] + offset);
  }
};

// Elements that may be another number in each call.
struct OpenAddress {
  Address first, count;  // and where that number stands; nowhere if it is always the same

  int64_t size(const Bases& bases, int64_t always) const { return count ? *count.at<const int64_t>(bases) : always; }
};

// A tensor of a program: what it looks like, and the base and offset of its first byte.
struct Place {
  xq_tensor view{};
  int32_t base = -1;  // none
  int64_t offset = 0;

  xq_tensor at(const Bases& bases) const {
    xq_tensor t = view;
    t.data = base < 0 ? nullptr : bases[base] + offset;
    return t;
  }
};

}  // namespace x86quant::runtime

// Memory of a running program: where tensors lie, and buffers that are reused between runs.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "../native/native.h"

namespace x86quant::runtime {

// 64-byte aligned memory.
class Buffer {
 public:
  explicit Buffer(size_t size = 0) : size_(size), memory_(size ? allocated(size) : nullptr, &std::free) {}
  uint8_t* data() const { return static_cast<uint8_t*>(memory_.get()); }
  size_t size() const { return size_; }

 private:
  static void* allocated(size_t size) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, size) != 0) throw std::bad_alloc();
    return memory;
  }

  size_t size_;
  std::unique_ptr<void, void (*)(void*)> memory_;
};

// The addresses a run works on: the arena, then the call's inputs, then its outputs.
using Bases = std::vector<uint8_t*>;

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

// Working memory of one step: taken where it is needed, given back at the end of the scope.
#pragma once

#include "exported.h"
#include "memory.h"

namespace x86quant::runtime {

// At least `bytes` bytes, 64-byte aligned, until the end of the scope, of the thread that makes it. Scopes nest.
// A thread keeps what it has taken for the next time, unless it is larger than kMostKept: one large call should
// not cost its memory forever.
class X86QUANT_EXPORTED Scratch {
 public:
  static constexpr size_t kMostKept = size_t{16} << 20;

  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
};

}  // namespace x86quant::runtime

// What AddressSanitizer is told of the arena, in builds with it; nothing in others.
//
// All tensors of a program lie in one block, of which the sanitizer knows the ends alone. While a step runs, all of it
// is closed but what the step has said it reaches: a step that touches another byte is found at that byte, and so is a
// kind of step that does not say all that it touches.
#pragma once

#include <cstdint>
#include <vector>

#include "reach.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace x86quant::runtime {

#if defined(__SANITIZE_ADDRESS__)

// The ranges of the arena that each step of a stage touches.
class Fences {
 public:
  void add(const Reach& step) { open_.push_back(step.ranges(0)); }

  // From the first step of a run to the end of the scope.
  class Watch {
   public:
    Watch(const Fences& fences, const uint8_t* arena, size_t bytes) : fences_(fences), arena_(arena), bytes_(bytes) {}
    ~Watch() { ASAN_UNPOISON_MEMORY_REGION(arena_, bytes_); }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    void before(size_t step) const {
      ASAN_POISON_MEMORY_REGION(arena_, bytes_);
      for (const Reach::Range& range : fences_.open_[step])
        ASAN_UNPOISON_MEMORY_REGION(arena_ + range.first, static_cast<size_t>(range.last - range.first));
    }

   private:
    const Fences& fences_;
    const uint8_t* arena_;
    size_t bytes_;
  };

 private:
  std::vector<std::vector<Reach::Range>> open_;
};

#else

class Fences {
 public:
  void add(const Reach&) {}
  struct Watch {
    Watch(const Fences&, const uint8_t*, size_t) {}
    void before(size_t) const {}
  };
};

#endif

}  // namespace x86quant::runtime

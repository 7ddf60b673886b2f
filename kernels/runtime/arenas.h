// The memory that runs of programs work on: one set for all programs of the process. Programs for many shapes of
// input, or for the segments of one model, would otherwise each keep their own.
#pragma once

#include "memory.h"

namespace x86quant::runtime {

// A program's need, on so many threads at a time. Between runs, as many buffers are kept as the program with the
// most threads takes, each no larger than what the largest one that lives needs.
class ArenaClaim {
 public:
  ArenaClaim(size_t bytes, int threads);
  ~ArenaClaim();
  ArenaClaim(const ArenaClaim&) = delete;
  ArenaClaim& operator=(const ArenaClaim&) = delete;
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
};

// At least so many bytes, lent to one run until the end of the scope. They hold whatever they held.
class ArenaLease {
 public:
  explicit ArenaLease(const ArenaClaim& claim);
  ~ArenaLease();
  ArenaLease(const ArenaLease&) = delete;
  ArenaLease& operator=(const ArenaLease&) = delete;
  uint8_t* data() const { return buffer_.data(); }

 private:
  Buffer buffer_;
};

// What lies idle at the moment.
size_t idle_arena_bytes();

}  // namespace x86quant::runtime

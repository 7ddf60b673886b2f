// The memory that runs of programs work on: one set for all programs of the process. Programs for many shapes of
// input, or for the segments of one model, would otherwise each keep their own.
#pragma once

#include "memory.h"

namespace x86quant::runtime {

// Whose programs they are: plans that this process made, or those of a file, which nobody has looked at.
enum class Owner : int64_t { kProcess = 0 };
// One that nobody else is.
Owner new_owner();

// A program's need, on so many threads at a time. Between runs, as many buffers are kept as the program with the
// most threads takes, each no larger than what the largest one that lives needs.
class ArenaClaim {
 public:
  ArenaClaim(size_t bytes, int threads, Owner owner = Owner::kProcess);
  ~ArenaClaim();
  ArenaClaim(const ArenaClaim&) = delete;
  ArenaClaim& operator=(const ArenaClaim&) = delete;
  size_t bytes() const { return bytes_; }
  Owner owner() const { return owner_; }

 private:
  size_t bytes_;
  Owner owner_;
};

// A buffer, and whose programs alone have written to it since it was zeros; of the process also where there were none.
struct Arena {
  Buffer buffer;
  Owner owner = Owner::kProcess;
};

// At least so many bytes, lent to one run until the end of the scope. They hold whatever they held, but to a program of
// a file nothing that others left: it could return that.
class ArenaLease {
 public:
  explicit ArenaLease(const ArenaClaim& claim);
  ~ArenaLease();
  ArenaLease(const ArenaLease&) = delete;
  ArenaLease& operator=(const ArenaLease&) = delete;
  uint8_t* data() const { return arena_.buffer.data(); }

 private:
  Arena arena_;
};

// What lies idle at the moment.
size_t idle_arena_bytes();

}  // namespace x86quant::runtime

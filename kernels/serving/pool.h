// A pool of threads where there is no torch.
#pragma once

#include <atomic>
#include <memory>

#include "../runtime/parallel.h"

namespace x86quant::serving {

// Loops of several callers do not wait for each other: one has the pool, and the others run theirs by themselves.
class Pool {
 public:
  explicit Pool(int threads);  // the caller's among them
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  // Runs body(i) for i from 0 to shares - 1. What a body throws is thrown here, once.
  void run(int shares, runtime::ThreadBody body);

 private:
  class Crew;

  int threads_;
  std::atomic<int> used_by_{0};  // the process, by its number of forks, one of whose threads has the pool; 0: none
  std::unique_ptr<Crew> crew_;  // made at the first loop, and anew in a forked process
};

// The loops of this thread are shared among the threads of `pool` until the end of the scope.
class UsePool {
 public:
  explicit UsePool(Pool& pool);
  ~UsePool();
  UsePool(const UsePool&) = delete;
  UsePool& operator=(const UsePool&) = delete;

 private:
  Pool* before_;
};

}  // namespace x86quant::serving

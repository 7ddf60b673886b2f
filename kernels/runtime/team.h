// Threads that run one loop after another together, with a barrier on plain memory in between.
//
// Where the threads come from is somebody else's: a region of torch's OpenMP, a pool. One of them, the leader,
// goes through a program and gives the team its loops; the others wait for the next one. That is a write and a
// read of a line for each thread, where a parallel region of its own for each loop would start all anew.
//
// Nobody waits for a thread that has not come. A share belongs to the thread of its number, in whose caches
// the data of the loop before are likely to be; what that one has not taken when the leader is done with its own
// share, the leader takes. So a thread that sleeps, or has lost its CPU, delays nothing but what it has begun.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "parallel.h"

namespace x86quant::runtime {

class Team {
 public:
  // Of so many threads with the leader, but no more than there are CPUs: two that wait for each other on one CPU
  // gain nothing.
  explicit Team(int threads);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int members() const { return members_; }

  // For the leader: body(i) for i from 0 to shares - 1. The body throws nothing.
  void run(int shares, ThreadBody body);

  // For thread `member`, from 1 to members() - 1: takes part in loops until the team closes.
  void work(int member);

  // For the leader: lets all others go.
  void close();

 private:
  // What one member writes and the leader reads: lines of its own, in pairs as they are fetched.
  struct alignas(128) Slot {
    std::atomic<uint64_t> taken{0};  // the last loop of which somebody has its share
    std::atomic<uint64_t> done{0};   // the last loop of which its member has done it
    std::atomic<bool> awaited{false};  // the leader sleeps until then
  };

  bool take(Slot& slot, uint64_t loop);
  void run_shares(int member);
  void publish(uint64_t word);
  uint64_t next_word(uint64_t seen);
  void await(Slot& slot, uint64_t loop);

  const int members_;
  const std::unique_ptr<Slot[]> slots_;
  // The loop by number, and how many members have a share in it; written by the leader alone.
  alignas(128) std::atomic<uint64_t> word_{0};
  const ThreadBody* body_ = nullptr;
  int shares_ = 0;
  alignas(128) std::atomic<int> sleepers_{0};
};

}  // namespace x86quant::runtime

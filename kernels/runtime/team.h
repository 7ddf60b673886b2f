// Threads that run one loop after another together, with a barrier on plain memory in between.
//
// Where the threads come from is somebody else's: a region of torch's OpenMP, a pool. One of them, the leader,
// goes through a program and gives the team its loops; the others wait for the next one. That is a write and a
// read of a line for each eight threads, where a parallel region of its own for each loop would start all anew.
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
  // Of so many threads with the leader, but no more than `most`, by default as many as there are CPUs: two that wait
  // for each other on one CPU gain nothing.
  explicit Team(int threads, int most = cpus());
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  static int cpus();

  int members() const { return members_; }

  // For the leader: body(i) for i from 0 to shares - 1. The body throws nothing.
  void run(int shares, ThreadBody body);

  // For thread `member`, from 1 to members() - 1: takes part in loops until the team closes.
  void work(int member);

  // For the leader: lets all others go.
  void close();

 private:
  // Members that hear of loops and tell of their shares by one word: the leader goes through one line for eight of
  // them, which come and go on it, not through one for each, nor do all of a large machine look at one.
  struct alignas(128) Group {
    std::atomic<uint64_t> word{0};        // see Word in team.cpp
    std::atomic<uint32_t> sleepers{0};    // a bit for each member
    std::atomic<bool> awaited{false};     // the leader sleeps until all is done
    const ThreadBody* body = nullptr;     // of the loop, for who has a share in it
    int shares = 0;
  };

  void run_shares(const Group& group, int member);
  void publish(Group& group, uint64_t word);
  uint64_t next_word(Group& group, uint64_t loop, int place);
  void take_left(Group& group, int first);
  void await(Group& group);

  const int members_;
  const std::unique_ptr<Group[]> groups_;
  uint64_t loop_ = 0;  // the leader's
};

}  // namespace x86quant::runtime

// Loops of teams of 2 to 64 members, some of which come late: team [LOOPS]. Each share is run once, and before the loop
// ends. Says how long a loop takes, and how often a sleeper was woken by the system.
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "../../../kernels/runtime/team.h"

using x86quant::runtime::Team;

namespace {

struct Times {
  double nanoseconds;
  long switches;
};

long voluntary_switches() {
  rusage used;
  getrusage(RUSAGE_SELF, &used);
  return used.ru_nvcsw;
}

Times loops_of(int members, int loops) {
  Team team(members, members);
  std::vector<std::thread> threads;
  for (int member = 1; member < team.members(); ++member)
    threads.emplace_back([&team, member] { team.work(member); });
  std::mt19937 random(static_cast<unsigned>(members));
  std::vector<std::atomic<int>> ran(static_cast<size_t>(3 * members));
  const long before = voluntary_switches();
  const auto start = std::chrono::steady_clock::now();
  for (int loop = 1; loop <= loops; ++loop) {
    const int shares = 1 + static_cast<int>(random() % (loop % 4 ? static_cast<unsigned>(members) : ran.size()));
    const unsigned pause = random() % 200 == 0 ? random() % 3000 : 0;  // longer than a member looks: some go to sleep
    if (pause > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause));
    const unsigned late = random() % static_cast<unsigned>(8 * shares);
    team.run(shares, [&](int share) {
      if (static_cast<unsigned>(share) == late) std::this_thread::yield();
      ran[static_cast<size_t>(share)].fetch_add(1, std::memory_order_relaxed);
    });
    for (int share = 0; share < static_cast<int>(ran.size()); ++share) {
      const int found = ran[static_cast<size_t>(share)].exchange(0, std::memory_order_relaxed);
      if (found == (share < shares)) continue;
      std::printf("%d members, loop %d: share %d of %d ran %d times\n", members, loop, share, shares, found);
      std::fflush(stdout);
      std::_Exit(1);
    }
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  team.close();
  for (std::thread& thread : threads) thread.join();
  return {took.count() / loops, voluntary_switches() - before};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const int loops = std::atoi(argv[1]);
  for (const int members : {2, 3, 8, 9, 16, 31, 64}) {
    const Times times = loops_of(members, loops);
    std::printf("%d members: %d loops, %.0f ns each, %ld waits\n", members, loops, times.nanoseconds, times.switches);
  }
}

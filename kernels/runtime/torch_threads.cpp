// The threads of torch's own loops.
#include "parallel.h"

#include <pthread.h>

#include <atomic>
#include <exception>
#include <utility>

#include "team.h"

// The OpenMP runtime that torch has loaded. Its functions are called by name: a compiler that made these calls
// from pragmas would call, and link, a runtime of its own (clang's is another one than torch's), and there would
// be two pools of threads.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num(void);
int omp_in_parallel(void);
int omp_pause_resource_all(int kind);
// Of torch's stable C interface, whose headers read much else: 0 where it worked. It is omp_get_max_threads(), once the
// number that torch was given holds for this thread.
int32_t torch_get_num_threads(uint32_t* threads);
}

namespace x86quant::runtime {
namespace {

// The team that this thread leads, outside of its loops.
thread_local Team* led = nullptr;

// A parallel region of torch's threads, which are a team while its leader runs `body`.
struct Region {
  Team team;
  ThreadBody body;
  std::exception_ptr error = nullptr;
};

void lead(Region& region) {
  led = &region.team;
  try {
    region.body(0);
  } catch (...) {
    region.error = std::current_exception();
  }
  led = nullptr;
  region.team.close();
}

void take_part(void* data) {
  auto& region = *static_cast<Region*>(data);
  const int thread = omp_get_thread_num();
  if (thread == 0) return lead(region);
  if (thread < region.team.members()) region.team.work(thread);
}

// A forked process has only the thread that forked, whose OpenMP runtime still counts on the threads of its
// pool and would wait for them forever. So the pool is ended before the fork; the next parallel loop, in either
// process, starts a new one.
void end_pool_before_fork() {
  constexpr int kSoft = 1;
  omp_pause_resource_all(kSoft);
}

[[maybe_unused]] const int registered = pthread_atfork(end_pool_before_fork, nullptr, nullptr);

void run_alone(int shares, ThreadBody body) {
  for (int i = 0; i < shares; ++i) body(i);
}

}  // namespace

int all_threads() {
  uint32_t threads = 1;
  return torch_get_num_threads(&threads) == 0 ? static_cast<int>(threads) : 1;
}

int useful_threads(int64_t shares) {
  if (shares <= 1 || (led == nullptr && omp_in_parallel())) return 1;
  return static_cast<int>(std::min<int64_t>(all_threads(), shares));
}

LoopCost loop_cost() { return led ? kTogether : kGathered; }

void with_team(ThreadBody body) {
  if (led != nullptr || all_threads() == 1 || omp_in_parallel()) return body(0);
  Region region{Team(all_threads()), body};
  // All threads of the pool, as in torch's own loops, although some may have nothing to do: for a smaller team,
  // libgomp would end the other threads and start them again for the next loop.
  GOMP_parallel(take_part, &region, /*threads=*/0, /*flags=*/0);
  if (region.error) std::rethrow_exception(region.error);
}

void run_on_threads(int threads, ThreadBody body) {
  if (led == nullptr) return with_team([&](int) { led ? run_on_threads(threads, body) : run_alone(threads, body); });
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr error = nullptr;
  Team* const team = std::exchange(led, nullptr);  // what runs in a loop has one thread
  team->run(threads, [&](int share) {
    try {
      body(share);
    } catch (...) {
      if (!failed.test_and_set()) error = std::current_exception();
    }
  });
  led = team;
  if (error) std::rethrow_exception(error);
}

}  // namespace x86quant::runtime

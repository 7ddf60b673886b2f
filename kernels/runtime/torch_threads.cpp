// The threads of torch's own loops.
#include "parallel.h"

#include <ATen/Parallel.h>
#include <c10/util/ParallelGuard.h>
#include <pthread.h>

#include <atomic>
#include <exception>

// The OpenMP runtime that torch has loaded. Its functions are called by name: a compiler that made these calls
// from pragmas would call, and link, a runtime of its own (clang's is another one than torch's), and there would
// be two pools of threads.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
int omp_pause_resource_all(int kind);
}

namespace x86quant::runtime {
namespace {

struct Region {
  ThreadBody body;
  int threads;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr error = nullptr;
};

void run_share(void* data) {
  auto& region = *static_cast<Region*>(data);
  const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
  const at::internal::ThreadIdGuard id(thread);
  const c10::ParallelGuard guard(true);
  for (int i = thread; i < region.threads; i += threads) {
    try {
      region.body(i);
    } catch (...) {
      if (!region.failed.test_and_set()) region.error = std::current_exception();
    }
  }
}

// A forked process has only the thread that forked, whose OpenMP runtime still counts on the threads of its
// pool and would wait for them forever. So the pool is ended before the fork; the next parallel loop, in either
// process, starts a new one.
void end_pool_before_fork() {
  constexpr int kSoft = 1;
  omp_pause_resource_all(kSoft);
}

[[maybe_unused]] const int registered = pthread_atfork(end_pool_before_fork, nullptr, nullptr);

}  // namespace

int all_threads() { return at::get_num_threads(); }

int useful_threads(int64_t shares) {
  if (shares <= 1 || at::in_parallel_region()) return 1;
  return static_cast<int>(std::min<int64_t>(all_threads(), shares));
}

void run_on_threads(int threads, ThreadBody body) {
  Region region{body, threads};
  // All threads of the pool, as in torch's own loops, although some may have nothing to do: for a smaller team,
  // libgomp would end the other threads and start them again for the next loop.
  GOMP_parallel(run_share, &region, /*threads=*/0, /*flags=*/0);
  if (region.error) std::rethrow_exception(region.error);
}

}  // namespace x86quant::runtime

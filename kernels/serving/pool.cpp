#include "pool.h"

#include <pthread.h>

#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "../runtime/errors.h"
#include "../runtime/team.h"

namespace x86quant {
namespace serving {
namespace {

thread_local Pool* in_use = nullptr;
thread_local bool inside = false;  // of a loop: what runs there has one thread

// Forks on the way to this process, and one more: threads do not come along.
std::atomic<int> forks{1};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });

}  // namespace

// The pool's threads but the caller's, which wait for loops.
class Pool::Crew {
 public:
  explicit Crew(int threads) : team_(threads), born_(forks) {
    for (int member = 1; member < team_.members(); ++member) {
      try {
        threads_.emplace_back([this, member] {
          inside = true;
          team_.work(member);
        });
      } catch (const std::system_error&) {
        break;  // fewer will do
      }
    }
  }

  ~Crew() {
    team_.close();
    for (std::thread& thread : threads_) thread.join();
  }

  bool is_of_parent() const { return born_ != forks; }

  // What the first share that failed threw is thrown here. No std::exception_ptr: its symbols are younger than
  // manylinux_2_28.
  void run(int shares, runtime::ThreadBody body) {
    std::atomic_flag failed = ATOMIC_FLAG_INIT;
    bool out_of_memory = false, refused = false;
    std::string error;
    team_.run(shares, [&](int share) {
      try {
        body(share);
      } catch (const std::bad_alloc&) {
        if (!failed.test_and_set()) out_of_memory = true;
      } catch (const Refused& thrown) {
        if (!failed.test_and_set()) refused = true, error = thrown.what();
      } catch (const std::exception& thrown) {
        if (!failed.test_and_set()) error = thrown.what();
      }
    });
    if (out_of_memory) throw std::bad_alloc();
    if (refused) throw Refused(error);
    if (!error.empty()) throw std::runtime_error(error);
  }

 private:
  runtime::Team team_;
  const int born_;
  std::vector<std::thread> threads_;
};

Pool::Pool(int threads) : threads_(threads) {}
Pool::~Pool() = default;

void Pool::run(int shares, runtime::ThreadBody body) {
  // A thread of the process that forked this one had it and is not here to give it back.
  const int here = forks;
  int user = used_by_.load(std::memory_order_relaxed);
  const bool mine = user != here && used_by_.compare_exchange_strong(user, here, std::memory_order_acquire);
  inside = true;
  struct Leave {
    std::atomic<int>* used_by;
    ~Leave() {
      inside = false;
      if (used_by != nullptr) used_by->store(0, std::memory_order_release);
    }
  } leave{mine ? &used_by_ : nullptr};
  if (!mine) {
    for (int i = 0; i < shares; ++i) body(i);
    return;
  }
  if (crew_ && crew_->is_of_parent()) (void)crew_.release();  // its threads are not here
  if (!crew_) crew_ = std::make_unique<Crew>(threads_);
  crew_->run(shares, body);
}

UsePool::UsePool(Pool& pool) : before_(in_use) { in_use = &pool; }
UsePool::~UsePool() { in_use = before_; }

}  // namespace serving

namespace runtime {

int all_threads() { return serving::in_use == nullptr ? 1 : serving::in_use->threads(); }

int useful_threads(int64_t shares) {
  if (shares <= 1 || serving::inside) return 1;
  return static_cast<int>(std::min<int64_t>(all_threads(), shares));
}

LoopCost loop_cost() { return kTogether; }

void with_team(ThreadBody body) { body(0); }  // a pool stays together by itself

void run_on_threads(int threads, ThreadBody body) { serving::in_use->run(threads, body); }

}  // namespace runtime
}  // namespace x86quant

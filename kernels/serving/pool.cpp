#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace x86quant {
namespace serving {
namespace {

thread_local Pool* in_use = nullptr;
thread_local bool inside = false;  // of a loop: what runs there has one thread

// How often an idle thread looks for work, some 20 microseconds long, before it sleeps.
constexpr int kLooks = 500;

// Forks of this process so far: threads do not come along.
std::atomic<int> forks{0};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });

// A number that threads wait to see changed.
class Signal {
 public:
  uint32_t now() const { return number_.load(std::memory_order_acquire); }

  void change() {
    number_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  void await(uint32_t seen) {
    for (int i = 0; i < kLooks; ++i) {
      if (now() != seen) return;
      _mm_pause();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (number_.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  void futex(int operation, uint32_t value) {
    static_assert(sizeof(number_) == sizeof(uint32_t));
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&number_), operation, value, nullptr, nullptr, 0);
  }

  std::atomic<uint32_t> number_{0};
  std::atomic<int> sleepers_{0};
};

}  // namespace

// The pool's threads but the caller's. A loop's shares are taken one by one, by a number that says which loop they
// belong to as well: a thread that comes late finds nothing to do, and nobody waits for it.
class Pool::Team {
 public:
  explicit Team(int workers) : born_(forks) {
    for (int i = 0; i < workers; ++i) {
      try {
        threads_.emplace_back(&Team::work, this);
      } catch (const std::system_error&) {
        break;  // fewer will do
      }
    }
  }

  ~Team() {
    stopping_ = true;
    work_.change();
    for (std::thread& thread : threads_) thread.join();
  }

  bool is_of_parent() const { return born_ != forks; }

  void run(int shares, runtime::ThreadBody body) {
    const uint64_t loop = ((next_.load() >> 32) + 1) & 0xffffffff;
    // First of all nobody may take a share by what is left of the loop before.
    next_.store(loop << 32 | kClosed, std::memory_order_seq_cst);
    body_ = &body;
    shares_ = shares;
    done_ = 0;
    failed_.clear();
    error_ = nullptr;
    next_.store(loop << 32, std::memory_order_seq_cst);
    work_.change();
    take(loop);
    for (uint32_t seen; seen = finished_.now(), done_.load(std::memory_order_acquire) < shares;) finished_.await(seen);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void work() {
    inside = true;
    for (uint32_t seen = 0; !stopping_;) {
      work_.await(seen);
      seen = work_.now();
      take(next_.load(std::memory_order_acquire) >> 32);
    }
  }

  void take(uint64_t loop) {
    uint64_t next = next_.load(std::memory_order_acquire);
    while (next >> 32 == loop && static_cast<int>(next & 0xffffffff) < shares_.load(std::memory_order_relaxed)) {
      const runtime::ThreadBody* body = body_.load(std::memory_order_relaxed);
      const int shares = shares_.load(std::memory_order_relaxed);
      // Where this holds, what was just read is of this loop.
      if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
      try {
        (*body)(static_cast<int>(next & 0xffffffff));
      } catch (...) {
        if (!failed_.test_and_set()) error_ = std::current_exception();
      }
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == shares) finished_.change();
      next = next_.load(std::memory_order_acquire);
    }
  }

  static constexpr uint64_t kClosed = 0x7fffffff;  // more shares than there are

  const int born_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stopping_{false};
  Signal work_, finished_;
  std::atomic<uint64_t> next_{0};  // the loop, and its next share
  std::atomic<const runtime::ThreadBody*> body_{nullptr};
  std::atomic<int> shares_{0}, done_{0};
  std::atomic_flag failed_ = ATOMIC_FLAG_INIT;
  std::exception_ptr error_;
};

Pool::Pool(int threads) : threads_(threads) {}
Pool::~Pool() = default;

void Pool::run(int shares, runtime::ThreadBody body) {
  const bool mine = !busy_.test_and_set(std::memory_order_acquire);
  inside = true;
  struct Leave {
    std::atomic_flag* busy;
    ~Leave() {
      inside = false;
      if (busy != nullptr) busy->clear(std::memory_order_release);
    }
  } leave{mine ? &busy_ : nullptr};
  if (!mine) {
    for (int i = 0; i < shares; ++i) body(i);
    return;
  }
  if (team_ && team_->is_of_parent()) (void)team_.release();  // its threads are not here
  if (!team_) team_ = std::make_unique<Team>(threads_ - 1);
  team_->run(shares, body);
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

void run_on_threads(int threads, ThreadBody body) { serving::in_use->run(threads, body); }

}  // namespace runtime
}  // namespace x86quant

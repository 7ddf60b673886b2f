#include "team.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <thread>

namespace x86quant::runtime {
namespace {

// A word is a loop's number above, and how many members have a share in it below.
constexpr int kCountBits = 16;
constexpr uint64_t kCount = (uint64_t{1} << kCountBits) - 1;
constexpr uint64_t kClosed = kCount;

// How long somebody looks before it sleeps, in ticks of the clock that all CPUs share: some 400 microseconds, longer
// than most runs of short steps that only the leader takes. Waking a virtual CPU that idles takes as long as some of
// these; a thread that looks for 50 microseconds only is asleep whenever it is wanted.
constexpr uint64_t kTicks = 1'000'000;

int cpus() {
  static const int of_this_process = std::max(1u, std::thread::hardware_concurrency());
  return of_this_process;
}

// The half of a number that changes, as the kernel takes it.
uint32_t* low_half(std::atomic<uint64_t>& number) {
  static_assert(sizeof(number) == sizeof(uint64_t));
  return reinterpret_cast<uint32_t*>(&number);
}

void sleep_while(std::atomic<uint64_t>& number, uint64_t seen) {
  syscall(SYS_futex, low_half(number), FUTEX_WAIT_PRIVATE, static_cast<uint32_t>(seen), nullptr, nullptr, 0);
}

void wake(std::atomic<uint64_t>& number) {
  syscall(SYS_futex, low_half(number), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Whether `holds` became true within the time that is worth looking.
template <class Condition>
bool comes_soon(const Condition& holds) {
  const uint64_t start = __rdtsc();
  do {
    for (int i = 0; i < 16; ++i) {
      if (holds()) return true;
      _mm_pause();
    }
  } while (__rdtsc() - start < kTicks);
  return false;
}

}  // namespace

Team::Team(int threads)
    : members_(std::clamp(threads, 1, std::min(cpus(), static_cast<int>(kClosed) - 1))), slots_(new Slot[members_]) {}

void Team::run(int shares, ThreadBody body) {
  const int count = std::min(shares, members_);
  const uint64_t loop = (word_.load(std::memory_order_relaxed) >> kCountBits) + 1;
  body_ = &body;
  shares_ = shares;
  if (count > 1) publish(loop << kCountBits | static_cast<uint64_t>(count));
  run_shares(0);
  for (int i = 1; i < count; ++i)
    if (take(slots_[i], loop)) {
      run_shares(i);
      slots_[i].done.store(loop, std::memory_order_relaxed);
    }
  for (int i = 1; i < count; ++i) await(slots_[i], loop);
}

void Team::work(int member) {
  Slot& mine = slots_[member];
  for (uint64_t seen = 0;;) {
    seen = next_word(seen);
    const auto count = static_cast<int>(seen & kCount);
    if (count == kClosed) return;
    const uint64_t loop = seen >> kCountBits;
    // Once it is taken the loop cannot end before it is done: body and number of shares are this loop's.
    if (member >= count || !take(mine, loop)) continue;
    run_shares(member);
    mine.done.store(loop, std::memory_order_seq_cst);
    if (mine.awaited.load(std::memory_order_seq_cst)) wake(mine.done);
  }
}

void Team::close() { publish(((word_.load(std::memory_order_relaxed) >> kCountBits) + 1) << kCountBits | kClosed); }

bool Team::take(Slot& slot, uint64_t loop) {
  uint64_t before = slot.taken.load(std::memory_order_relaxed);
  return before < loop && slot.taken.compare_exchange_strong(before, loop, std::memory_order_acq_rel);
}

// Of more shares than members, each has several.
void Team::run_shares(int member) {
  const int shares = shares_;
  const ThreadBody body = *body_;
  for (int i = member; i < shares; i += members_) body(i);
}

void Team::publish(uint64_t word) {
  word_.store(word, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) wake(word_);
}

uint64_t Team::next_word(uint64_t seen) {
  const auto changed = [&] { return word_.load(std::memory_order_acquire) != seen; };
  if (!comes_soon(changed)) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (word_.load(std::memory_order_seq_cst) == seen) sleep_while(word_, seen);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }
  return word_.load(std::memory_order_acquire);
}

void Team::await(Slot& slot, uint64_t loop) {
  const auto done = [&] { return slot.done.load(std::memory_order_acquire) == loop; };
  if (comes_soon(done)) return;
  slot.awaited.store(true, std::memory_order_seq_cst);
  for (uint64_t seen; (seen = slot.done.load(std::memory_order_seq_cst)) != loop;) sleep_while(slot.done, seen);
  slot.awaited.store(false, std::memory_order_relaxed);
}

}  // namespace x86quant::runtime

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

constexpr int kGroup = 8;

// A group's word: a loop's number; how many members of the group have a share in it; of these, whose share somebody
// has taken, and whose is done. The lower half, which a sleeper compares, changes with each of them.
struct Word {
  static constexpr int kTakenAt = 8, kCountAt = 16, kLoopAt = 24;
  static constexpr uint64_t kClosed = 0xff;  // as a count

  static uint64_t of(uint64_t loop, uint64_t count) { return loop << kLoopAt | count << kCountAt; }
  static uint64_t loop(uint64_t word) { return word >> kLoopAt; }
  static int count(uint64_t word) { return static_cast<int>(word >> kCountAt & 0xff); }
  static uint64_t taken(int place) { return uint64_t{1} << (kTakenAt + place); }
  static uint64_t done(int place) { return uint64_t{1} << place; }
  static bool is_done(uint64_t word) { return (word & 0xff) == members(count(word)); }
  // Bits of the first `count` members.
  static uint32_t members(int count) { return (1u << std::min(count, kGroup)) - 1; }
};

// Who sleeps on a word: its members by their places, the leader above.
constexpr uint32_t kLeader = 1u << kGroup;

// How long somebody looks before it sleeps, in ticks of the clock that all CPUs share: some 400 microseconds, longer
// than most runs of short steps that only the leader takes. Waking a virtual CPU that idles takes as long as some of
// these; a thread that looks for 50 microseconds only is asleep whenever it is wanted.
constexpr uint64_t kTicks = 1'000'000;

// The half of a number that changes, as the kernel takes it.
uint32_t* low_half(std::atomic<uint64_t>& number) {
  static_assert(sizeof(number) == sizeof(uint64_t));
  return reinterpret_cast<uint32_t*>(&number);
}

void sleep_while(std::atomic<uint64_t>& number, uint64_t seen, uint32_t who) {
  syscall(SYS_futex, low_half(number), FUTEX_WAIT_BITSET_PRIVATE, static_cast<uint32_t>(seen), nullptr, nullptr, who);
}

void wake(std::atomic<uint64_t>& number, int most, uint32_t whom) {
  syscall(SYS_futex, low_half(number), FUTEX_WAKE_BITSET_PRIVATE, most, nullptr, nullptr, whom);
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

int Team::cpus() {
  static const int of_this_process = std::max(1u, std::thread::hardware_concurrency());
  return of_this_process;
}

Team::Team(int threads, int most)
    : members_(std::clamp(threads, 1, std::max(most, 1))), groups_(new Group[(members_ + kGroup - 1) / kGroup]) {}

void Team::run(int shares, ThreadBody body) {
  const int count = std::min(shares, members_);
  ++loop_;
  for (int first = 0; first < count; first += kGroup) {
    Group& group = groups_[first / kGroup];
    group.body = &body;
    group.shares = shares;
    if (count == 1) break;  // nobody is to hear of it
    const int here = std::min(count - first, kGroup);
    const uint64_t own = first == 0 ? Word::taken(0) | Word::done(0) : 0;
    publish(group, Word::of(loop_, static_cast<uint64_t>(here)) | own);
  }
  run_shares(groups_[0], 0);
  if (count == 1) return;
  for (int first = 0; first < count; first += kGroup) take_left(groups_[first / kGroup], first);
  for (int first = 0; first < count; first += kGroup) await(groups_[first / kGroup]);
}

void Team::work(int member) {
  Group& group = groups_[member / kGroup];
  const int place = member % kGroup;
  for (uint64_t loop = 0;;) {
    uint64_t word = next_word(group, loop, place);
    const int count = Word::count(word);
    if (count == static_cast<int>(Word::kClosed)) return;
    loop = Word::loop(word);
    if (place >= count) continue;
    // Once it is taken the loop cannot end before it is done: body and number of shares are this loop's.
    while (Word::loop(word) == loop && !(word & Word::taken(place))) {
      if (!group.word.compare_exchange_weak(word, word | Word::taken(place), std::memory_order_acq_rel)) continue;
      run_shares(group, member);
      group.word.fetch_or(Word::done(place), std::memory_order_seq_cst);
      if (group.awaited.load(std::memory_order_seq_cst)) wake(group.word, 1, kLeader);
      break;
    }
  }
}

void Team::close() {
  ++loop_;
  for (int first = 0; first < members_; first += kGroup)
    publish(groups_[first / kGroup], Word::of(loop_, Word::kClosed));
}

// Of more shares than members, each has several.
void Team::run_shares(const Group& group, int member) {
  const int shares = group.shares;
  const ThreadBody body = *group.body;
  for (int i = member; i < shares; i += members_) body(i);
}

// Wakes one of those that sleep and have a share, which wakes the others of its group (next_word): of a large team the
// leader would do nothing else for long.
void Team::publish(Group& group, uint64_t word) {
  group.word.store(word, std::memory_order_seq_cst);
  const uint32_t wanted = Word::members(Word::count(word));
  if (group.sleepers.load(std::memory_order_seq_cst) & wanted) wake(group.word, 1, wanted);
}

// The first word of another loop than `loop`.
uint64_t Team::next_word(Group& group, uint64_t loop, int place) {
  const auto changed = [&] { return Word::loop(group.word.load(std::memory_order_acquire)) != loop; };
  if (!comes_soon(changed)) {
    const uint32_t mine = 1u << place;
    group.sleepers.fetch_or(mine, std::memory_order_seq_cst);
    uint64_t word;
    while (Word::loop(word = group.word.load(std::memory_order_seq_cst)) == loop) sleep_while(group.word, word, mine);
    const uint32_t others = group.sleepers.fetch_and(~mine, std::memory_order_seq_cst) & ~mine;
    const uint32_t wanted = others & Word::members(Word::count(word));
    if (wanted) wake(group.word, INT_MAX, wanted);
  }
  return group.word.load(std::memory_order_acquire);
}

// What nobody has taken yet of the shares of a group whose first member is `first`.
void Team::take_left(Group& group, int first) {
  uint64_t word = group.word.load(std::memory_order_relaxed);
  for (int place = 0; place < Word::count(word); ++place) {
    const uint64_t mine = Word::taken(place) | Word::done(place);
    while (!(word & Word::taken(place))) {
      if (!group.word.compare_exchange_weak(word, word | mine, std::memory_order_acq_rel)) continue;
      run_shares(group, first + place);
      break;
    }
    word = group.word.load(std::memory_order_relaxed);
  }
}

void Team::await(Group& group) {
  const auto done = [&] { return Word::is_done(group.word.load(std::memory_order_acquire)); };
  if (comes_soon(done)) return;
  group.awaited.store(true, std::memory_order_seq_cst);
  uint64_t word;
  while (!Word::is_done(word = group.word.load(std::memory_order_seq_cst))) sleep_while(group.word, word, kLeader);
  group.awaited.store(false, std::memory_order_relaxed);
}

}  // namespace x86quant::runtime

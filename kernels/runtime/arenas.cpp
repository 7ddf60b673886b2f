#include "arenas.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <set>
#include <utility>

#include "fork_lock.h"

namespace x86quant::runtime {
namespace {

struct Pool {
  std::mutex& lock = fork_lock<Pool>();
  std::vector<Arena> idle;  // the one used last, which the caches know best, at the end
  std::multiset<size_t> claims;
  size_t most_kept = 1;

  size_t largest_claim() const { return claims.empty() ? 0 : *claims.rbegin(); }

  // Of what is idle the last that is large enough, its own before another owner's; where none is, the last, which gives
  // way to a larger one.
  size_t pick(const ArenaClaim& claim) const {
    size_t found = idle.size();
    for (size_t i = idle.size(); i-- > 0;) {
      if (idle[i].buffer.size() < claim.bytes()) continue;
      if (idle[i].owner == claim.owner()) return i;
      if (found == idle.size()) found = i;
    }
    return found == idle.size() && found > 0 ? found - 1 : found;  // another one: same either way, but for memory
  }
};

// Never destroyed: programs may outlive what is static.
Pool& pool() {
  static Pool& the_pool = *new Pool;
  return the_pool;
}

}  // namespace

Owner new_owner() {
  static std::atomic<int64_t> last{static_cast<int64_t>(Owner::kProcess)};
  return static_cast<Owner>(++last);
}

ArenaClaim::ArenaClaim(size_t bytes, int threads, Owner owner) : bytes_(bytes), owner_(owner) {
  Pool& all = pool();
  const std::lock_guard<std::mutex> guard(all.lock);
  all.claims.insert(bytes);
  all.most_kept = std::max(all.most_kept, static_cast<size_t>(threads));
}

ArenaClaim::~ArenaClaim() {
  Pool& all = pool();
  std::vector<Arena> unneeded;  // freed when the lock is
  const std::lock_guard<std::mutex> guard(all.lock);
  all.claims.erase(all.claims.find(bytes_));
  for (size_t i = all.idle.size(); i-- > 0;) {
    if (all.idle[i].buffer.size() <= all.largest_claim()) continue;
    unneeded.push_back(std::move(all.idle[i]));
    all.idle.erase(all.idle.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

ArenaLease::ArenaLease(const ArenaClaim& claim) {
  {
    Pool& all = pool();
    const std::lock_guard<std::mutex> guard(all.lock);
    if (const size_t pick = all.pick(claim); pick < all.idle.size()) {
      arena_ = std::move(all.idle[pick]);
      all.idle.erase(all.idle.begin() + static_cast<std::ptrdiff_t>(pick));
    }
  }
  const bool is_large = arena_.buffer.size() >= claim.bytes();
  if (is_large && arena_.owner == claim.owner()) return;
  if (!is_large) {
    arena_.buffer = Buffer();  // freed first: the two never coexist
    arena_.buffer = Buffer(claim.bytes(), Readers::kAll);
  }
  if (claim.owner() != Owner::kProcess) std::fill_n(arena_.buffer.data(), arena_.buffer.size(), uint8_t{0});
  arena_.owner = claim.owner();
}

ArenaLease::~ArenaLease() {
  Pool& all = pool();
  const std::lock_guard<std::mutex> guard(all.lock);
  // More callers at a time than threads are rare: what they needed is not kept for the next time.
  if (arena_.buffer.size() <= all.largest_claim() && all.idle.size() < all.most_kept) all.idle.push_back(std::move(arena_));
}

size_t idle_arena_bytes() {
  Pool& all = pool();
  const std::lock_guard<std::mutex> guard(all.lock);
  return std::accumulate(all.idle.begin(), all.idle.end(), size_t{0},
                         [](size_t sum, const Arena& arena) { return sum + arena.buffer.size(); });
}

}  // namespace x86quant::runtime

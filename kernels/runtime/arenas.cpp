#include "arenas.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <set>
#include <utility>

#include "fork_lock.h"

namespace x86quant::runtime {
namespace {

struct Pool {
  std::mutex& lock = fork_lock<Pool>();
  std::vector<Buffer> idle;  // the one used last, which the caches know best, at the end
  std::multiset<size_t> claims;
  size_t most_kept = 1;

  size_t largest_claim() const { return claims.empty() ? 0 : *claims.rbegin(); }
};

// Never destroyed: programs may outlive what is static.
Pool& pool() {
  static Pool& the_pool = *new Pool;
  return the_pool;
}

}  // namespace

ArenaClaim::ArenaClaim(size_t bytes, int threads) : bytes_(bytes) {
  Pool& all = pool();
  const std::lock_guard<std::mutex> guard(all.lock);
  all.claims.insert(bytes);
  all.most_kept = std::max(all.most_kept, static_cast<size_t>(threads));
}

ArenaClaim::~ArenaClaim() {
  Pool& all = pool();
  std::vector<Buffer> unneeded;  // freed when the lock is
  const std::lock_guard<std::mutex> guard(all.lock);
  all.claims.erase(all.claims.find(bytes_));
  for (size_t i = all.idle.size(); i-- > 0;) {
    if (all.idle[i].size() <= all.largest_claim()) continue;
    unneeded.push_back(std::move(all.idle[i]));
    all.idle.erase(all.idle.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

ArenaLease::ArenaLease(const ArenaClaim& claim) {
  {
    Pool& all = pool();
    const std::lock_guard<std::mutex> guard(all.lock);
    // The last that is large enough; where none is, the last one gives way to a larger one.
    size_t pick = all.idle.size();
    for (size_t i = all.idle.size(); i-- > 0 && pick == all.idle.size();)
      if (all.idle[i].size() >= claim.bytes()) pick = i;
    if (pick == all.idle.size() && pick > 0) --pick;
    if (pick < all.idle.size()) {
      buffer_ = std::move(all.idle[pick]);
      all.idle.erase(all.idle.begin() + static_cast<std::ptrdiff_t>(pick));
    }
  }
  if (buffer_.size() >= claim.bytes()) return;
  buffer_ = Buffer();  // freed first: the two never coexist
  buffer_ = Buffer(claim.bytes(), Readers::kAll);
}

ArenaLease::~ArenaLease() {
  Pool& all = pool();
  const std::lock_guard<std::mutex> guard(all.lock);
  // More callers at a time than threads are rare: what they needed is not kept for the next time.
  if (buffer_.size() <= all.largest_claim() && all.idle.size() < all.most_kept) all.idle.push_back(std::move(buffer_));
}

size_t idle_arena_bytes() {
  Pool& all = pool();
  const std::lock_guard<std::mutex> guard(all.lock);
  return std::accumulate(all.idle.begin(), all.idle.end(), size_t{0},
                         [](size_t sum, const Buffer& buffer) { return sum + buffer.size(); });
}

}  // namespace x86quant::runtime

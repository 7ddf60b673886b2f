#include <cstdlib>
#include <cstring>

#include "check.h"
#include "runtime/arenas.h"

using namespace x86quant::runtime;

namespace {

// What the first byte of a lease was, which becomes `now`.
int before(const ArenaClaim& claim, int now) {
  const ArenaLease lease(claim);
  const int was = lease.data()[0];
  std::memset(lease.data(), now, claim.bytes());
  return was;
}

const Owner one = new_owner(), other = new_owner();

void owners_do_not_see_each_other() {
  const ArenaClaim mine(256, 1, one), theirs(256, 1, other), process(256, 1);
  CHECK(before(mine, 1) == 0 && before(mine, 1) == 1);      // it is left what it wrote itself
  CHECK(before(theirs, 2) == 0 && before(mine, 1) == 0);    // and nothing of others
  CHECK(before(process, 3) == 1 && before(mine, 1) == 0);   // the process looks at what it runs
  CHECK(idle_arena_bytes() == 256);                         // one for all of them, of the same size
}

void own_memory_comes_first() {
  const ArenaClaim mine(256, 3, one), theirs(256, 3, other), large(1024, 3, one);
  {
    const ArenaLease a(mine), b(theirs), c(large);
    a.data()[0] = 1, b.data()[0] = 2, c.data()[0] = 3;
  }
  CHECK(idle_arena_bytes() == 256 + 256 + 1024);
  {
    const ArenaLease a(mine), b(theirs);  // of what is large enough its own, used last
    CHECK(a.data()[0] == 1 && b.data()[0] == 2 && idle_arena_bytes() == 1024);
    const ArenaLease c(mine);
    CHECK(c.data()[0] == 3);
    CHECK(idle_arena_bytes() == 0);
  }
  CHECK(idle_arena_bytes() == 256 + 256 + 1024);
}

void what_is_too_small_gives_way() {
  const ArenaClaim small(256, 2), large(512, 2);
  { const ArenaLease a(small), b(small); }
  CHECK(idle_arena_bytes() == 512);
  const uint8_t* kept = nullptr;
  {
    const ArenaLease a(large);
    CHECK(idle_arena_bytes() == 256);
    kept = a.data();
  }
  const ArenaLease again(large);
  CHECK(again.data() == kept);  // as large as it has to be: not taken anew
}

void no_more_is_kept_than_is_needed() {
  const ArenaClaim small(256, 2);
  {
    const ArenaClaim large(1024, 2), middle(512, 2);
    { const ArenaLease a(large), b(middle), c(small); }
    CHECK(idle_arena_bytes() == 512 + 256);  // those given back first: of two threads
  }
  CHECK(idle_arena_bytes() == 256);
  {
    const ArenaClaim large(1024, 2);
    { const ArenaLease a(large); }
    { const ArenaLease a(large), b(large); }
    CHECK(idle_arena_bytes() == 2048);
  }
  CHECK(idle_arena_bytes() == 0);
}

}  // namespace

int main(int count, char** names) {
  const int which = count > 1 ? std::atoi(names[1]) : 0;
  void (*const tests[])() = {owners_do_not_see_each_other, own_memory_comes_first, what_is_too_small_gives_way,
                             no_more_is_kept_than_is_needed};
  tests[which]();
}

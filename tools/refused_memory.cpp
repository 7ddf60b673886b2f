// Refuses memory to chosen libraries at one allocation: see refused_memory.py, which preloads this.
#include <link.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "../tests/serving/fuzz/refusing_malloc.h"

namespace {

struct Range {
  uintptr_t first, last;
};

constexpr int kMostRanges = 64;
Range ranges[kMostRanges];
int range_count = 0;
std::atomic<bool> counts{false};
std::atomic<long> seen{0};
long chosen = 0;

int add_ranges(dl_phdr_info* info, size_t, void* wanted) {
  if (std::strstr(info->dlpi_name, static_cast<const char*>(wanted)) == nullptr) return 0;
  for (int i = 0; i < info->dlpi_phnum && range_count < kMostRanges; ++i) {
    const ElfW(Phdr)& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD || !(part.p_flags & PF_X)) continue;
    const uintptr_t first = info->dlpi_addr + part.p_vaddr;
    ranges[range_count++] = {first, first + part.p_memsz};
  }
  return 0;
}

}  // namespace

// Whether the code at `caller` is to do without.
static bool refuses(void* caller) {
  if (!counts.load(std::memory_order_relaxed)) return false;
  const auto at = reinterpret_cast<uintptr_t>(caller);
  for (int i = 0; i < range_count; ++i) {
    if (at < ranges[i].first || at >= ranges[i].last) continue;
    if (seen.fetch_add(1) + 1 != chosen) return false;
    errno = ENOMEM;
    return true;
  }
  return false;
}

extern "C" {
// Libraries whose name contains `part` are refused their allocations; how many parts of code that are.
int refuse_add(const char* part) {
  dl_iterate_phdr(add_ranges, const_cast<char*>(part));
  return range_count;
}

// Begins to count their allocations; number `number`, from 1, is refused.
void refuse_begin(long number) {
  seen = 0;
  chosen = number;
  counts = true;
}

// How many there were.
long refuse_end() {
  counts = false;
  return seen;
}
}

namespace {

void* got(size_t size, size_t alignment, void* caller) {
  if (!refuses(caller))
    if (void* memory = alignment > 16 ? __libc_memalign(alignment, size) : __libc_malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}

}  // namespace

// The compiler's own frees know nothing of these: they are malloc's.
void* operator new(size_t size) { return got(size, 0, __builtin_return_address(0)); }
void* operator new[](size_t size) { return got(size, 0, __builtin_return_address(0)); }
void* operator new(size_t size, std::align_val_t to) {
  return got(size, static_cast<size_t>(to), __builtin_return_address(0));
}
void* operator new[](size_t size, std::align_val_t to) {
  return got(size, static_cast<size_t>(to), __builtin_return_address(0));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

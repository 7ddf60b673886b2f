// malloc and its kin, of glibc's, but for what `refuses` says: the program that includes this defines it.
#pragma once

#include <cerrno>
#include <cstddef>

// Whether the allocation that the code at `caller` asks for is refused; sets errno then.
static bool refuses(void* caller);

extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* before, size_t size);
void* __libc_memalign(size_t alignment, size_t size);

void* malloc(size_t size) { return refuses(__builtin_return_address(0)) ? nullptr : __libc_malloc(size); }
void* calloc(size_t count, size_t size) {
  return refuses(__builtin_return_address(0)) ? nullptr : __libc_calloc(count, size);
}
void* realloc(void* before, size_t size) {
  return refuses(__builtin_return_address(0)) ? nullptr : __libc_realloc(before, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  return refuses(__builtin_return_address(0)) ? nullptr : __libc_memalign(alignment, size);
}
int posix_memalign(void** found, size_t alignment, size_t size) {
  if (refuses(__builtin_return_address(0))) return ENOMEM;
  *found = __libc_memalign(alignment, size);
  return *found == nullptr ? ENOMEM : 0;
}
}

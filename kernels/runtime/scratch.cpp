#include "scratch.h"

#include <pthread.h>

#include <cerrno>
#include <memory>
#include <new>
#include <vector>

#ifdef __GLIBC__
// By the names of glibc 2.28, which wheels promise (manylinux_2_28): these have newer ones since 2.34.
__asm__(".symver pthread_key_create,pthread_key_create@GLIBC_2.2.5");
__asm__(".symver pthread_key_delete,pthread_key_delete@GLIBC_2.2.5");
__asm__(".symver pthread_setspecific,pthread_setspecific@GLIBC_2.2.5");
#endif

namespace x86quant::runtime {
namespace {

// One buffer for each level of nesting.
struct Levels {
  std::vector<Buffer> buffers;
  size_t in_use = 0;
};

void end(void* levels) { delete static_cast<Levels*>(levels); }

// A key, where a thread_local object with a destructor would do, if glibc did not end the process when there is no
// memory to note that destructor. Deleted with the library: a thread that outlives it keeps its memory.
struct Key {
  Key() : made(pthread_key_create(&key, end) == 0) {}
  ~Key() {
    if (made) pthread_key_delete(key);
  }
  pthread_key_t key = 0;
  bool made;
};

Levels& levels() {
  static const Key ends;
  thread_local Levels* of_this_thread = nullptr;
  if (of_this_thread == nullptr) {
    auto made = std::make_unique<Levels>();
    if (ends.made && pthread_setspecific(ends.key, made.get()) == ENOMEM) throw std::bad_alloc();
    of_this_thread = made.release();
  }
  return *of_this_thread;
}

}  // namespace

Scratch::Scratch(size_t bytes) {
  Levels& all = levels();
  if (all.in_use == all.buffers.size()) all.buffers.emplace_back();
  Buffer& mine = all.buffers[all.in_use];
  if (mine.size() < bytes) {
    mine = Buffer();  // freed first: the two never coexist
    mine = Buffer(bytes);
  }
  data_ = mine.data();
  ++all.in_use;
}

Scratch::~Scratch() {
  Levels& all = levels();
  Buffer& mine = all.buffers[--all.in_use];
  if (mine.size() > kMostKept) mine = Buffer();
}

}  // namespace x86quant::runtime

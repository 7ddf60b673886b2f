// A lock that a fork leaves open on either side. One that another thread held would stay locked in the child forever.
#pragma once

#include <pthread.h>

#include <mutex>

namespace x86quant::runtime {

// The lock of what `Tag` names. Nobody may take another one of these while holding it: a fork takes all of them.
template <class Tag>
std::mutex& fork_lock() {
  static std::mutex& lock = *new std::mutex;  // never destroyed: what is static elsewhere may still need it
  [[maybe_unused]] static const int registered =
      pthread_atfork([] { lock.lock(); }, [] { lock.unlock(); }, [] { lock.unlock(); });
  return lock;
}

}  // namespace x86quant::runtime

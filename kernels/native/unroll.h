// A loop over constants. GCC keeps an array of vectors in registers only if its indices are constant
// before it unrolls loops by itself.
#pragma once

// Part of its caller, so that vectors stay in registers. Where sanitizers look at each access none do, and a
// function of all that it calls takes them five times as long to compile.
#ifdef XQ_SANITIZED
#define XQ_INLINE
#else
#define XQ_INLINE __attribute__((always_inline))
#endif

namespace {

template <int I, int N>
struct Unroll {
  template <class F>
  XQ_INLINE static inline void run(F& f) {
    if constexpr (I < N) {
      f(I);
      Unroll<I + 1, N>::run(f);
    }
  }
};

// f(0), f(1), … f(N - 1); f is a lambda marked always_inline.
template <int N, class F>
XQ_INLINE inline void unroll(F f) {
  Unroll<0, N>::run(f);
}

constexpr int min_of(int a, int b) { return a < b ? a : b; }

}  // namespace

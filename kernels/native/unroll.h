// A loop over constants. GCC keeps an array of vectors in registers only if its indices are constant
// before it unrolls loops by itself.
#pragma once

namespace {

template <int I, int N>
struct Unroll {
  template <class F>
  __attribute__((always_inline)) static inline void run(F& f) {
    if constexpr (I < N) {
      f(I);
      Unroll<I + 1, N>::run(f);
    }
  }
};

// f(0), f(1), … f(N - 1); f is a lambda marked always_inline.
template <int N, class F>
__attribute__((always_inline)) inline void unroll(F f) {
  Unroll<0, N>::run(f);
}

constexpr int min_of(int a, int b) { return a < b ? a : b; }

}  // namespace

#define XQ_INLINE __attribute__((always_inline))

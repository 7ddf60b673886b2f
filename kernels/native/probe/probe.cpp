// What a compiler must be able to do to build the extension, in a few lines: see kernels/native/toolchain.py.
#include <concepts>

#define XQ_TARGET "avx512f,avx512bw,avx512vl,avx512dq,fma,avx512vnni,avx512vbmi,avxvnni,amx-tile,amx-int8"
#include "../target.h"

namespace {

// C++20, and a function with a target of its own that is inlined through a lambda.
template <class Body>
  requires std::invocable<Body, int>
__attribute__((always_inline)) inline void twice(Body body) {
  body(0), body(1);
}

}  // namespace

__m512i probe(const void* data, __m512i a, __m512i b, __m256i c) {
  _tile_loadd(0, data, 64);
  _tile_loadd(1, data, 64);
  _tile_zero(2);
  _tile_dpbusd(2, 0, 1);
  twice([&](int i) __attribute__((always_inline)) { a = _mm512_dpbusd_epi32(a, b, _mm512_set1_epi32(i)); });
  return _mm512_permutex2var_epi8(a, b, _mm512_castsi256_si512(_mm256_dpbusd_avx_epi32(c, c, c)));
}

XQ_TARGET_END

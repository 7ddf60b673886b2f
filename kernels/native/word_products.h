// GEMM by words: sums of the products of pairs of 16 bits.
#pragma once

#include "internal.h"
#include "unroll.h"

namespace {

// Other weights, of which each pair of a product asks for its share, into L2: from `from` on, `step` elements a pair.
struct WordsAhead {
  const int16_t* from;
  int64_t step;
};

// sums = start + a w, for ROWS rows of `pairs` pairs that lie `lda` elements apart, and VECS vectors of output channels.
template <class V, int ROWS, int VECS>
void word_products(const int16_t* a, int64_t lda, const int16_t* w, WordsAhead ahead, int64_t pairs,
                   const int32_t* start, int32_t* sums) {
  using I = typename V::I;
  constexpr int64_t kStep = VECS * V::kLanes * 2;
  I acc[ROWS * VECS];
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { acc[i] = V::load(start + i % VECS * V::kLanes); });
  // Three rows an address register: base, base + lda, base + 2 * lda.
  constexpr int kGroups = (ROWS + 2) / 3;
  const int16_t* at[kGroups];
  unroll<kGroups>([&](int g) XQ_INLINE { at[g] = a + 3 * g * lda; });
  for (int64_t k = 0; k < pairs; ++k, w += kStep) {
    I weights[VECS];
    unroll<VECS>([&](int v) XQ_INLINE { weights[v] = V::load(w + v * V::kLanes * 2); });
    xq::prefetch_to_l2(ahead.from);
    if (ahead.step > 32) xq::prefetch_to_l2(ahead.from + 32);
    ahead.from += ahead.step;
    unroll<ROWS>([&](int r) XQ_INLINE {
      const I x = V::quad(reinterpret_cast<const uint8_t*>(at[r / 3] + r % 3 * lda + 2 * k));
      unroll<VECS>([&](int v) XQ_INLINE { acc[r * VECS + v] = V::dot16(acc[r * VECS + v], x, weights[v]); });
    });
  }
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { V::store(sums + i * V::kLanes, acc[i]); });
}

}  // namespace

// GEMM over taps (an implicit im2row) with vector dot products: a register block of kRows pixels by 1 or 2 vectors
// of output channels is kept while all taps and input channels pass.
#pragma once

#include "dense_words.h"
#include "epilogue.h"
#include "float_epilogue.h"
#include "traversal.h"

namespace {

// A dot product waits for the one before it: few rows need several sums of each to keep up with the weights.
constexpr int sums_of_few(int vectors) { return vectors <= 2 ? 4 : vectors <= 4 ? 2 : 1; }

// Loads stay on their side of it: where a compiler takes a later line first, the CPU fetches less ahead.
XQ_INLINE inline void in_order() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

// dense_tile for few rows whose weights come from beyond L2, in order: by half vectors, and asking for nothing, since
// the CPU fetches them ahead by itself.
template <class V, int ROWS, int VECS, class Out>
void stream_tile(const Tile<Out>& tile, const uint8_t* a, int64_t lda, const int64_t* offsets) {
  using Half = typename V::Half;
  using I = typename Half::I;
  constexpr int kSums = sums_of_few(ROWS * VECS), kHalves = 2 * VECS, kHalfLanes = V::kLanes / 2;
  const xq::Packed& p = *tile.task.packed;
  const xq::Run* runs = p.at<xq::Run>(p.runs);
  const int8_t* w = p.at<int8_t>(p.weights) + tile.block.w_off;
  const int32_t* corr = tile.task.corr + tile.block.s_off;
  I acc[kSums * ROWS * kHalves] = {};
  unroll<ROWS * kHalves>([&](int i) XQ_INLINE { acc[i] = Half::load(corr + i % kHalves * kHalfLanes); });
  for (int i = 0; i < p.n_runs; ++i) {
    if (offsets[i] == xq::kNoInput) {
      w += int64_t{runs[i].quads} * kHalves * kHalfLanes * 4;
      continue;
    }
    const uint8_t* from = a + offsets[i];
    const auto step = [&](int64_t quad, int sum) XQ_INLINE {
      I weights[kHalves];
      unroll<kHalves>([&](int h) XQ_INLINE { weights[h] = Half::load(w + h * kHalfLanes * 4); });
      in_order();
      w += kHalves * kHalfLanes * 4;
      unroll<ROWS>([&](int r) XQ_INLINE {
        const I x = Half::quad(from + r * lda + quad * 4);
        unroll<kHalves>([&](int h) XQ_INLINE {
          I& to = acc[(sum * ROWS + r) * kHalves + h];
          to = Half::dot(to, x, weights[h]);
        });
      });
    };
    const int quads = runs[i].quads;
    int q = 0;
    for (; q + kSums <= quads; q += kSums) unroll<kSums>([&](int sum) XQ_INLINE { step(q + sum, sum); });
    for (; q < quads; ++q) step(q, 0);
  }
  unroll<(kSums - 1) * ROWS * kHalves>([&](int i) XQ_INLINE {
    acc[i % (ROWS * kHalves)] = Half::add32(acc[i % (ROWS * kHalves)], acc[ROWS * kHalves + i]);
  });
  typename V::I whole[ROWS * VECS];
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { whole[i] = V::join(acc[2 * i], acc[2 * i + 1]); });
  put_tile<V, ROWS, VECS>(tile, whole);
}

// Rows are read `lda` apart from `a` on, in HALVES parts that lie `half` apart. `ahead` is what of the next block's
// weights is asked for meanwhile. Six arguments go in registers, which small products notice.
template <class V, int ROWS, int VECS, int HALVES = 1, class Out>
void dense_tile(const Tile<Out>& tile, const uint8_t* a, int64_t lda, const int64_t* offsets,
                [[maybe_unused]] const int8_t* ahead, [[maybe_unused]] int64_t half = 0) {
  using I = typename V::I;
  constexpr int kHalf = ROWS / HALVES, kGroups = (kHalf + 2) / 3;
  const xq::Packed& p = *tile.task.packed;
  const xq::Block& block = tile.block;
  const xq::Run* runs = p.at<xq::Run>(p.runs);
  const int8_t* w = p.at<int8_t>(p.weights) + block.w_off;
  const int32_t* corr = tile.task.corr + block.s_off;
  const int64_t index = &block - p.at<xq::Block>(p.blocks);
  [[maybe_unused]] const int32_t* order = p.at<int32_t>(p.order) + index * p.order_stride;
  [[maybe_unused]] const int64_t size = block.w_size;
  constexpr int kSums = V::kVnni ? sums_of_few(ROWS * VECS) : 1;
  // What few rows read from beyond L2, in order, the CPU fetches ahead by itself, and sooner where it is not asked to.
  [[maybe_unused]] const bool streams = p.size - p.weights > p.caches.l2 / 2;
  // No other tile of this block will ask for the other half of the next one.
  [[maybe_unused]] const bool alone = VECS * V::kLanes * 4 > 64 && tile.rows == tile.task.rows;
  if constexpr (kSums > 1 && HALVES == 1 && V::kLanes == 16)
    if (streams) return stream_tile<V, ROWS, VECS>(tile, a, lda, offsets);
  ask_for_rows<V, VECS>(tile.epilogue, tile.task, tile.block, tile.first, tile.rows);
  I acc[kSums * ROWS * VECS];
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { acc[i] = V::load(corr + i % VECS * V::kLanes); });
  unroll<(kSums - 1) * ROWS * VECS>([&](int i) XQ_INLINE { acc[ROWS * VECS + i] = V::set32(0); });
  for (int i = 0; i < p.n_runs; ++i) {
    if (offsets[i] == xq::kNoInput) {
      w += int64_t{runs[i].quads} * VECS * V::kLanes * 4;
      if constexpr (!V::kVnni) order += xq::kClasses + runs[i].quads;
      else if (kSums == 1) ahead += int64_t{runs[i].quads} * (alone ? 128 : 64);
      continue;
    }
    // Three rows an address register: base, base + lda, base + 2 * lda.
    const uint8_t* at[HALVES * kGroups];
    unroll<HALVES * kGroups>([&](int g) XQ_INLINE {
      at[g] = a + offsets[i] + g / kGroups * half + 3 * (g % kGroups) * lda;
    });
    const auto row_at = [&](int r) XQ_INLINE { return at[r / kHalf * kGroups + r % kHalf / 3] + r % kHalf % 3 * lda; };
    auto as_it_is = [](I x) XQ_INLINE { return x; };
    auto step = [&](int64_t quad, auto dot, auto reorder, int sum) XQ_INLINE {
      I weights[VECS];
      unroll<VECS>([&](int v) XQ_INLINE { weights[v] = V::load(w + v * V::kLanes * 4); });
      if constexpr (kSums == 1 && V::kVnni) {
        xq::prefetch_to_l2(ahead);
        if (alone) xq::prefetch_to_l2(ahead + 64);
        ahead += alone ? 128 : 64;
      } else if (kSums == 1 || !streams) {
        xq::prefetch(w + size);
        if constexpr (kSums > 1 && VECS * V::kLanes * 4 > 64) xq::prefetch(w + size + 64);
      }
      w += VECS * V::kLanes * 4;
      unroll<ROWS>([&](int r) XQ_INLINE {
        const I x = reorder(V::quad(row_at(r) + quad * 4));
        unroll<VECS>([&](int v) XQ_INLINE {
          I& to = acc[(sum * ROWS + r) * VECS + v];
          to = dot(to, x, weights[v]);
        });
      });
    };
    [[maybe_unused]] auto couple = [&](int64_t first, int64_t second) XQ_INLINE {
      I weights[2 * VECS];
      unroll<2 * VECS>([&](int v) XQ_INLINE { weights[v] = V::load(w + v * V::kLanes * 4); });
      xq::prefetch(w + size), xq::prefetch(w + size + VECS * V::kLanes * 4);
      w += 2 * VECS * V::kLanes * 4;
      unroll<ROWS>([&](int r) XQ_INLINE {
        const uint8_t* row = row_at(r);
        const I x = V::quad(row + first * 4), y = V::quad(row + second * 4);
        unroll<VECS>([&](int v) XQ_INLINE {
          acc[r * VECS + v] = V::dot_couple(acc[r * VECS + v], x, weights[v], y, weights[VECS + v]);
        });
      });
    };
    const int quads = runs[i].quads;
    if constexpr (V::kVnni) {
      int q = 0;
      for (; kSums > 1 && q + kSums <= quads; q += kSums)
        unroll<kSums>([&](int sum) XQ_INLINE { step(q + sum, V::dot, as_it_is, sum); });
      for (; q < quads; ++q) step(q, V::dot, as_it_is, 0);
    } else {
      const int32_t* counts = order + 1;
      const int32_t* end = order + xq::kClasses + quads;
      const int32_t* couples_end = order + xq::kClasses + 2 * *order;
      for (order += xq::kClasses; order < couples_end; order += 2) couple(order[0], order[1]);
      unroll<xq::kPairings>([&](int pairing) XQ_INLINE {
        for (const int32_t* stop = order + counts[pairing]; order < stop; ++order)
          step(*order, V::dot_safe, [&](I x) XQ_INLINE {
            return pairing == 0 ? x : V::shuffle_windows(x, V::window(xq::kPairing[pairing]));
          }, 0);
      });
      for (; order < end; ++order) step(*order, V::dot, as_it_is, 0);
    }
  }
  unroll<(kSums - 1) * ROWS * VECS>([&](int i) XQ_INLINE {
    acc[i % (ROWS * VECS)] = V::add32(acc[i % (ROWS * VECS)], acc[ROWS * VECS + i]);
  });
  if constexpr (HALVES == 1) put_tile<V, ROWS, VECS>(tile, acc);
  else put_halves<V, ROWS, VECS>(tile, acc);
}

template <class V, int VECS, class Out>
void dense_rows(const Tile<Out>& tile, const uint8_t* a, int64_t lda, const int64_t* offsets, const int8_t* ahead) {
  if constexpr (V::kRows <= 6) {
    if (tile.rows == 3) return dense_tile<V, 3, VECS>(tile, a, lda, offsets, ahead);
    if (tile.rows == 5) return dense_tile<V, 5, VECS>(tile, a, lda, offsets, ahead);
  }
  switch (tile.rows + tile.passed) {
    case 1: return dense_tile<V, 1, VECS>(tile, a, lda, offsets, ahead);
    case 2: return dense_tile<V, 2, VECS>(tile, a, lda, offsets, ahead);
    case 3: case 4: return dense_tile<V, 4, VECS>(tile, a, lda, offsets, ahead);
    case 5: case 6: return dense_tile<V, 6, VECS>(tile, a, lda, offsets, ahead);
  }
  if constexpr (V::kRows > 6) {
    if (tile.rows <= 8) return dense_tile<V, 8, VECS>(tile, a, lda, offsets, ahead);
  }
  if constexpr (V::kRows > 8) {
    if (tile.rows <= 10) return dense_tile<V, 10, VECS>(tile, a, lda, offsets, ahead);
    if (tile.rows <= 12) return dense_tile<V, 12, VECS>(tile, a, lda, offsets, ahead);
    return dense_tile<V, 14, VECS>(tile, a, lda, offsets, ahead);
  }
}

// Two rows of an image at once, `width` pixels each.
template <class V, int VECS, class Out>
void dense_row_pair(const Tile<Out>& tile, const uint8_t* a, int64_t lda, const int64_t* offsets, const int8_t* ahead,
                    int64_t half) {
  switch (tile.rows) {
    case 2: return dense_tile<V, 2, VECS, 2>(tile, a, lda, offsets, ahead, half);
    case 4: return dense_tile<V, 4, VECS, 2>(tile, a, lda, offsets, ahead, half);
    case 6: return dense_tile<V, 6, VECS, 2>(tile, a, lda, offsets, ahead, half);
    case 8: return dense_tile<V, 8, VECS, 2>(tile, a, lda, offsets, ahead, half);
    case 10: return dense_tile<V, 10, VECS, 2>(tile, a, lda, offsets, ahead, half);
    case 12: return dense_tile<V, 12, VECS, 2>(tile, a, lda, offsets, ahead, half);
    default: return dense_tile<V, 14, VECS, 2>(tile, a, lda, offsets, ahead, half);
  }
}

// ROWS rows of a block whose weights want the bytes of every 16 in another order, and some of them flipped. Runs
// come to lie one after the other.
template <class V, int ROWS>
void regroup_some(const xq::Packed& p, int64_t block, const uint8_t* a, int64_t lda, const int64_t* offsets,
                  uint8_t* to, int64_t to_lda) {
  using I = typename V::I;
  const uint8_t *from = p.at<uint8_t>(p.regroup) + block * p.regroup_stride, *flip = from + p.regroup_stride / 2;
  const xq::Run& run = *p.at<xq::Run>(p.runs);
  const int64_t bytes = run.bytes, whole = bytes / 16 * 16, step = xq::regrouped_bytes(run), kStep = 4 * V::kLanes;
  const auto at = [](const uint8_t* x) XQ_INLINE { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x)); };
  for (int i = 0; i < p.n_runs; ++i, from += step, flip += step, to += step) {
    const uint8_t* row = a + offsets[i];
    int64_t k = 0;
    for (; k + kStep <= bytes; k += kStep) {
      const I order = V::load(from + k), flips = V::load(flip + k);
      unroll<ROWS>([&](int r) XQ_INLINE {
        V::store(to + r * to_lda + k, V::exclusive_or(V::shuffle_windows(V::load(row + r * lda + k), order), flips));
      });
    }
    for (; k < bytes; k += 16) {
      // The last window is read so that it ends with the run.
      const int64_t read = k < whole ? k : bytes - 16;
      const __m128i order = at(from + k), flips = at(flip + k);
      unroll<ROWS>([&](int r) XQ_INLINE {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + r * to_lda + k),
                         _mm_xor_si128(_mm_shuffle_epi8(at(row + r * lda + read), order), flips));
      });
    }
  }
}

// Rows that regroup_some has copied for a tile.
template <class V>
struct Regrouped {
  static constexpr int64_t kMostRuns = xq::kMaxRegroup / 16;
  alignas(64) uint8_t rows[V::kRows * (xq::kMaxRegroup + 64)];
  int64_t offsets[kMostRuns], lda;

  explicit Regrouped(const xq::Packed& p) {
    const int64_t step = xq::regrouped_bytes(*p.at<xq::Run>(p.runs));
    for (int i = 0; i < p.n_runs; ++i) offsets[i] = i * step;
    lda = xq::round_up(p.n_runs * step, 64) + 64;
  }
  void fill(const xq::DenseTask& t, int64_t block, const uint8_t* a, int64_t a_lda, int64_t count) {
    uint8_t* to = rows;
    const xq::Packed& p = *t.packed;
    for (; count >= 3; count -= 3, a += 3 * a_lda, to += 3 * lda)
      regroup_some<V, 3>(p, block, a, a_lda, t.offsets, to, lda);
    for (; count > 0; --count, a += a_lda, to += lda) regroup_some<V, 1>(p, block, a, a_lda, t.offsets, to, lda);
  }
};

// What of the next block's weights the tile number `tile` of a block asks for, a line for two that it reads itself: the
// first two together ask for all of them, later ones for what has come. A tile that is alone asks for all.
inline const int8_t* next_weights(const xq::Packed& p, const xq::Block& block, int64_t tile) {
  return p.at<int8_t>(p.weights) + block.w_off + block.w_size + (tile & 1) * block.w_size / 2;
}

// Rows [m, end) of a segment and a block, all of them in the input or all in the tail.
template <class V, int VECS, class Out>
void dense_rows_of(const xq::DenseTask& t, const Out& epilogue, int b, int64_t segment, int64_t m, int64_t end,
                   int64_t first_tile = 0) {
  const xq::Packed& p = *t.packed;
  const xq::Block& block = p.at<xq::Block>(p.blocks)[b];
  const bool in_tail = m >= t.tail_begin;
  const int64_t lda = in_tail ? t.tail_lda : t.lda;
  const uint8_t* a = in_tail ? t.tail + (m - t.tail_begin) * lda : t.a + segment * t.a_segment + m * lda;
  a += block.a_off;
  // Even tiles rather than full ones and a remnant; of long ones only the last may have an odd number of rows.
  constexpr int64_t kStep = V::kRows > 6 ? 2 : 1;
  const int64_t tiles = xq::ceil_div(end - m, V::kRows), steps = xq::ceil_div(end - m, kStep);
  const int64_t fewest = steps / tiles, longer = steps % tiles;
  const auto each_tile = [&](auto run) XQ_INLINE {
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t rows = xq::min64((fewest + (i < longer)) * kStep, end - m);
      // There is a kernel for an odd number of rows only where they are few: others begin a row earlier.
      const int64_t passed = kStep == 2 && rows > 1 && rows % 2 && m > 0 && !in_tail;
      run(Tile<Out>{epilogue, t, block, segment, m, rows, passed}, a - passed * lda,
          V::kVnni ? next_weights(p, block, first_tile + i) : nullptr);
      m += rows, a += rows * lda;
    }
  };
  if constexpr (!V::kVnni) {
    if (block.regroup) {
      Regrouped<V> regrouped(p);
      return each_tile([&](const Tile<Out>& tile, const uint8_t* from, const int8_t* ahead) XQ_INLINE {
        regrouped.fill(t, b, from, lda, tile.rows + tile.passed);
        dense_rows<V, VECS>(tile, regrouped.rows, regrouped.lda, regrouped.offsets, ahead);
      });
    }
  }
  each_tile([&](const Tile<Out>& tile, const uint8_t* from, const int8_t* ahead) XQ_INLINE {
    dense_rows<V, VECS>(tile, from, lda, t.offsets, ahead);
  });
}

// Rows [y, end) of an image whose pixels are followed by some that nobody wants: tiles that do not compute those.
template <class V, int VECS, class Out>
void dense_image_rows(const xq::DenseTask& t, const Out& epilogue, int b, int64_t segment, int64_t y, int64_t end) {
  const xq::Packed& p = *t.packed;
  const xq::Block& block = p.at<xq::Block>(p.blocks)[b];
  for (int64_t tile = 0; y < end; ++tile) {
    const int64_t m = y * t.row_len, width = t.row_valid;
    if (2 * width > V::kRows || y + 1 == end) {
      dense_rows_of<V, VECS>(t, epilogue, b, segment, m, m + width, tile);
      ++y;
      continue;
    }
    const uint8_t* a = t.a + segment * t.a_segment + m * t.lda + block.a_off;
    dense_row_pair<V, VECS>(Tile<Out>{epilogue, t, block, segment, m, 2 * width}, a, t.lda, t.offsets,
                            next_weights(p, block, tile), t.row_len * t.lda);
    y += 2;
  }
}

template <class V, class Out = Epilogue<V>>
void dense(const xq::DenseTask& t) {
  const xq::Packed& p = *t.packed;
  if constexpr (!V::kVnni && Out::kBytes)
    if (p.in_words) return dense_words<V>(t);
  const Out epilogue(p);
  const xq::Block* blocks = p.at<xq::Block>(p.blocks);
  int64_t chunk = chunk_rows(t, V::kRows);
  if constexpr (V::kFitRows) {
    if (t.row_valid < t.row_len) {
      const int64_t height = xq::ceil_div(t.rows, t.row_len);
      chunk = xq::round_up(xq::ceil_div(chunk, t.row_len), 2);
      for (int64_t s = 0; s < t.segments; ++s)
        for (int64_t y = 0; y < height; y += chunk)
          for (int b = t.block_begin; b < t.block_end; ++b)
            (blocks[b].vecs == 2 ? dense_image_rows<V, 2, Out> : dense_image_rows<V, 1, Out>)(
                t, epilogue, b, s, y, xq::min64(y + chunk, height));
      return;
    }
  }
  for (int64_t s = 0; s < t.segments; ++s)
    for (int64_t first = 0; first < t.rows; first += chunk) {
      const int64_t last = xq::min64(first + chunk, t.rows), edge = xq::min64(xq::max64(first, t.tail_begin), last);
      for (int b = t.block_begin; b < t.block_end; ++b) {
        const auto run = blocks[b].vecs == 2 ? dense_rows_of<V, 2, Out> : dense_rows_of<V, 1, Out>;
        if (first < edge) run(t, epilogue, b, s, first, edge, 0);
        if (edge < last) run(t, epilogue, b, s, edge, last, 0);
      }
    }
}

}  // namespace

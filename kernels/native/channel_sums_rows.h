// Sums over positions, of several vectors of channels at a time.
#pragma once

#include "channel_sums.h"
#include "float_lanes.h"

namespace {

// So many squares of codes, and as many codes, sum up exactly in a float32.
constexpr int64_t kExact = (int64_t{1} << 24) / (255 * 255) - 1;

// Adds the first `count` lanes.
inline void add_lanes(Lanes::F from, int64_t count, int64_t* to) {
  float lanes[Lanes::kLanes];
  Lanes::store(lanes, from);
  for (int64_t i = 0; i < count; ++i) to[i] += static_cast<int64_t>(lanes[i]);
}

// `pixels`, at most kExact, of VECTORS vectors of channels.
template <int VECTORS>
inline void sum_pixels(const uint8_t* a, int64_t step, int64_t pixels, int64_t* sums, int64_t* squares) {
  Lanes::F s[VECTORS], q[VECTORS];
  for (int v = 0; v < VECTORS; ++v) s[v] = q[v] = Lanes::set(0);
  for (int64_t x = 0; x < pixels; ++x, a += step)
    for (int v = 0; v < VECTORS; ++v) {
      const Lanes::F codes = Lanes::codes<8>(a + v * Lanes::kLanes);
      s[v] = Lanes::add(s[v], codes), q[v] = Lanes::fma(codes, codes, q[v]);
    }
  for (int v = 0; v < VECTORS; ++v) {
    add_lanes(s[v], Lanes::kLanes, sums + v * Lanes::kLanes);
    add_lanes(q[v], Lanes::kLanes, squares + v * Lanes::kLanes);
  }
}

// Fewer channels than a vector has lanes: no byte behind them is read.
inline void sum_rest(const uint8_t* a, int64_t step, int64_t pixels, int64_t count, int64_t* sums, int64_t* squares) {
  for (int64_t c = 0; c < count; ++c) {
    int64_t s = 0, q = 0;
    for (int64_t x = 0; x < pixels; ++x) {
      const int64_t code = a[x * step + c];
      s += code, q += code * code;
    }
    sums[c] += s, squares[c] += q;
  }
}

void channel_sums(const xq_channel_sums& op, int64_t begin, int64_t end) {
  constexpr int64_t kMany = 4 * Lanes::kLanes;
  const xq_tensor& t = op.a;
  for (int64_t row = begin; row < end; ++row) {
    const uint8_t* pixels = t.data + row / t.h * t.stride_d + row % t.h * t.stride_h;
    for (int64_t x = 0; x < t.w; x += kExact) {
      const uint8_t* a = pixels + x * t.stride_w;
      const int64_t here = t.w - x < kExact ? t.w - x : kExact;
      int64_t c = 0;
      for (; c + kMany <= t.c; c += kMany) sum_pixels<4>(a + c, t.stride_w, here, op.sums + c, op.squares + c);
      for (; c + Lanes::kLanes <= t.c; c += Lanes::kLanes) sum_pixels<1>(a + c, t.stride_w, here, op.sums + c, op.squares + c);
      if (c < t.c) sum_rest(a + c, t.stride_w, here, t.c - c, op.sums + c, op.squares + c);
    }
  }
}

}  // namespace

// For kernels that only take and give whole tensors: strided ones gathered, results put in place.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "conv_kernel.h"
#include "errors.h"
#include "memory.h"
#include "parallel.h"
#include "scratch.h"

namespace x86quant::runtime {

inline int64_t lines(const xq_tensor& t) { return t.n * t.d * t.h; }
inline int64_t size(const xq_tensor& t) { return lines(t) * t.w * t.c; }

inline bool dense(const xq_tensor& t) {
  const int64_t line = t.w * t.c;
  return (t.w == 1 || t.stride_w == t.c) && (t.h == 1 || t.stride_h == line) &&
         (t.d == 1 || t.stride_d == t.h * line) && (t.n == 1 || t.stride_n == t.d * t.h * line);
}

inline uint8_t* line_of(const xq_tensor& t, int64_t i) {
  return t.data + i / (t.d * t.h) * t.stride_n + i / t.h % t.d * t.stride_d + i % t.h * t.stride_h;
}

inline void gather(const xq_tensor& from, uint8_t* to, int threads) {
  const int64_t line = from.w * from.c;
  split(lines(from), threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t x = 0; x < from.w; ++x)
        std::memcpy(to + i * line + x * from.c, line_of(from, i) + x * from.stride_w,
                    static_cast<size_t>(from.c));
  });
}

// What remains to be done to codes already requantized and kept in 0..255: clamp, then table.
class Finish {
 public:
  explicit Finish(const xq_requant& r) : low_(clipped(r.lo)), high_(clipped(r.hi)) {
    if (!r.lut) return;
    table_.emplace();
    for (int code = 0; code < 256; ++code)
      (*table_)[code] = r.lut[std::clamp<int>(code, low_, high_)];
  }

  bool needed() const { return table_ || low_ > 0 || high_ < 255; }

  // From dense memory, which may be that of `to`.
  void run(const uint8_t* from, const xq_tensor& to, int threads) const {
    split(lines(to), threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        for (int64_t x = 0; x < to.w; ++x)
          pixel(from + (i * to.w + x) * to.c, line_of(to, i) + x * to.stride_w, to.c);
    });
  }

 private:
  static uint8_t clipped(int32_t code) { return static_cast<uint8_t>(std::clamp(code, 0, 255)); }

  void pixel(const uint8_t* from, uint8_t* to, int64_t channels) const {
    if (table_) {
      for (int64_t c = 0; c < channels; ++c) to[c] = (*table_)[from[c]];
    } else {
      for (int64_t c = 0; c < channels; ++c) to[c] = std::min(std::max(from[c], low_), high_);
    }
  }

  uint8_t low_, high_;
  std::optional<std::array<uint8_t, 256>> table_;
};

// Throws unless the output is one this convolution (not transposed) can compute from the input.
inline void check_conv_shapes(const char* kernel, const xq_conv& conv, const ConvCall& call) {
  const xq_tensor &in = call.in, &out = call.out;
  bool fits = in.c == conv.in_channels && out.c == conv.out_channels && in.n == out.n;
  const std::array<std::array<int64_t, 2>, 3> sizes{{{in.d, out.d}, {in.h, out.h}, {in.w, out.w}}};
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t reach = int64_t{conv.dilation[axis]} * (conv.kernel[axis] - 1) + 1;
    const int64_t room = sizes[axis][0] + 2 * conv.padding[axis] - reach;
    fits = fits && room >= 0 && sizes[axis][1] == room / conv.stride[axis] + 1;
  }
  require(fits, kernel, ": the tensors do not fit the convolution");
  require(call.residual.data == nullptr, kernel, " adds no residual");
}

}  // namespace x86quant::runtime

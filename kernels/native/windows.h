// Convolutions whose taps lie far apart: some meet nothing but padding for many outputs. Rectangles of outputs that the same
// taps meet are multiplied with the weights of those alone.
#pragma once

#include <initializer_list>

#include "internal.h"

namespace xq {

// Outputs [first, last) of an axis, which all have taps that meet the input in common; the others do for none of them.
struct OutputRange {
  int64_t first, last;
  int64_t count() const { return last - first; }
};

// An axis of a convolution without zero points between its pixels.
struct Meeting {
  int64_t taps, stride, dilation, pad, outputs, size;

  Meeting(const Geometry& g, int i, int64_t out, int64_t in)
      : taps(g.kernel[i]), stride(g.stride[i]), dilation(g.dilation[i]), pad(g.pad[i]), outputs(out), size(in) {}

  int64_t read(int64_t output, int64_t tap) const { return output * stride + tap * dilation - pad; }
  bool meets(int64_t output, int64_t tap) const { return read(output, tap) >= 0 && read(output, tap) < size; }
  int64_t met(int64_t output) const {
    int64_t count = 0;
    for (int64_t tap = 0; tap < taps; ++tap) count += meets(output, tap);
    return count;
  }
  // The first output that reads what is `at` or behind it.
  int64_t first_from(int64_t at, int64_t tap) const {
    return at > read(0, tap) ? ceil_div(at - read(0, tap), stride) : 0;
  }
  template <class F>
  void each(const F& f) const {
    for (OutputRange some{0, 0}; some.first < outputs; some.first = some.last) {
      some.last = outputs;
      for (int64_t tap = 0; tap < taps; ++tap)
        for (const int64_t edge : {first_from(0, tap), first_from(size, tap)})
          if (edge > some.first) some.last = min64(some.last, edge);
      f(some);
    }
  }
};

// The rectangles of a call.
struct Windows {
  Meeting rows, columns;
  int64_t slices;

  Windows(const Geometry& g, const xq_tensor& in, const xq_tensor& out)
      : rows(g, 1, out.h, in.h), columns(g, 2, out.w, in.w), slices(g.kernel[0]) {}

  int64_t taps(const OutputRange& y, const OutputRange& x) const { return slices * rows.met(y.first) * columns.met(x.first); }

  template <class F>
  void each(const F& f) const {
    rows.each([&](const OutputRange& y) { columns.each([&](const OutputRange& x) { f(y, x); }); });
  }

  // Whether what they multiply is clearly less than all that there is. One of few pixels takes as long as a tile.
  bool worth_it() const {
    constexpr int64_t kTile = 14, kPercent = 85;
    int64_t some = 0;
    each([&](const OutputRange& y, const OutputRange& x) { some += taps(y, x) * max64(y.count() * x.count(), kTile); });
    return some * 100 <= slices * rows.taps * columns.taps * max64(rows.outputs * columns.outputs, kTile) * kPercent;
  }
};

}  // namespace xq

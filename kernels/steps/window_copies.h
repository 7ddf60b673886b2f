// The windows of a convolution, one behind the other: the channels under each tap, tap after tap.
#pragma once

#include <algorithm>
#include <cstring>

#include "../runtime/step.h"

namespace x86quant::runtime {

constexpr int kWindowDims = 3;  // depth, height, width

// The sizes of a window and how it moves, which a step reads from its fields.
struct Window {
  int32_t kernel[kWindowDims]{}, stride[kWindowDims]{}, padding[kWindowDims]{}, dilation[kWindowDims]{};
  int64_t sizes[kWindowDims]{};  // of the result
  int64_t taps = 1;

  Window() = default;
  Window(StepFields& fields, const xq_tensor& a) {
    fields.triple("kernel", kernel);
    fields.triple("stride", stride);
    fields.triple("padding", padding);
    fields.triple("dilation", dilation);
    const int64_t from[] = {a.d, a.h, a.w};
    for (int i = 0; i < kWindowDims; ++i) {
      if (kernel[i] < 1 || stride[i] < 1 || dilation[i] < 1 || padding[i] < 0) fields.refuse("kernel", "is no window");
      const int64_t room = from[i] + 2 * int64_t{padding[i]} - int64_t{dilation[i]} * (kernel[i] - 1) - 1;
      if (room < 0) fields.refuse("kernel", "is wider than what it looks at");
      sizes[i] = room / stride[i] + 1;
      if (__builtin_mul_overflow(taps, kernel[i], &taps)) fields.refuse("kernel", "is an impossible window");
    }
  }

  // The first pixel of a line whose window begins in the image, and the first one behind whose window ends outside.
  int64_t inside_begin() const { return std::min<int64_t>((padding[2] + stride[2] - 1) / stride[2], sizes[2]); }
  int64_t inside_end(int64_t width) const {
    const int64_t room = width - 1 - int64_t{dilation[2]} * (kernel[2] - 1) + padding[2];
    return room < 0 ? 0 : std::min(room / stride[2] + 1, sizes[2]);
  }

  // Whether each window is one pixel, which moves by one.
  bool is_one_pixel() const {
    for (int i = 0; i < kWindowDims; ++i)
      if (kernel[i] != 1 || stride[i] != 1 || padding[i] != 0) return false;
    return true;
  }
};

// Whether the pixels of `a` lie one behind the other, each `pixel` bytes from the one before.
inline bool pixels_follow(const xq_tensor& a, int64_t pixel) {
  const auto follow = [](int64_t count, int64_t stride, int64_t size) { return count == 1 || stride == size; };
  return follow(a.w, a.stride_w, pixel) && follow(a.h, a.stride_h, a.w * pixel) &&
         follow(a.d, a.stride_d, a.h * a.w * pixel) && follow(a.n, a.stride_n, a.d * a.h * a.w * pixel);
}

// `count` copies of `size` bytes each, which are few: a call of memcpy takes longer. The last N overlap those before.
template <size_t N>
void copy_by(const uint8_t* from, int64_t step, uint8_t* to, int64_t stride, int64_t count, int64_t size) {
  const int64_t last = size - static_cast<int64_t>(N);
  for (; count > 0; --count, from += step, to += stride) {
    for (int64_t i = 0; i < last; i += N) std::memcpy(to + i, from + i, N);
    std::memcpy(to + last, from + last, N);
  }
}

inline void copy_lines(const uint8_t* from, int64_t step, uint8_t* to, int64_t stride, int64_t count, int64_t size) {
  if (size >= 64) copy_by<64>(from, step, to, stride, count, size);
  else if (size >= 16) copy_by<16>(from, step, to, stride, count, size);
  else if (size >= 8) copy_by<8>(from, step, to, stride, count, size);
  else if (size >= 4) copy_by<4>(from, step, to, stride, count, size);
  else if (size >= 2) copy_by<2>(from, step, to, stride, count, size);
  else copy_by<1>(from, step, to, stride, count, size);
}

// Copies windows of pixels of so many bytes; what lies outside of the image is bytes of `fill`.
class WindowCopies {
 public:
  WindowCopies() = default;
  WindowCopies(const Window& of, int64_t pixel, int fill) : of_(of), pixel_(pixel), fill_(fill) {}

  int64_t width() const { return of_.taps * pixel_; }

  void copy(const xq_tensor& a, int64_t first, int64_t count, uint8_t* to) const {
    int64_t at[kWindowDims], n = first;
    for (int i = kWindowDims; i-- > 0; n /= of_.sizes[i]) at[i] = n % of_.sizes[i];
    for (int64_t run; count > 0; count -= run, to += run * width()) {
      run = std::min(count, of_.sizes[2] - at[2]);
      copy_run(a, a.data + n * a.stride_n, at, run, to);
      at[2] = 0;
      if (++at[1] < of_.sizes[1]) continue;
      at[1] = 0;
      if (++at[0] < of_.sizes[0]) continue;
      at[0] = 0, ++n;
    }
  }

 private:
  // Windows that follow one another in a row of the result: one line of all of them, then the next.
  void copy_run(const xq_tensor& a, const uint8_t* image, const int64_t (&at)[kWindowDims], int64_t run, uint8_t* to) const {
    const int64_t line = of_.kernel[2] * pixel_, apart = width(), step = of_.stride[2];
    const int64_t before = of_.padding[2] - at[2] * step;  // of the first line, outside of the image
    // Those whose lines lie in the image, as they are.
    const bool joined = of_.dilation[2] == 1 && a.stride_w == pixel_;
    const int64_t begin = joined ? std::clamp<int64_t>(of_.inside_begin() - at[2], 0, run) : run;
    const int64_t end = std::clamp<int64_t>(of_.inside_end(a.w) - at[2], begin, run);
    for (int64_t i = 0; i < of_.kernel[0]; ++i)
      for (int64_t j = 0; j < of_.kernel[1]; ++j, to += line) {
        const int64_t z = at[0] * of_.stride[0] - of_.padding[0] + i * of_.dilation[0];
        const int64_t y = at[1] * of_.stride[1] - of_.padding[1] + j * of_.dilation[1];
        if (z < 0 || z >= a.d || y < 0 || y >= a.h) {
          for (int64_t w = 0; w < run; ++w) std::memset(to + w * apart, fill_, static_cast<size_t>(line));
          continue;
        }
        const uint8_t* from = image + z * a.stride_d + y * a.stride_h;
        for (int64_t w = 0; w < begin; ++w) copy_taps(a, from, w * step - before, to + w * apart);
        if (end > begin) copy_lines(from + (begin * step - before) * pixel_, step * pixel_, to + begin * apart, apart, end - begin, line);
        for (int64_t w = end; w < run; ++w) copy_taps(a, from, w * step - before, to + w * apart);
      }
  }

  void copy_taps(const xq_tensor& a, const uint8_t* from, int64_t x, uint8_t* to) const {
    for (int64_t k = 0; k < of_.kernel[2]; ++k, to += pixel_, x += of_.dilation[2])
      if (x < 0 || x >= a.w) std::memset(to, fill_, static_cast<size_t>(pixel_));
      else copy_lines(from + x * a.stride_w, 0, to, 0, 1, pixel_);
  }

  Window of_;
  int64_t pixel_ = 0;
  int fill_ = 0;
};

}  // namespace x86quant::runtime

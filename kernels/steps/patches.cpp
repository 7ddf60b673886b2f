// The codes under each window, tap after tap, as the channels of one pixel: what a convolution multiplies by rows.
#include <cstring>

#include "../runtime/parallel.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

constexpr int kDims = 3;  // depth, height, width

class PatchesStep final : public Step {
 public:
  explicit PatchesStep(StepFields& fields) : a_(fields.tensor(Access::kRead, "a")), out_(fields.tensor(Access::kWrite, "out")) {
    fields.triple("kernel", kernel_);
    fields.triple("stride", stride_);
    fields.triple("padding", padding_);
    fields.triple("dilation", dilation_);
    a_zp_ = static_cast<uint8_t>(fields.small("a_zp"));
    const xq_tensor &a = a_.view, &out = out_.view;
    const int64_t from[] = {a.d, a.h, a.w}, to[] = {out.d, out.h, out.w};
    int64_t taps = 1;
    for (int i = 0; i < kDims; ++i) {
      if (kernel_[i] < 1 || stride_[i] < 1 || dilation_[i] < 1 || padding_[i] < 0) fields.refuse("kernel", "is no window");
      const int64_t room = from[i] + 2 * int64_t{padding_[i]} - int64_t{dilation_[i]} * (kernel_[i] - 1) - 1;
      if (to[i] > 0 && (room < 0 || to[i] != room / stride_[i] + 1)) fields.refuse("out", "has other sizes than its windows give");
      taps *= std::min<int64_t>(kernel_[i], out.c + 1);  // more are refused, whatever their product
      if (taps > out.c) break;
    }
    if (a.c < 1 || out.n != a.n || out.c != taps * a.c) fields.refuse("out", "does not hold a window of channels");
    nanoseconds_ = static_cast<double>(out.n * out.d * out.h * out.w) * static_cast<double>(out.c) / kBytesANanosecond;
  }

  void run(const Bases& bases) const override {
    const xq_tensor a = a_.at(bases), out = out_.at(bases);
    split(out.n * out.d * out.h, threads_for(nanoseconds_), [&](int64_t begin, int64_t end) {
      for (int64_t line = begin; line < end; ++line) {
        const int64_t y = line % out.h, z = line / out.h % out.d, n = line / out.h / out.d;
        for (int64_t x = 0; x < out.w; ++x) {
          const int64_t at[] = {z, y, x};
          copy_window(a, a.data + n * a.stride_n, at,
                      out.data + n * out.stride_n + z * out.stride_d + y * out.stride_h + x * out.stride_w);
        }
      }
    });
  }

  StepThreads threads() const override { return shared_if(shares_of(nanoseconds_, kTogether) > 1); }

 private:
  static constexpr double kBytesANanosecond = 10;  // roughly: of pixels of some dozens of channels

  void copy_window(const xq_tensor& a, const uint8_t* image, const int64_t (&at)[kDims], uint8_t* to) const {
    for (int64_t i = 0; i < kernel_[0]; ++i) {
      const int64_t z = place(at, 0, i);
      for (int64_t j = 0; j < kernel_[1]; ++j) {
        const int64_t y = place(at, 1, j);
        const bool outside = z < 0 || z >= a.d || y < 0 || y >= a.h;
        for (int64_t k = 0; k < kernel_[2]; ++k, to += a.c) {
          const int64_t x = place(at, 2, k);
          if (outside || x < 0 || x >= a.w) {
            std::memset(to, a_zp_, static_cast<size_t>(a.c));
          } else {
            std::memcpy(to, image + z * a.stride_d + y * a.stride_h + x * a.stride_w, static_cast<size_t>(a.c));
          }
        }
      }
    }
  }

  int64_t place(const int64_t (&at)[kDims], int dim, int64_t tap) const {
    return at[dim] * stride_[dim] - padding_[dim] + tap * dilation_[dim];
  }

  Place a_, out_;
  int32_t kernel_[kDims]{}, stride_[kDims]{}, padding_[kDims]{}, dilation_[kDims]{};
  uint8_t a_zp_ = 0;
  double nanoseconds_ = 0;  // on one thread
};

const RegisterStep patches("patches", [](StepFields& fields) -> StepPtr { return std::make_unique<PatchesStep>(fields); });

}  // namespace
}  // namespace x86quant::runtime

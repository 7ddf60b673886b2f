// Images of codes with margins: of one code, of the nearest pixel, or mirrored at the last one. Those of one code may be
// below zero, and cut off what is there.
#include <algorithm>
#include <cstring>

#include "../runtime/parallel.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

constexpr int kDims = 3;  // depth, height, width
constexpr int64_t kOutside = -1;

enum Mode { kConstant = 0, kReplicate = 1, kReflect = 2 };

class PadStep final : public Step {
 public:
  explicit PadStep(StepFields& fields) : a_(fields.tensor(Access::kRead, "a")), out_(fields.tensor(Access::kWrite, "out")) {
    fields.triple("before", before_);
    const int64_t mode = fields.integer("mode");
    code_ = static_cast<uint8_t>(fields.zero_point("a_zp"));
    if (mode < kConstant || mode > kReflect) fields.refuse("mode", "is no way to pad");
    const xq_tensor &a = a_.view, &out = out_.view;
    if (a.n != out.n || a.c != out.c || a.c < 1) fields.refuse("out", "has other images or channels");
    const int64_t from[] = {a.d, a.h, a.w}, to[] = {out.d, out.h, out.w};
    for (int i = 0; i < kDims; ++i) {
      const int64_t behind = to[i] - from[i] - before_[i];
      const int64_t most = mode == kConstant ? to[i] : mode == kReplicate ? (from[i] > 0 ? to[i] : 0) : from[i] - 1;
      if (mode != kConstant && (before_[i] < 0 || behind < 0)) fields.refuse("before", "is no margin of these sizes");
      if (before_[i] + behind > 0 && std::max<int64_t>(before_[i], behind) > most)
        fields.refuse("before", "is a wider margin than can be filled");
      sizes_[i] = from[i];
    }
    mode_ = static_cast<Mode>(mode);
    nanoseconds_ = static_cast<double>(out.n * out.d * out.h * out.w) * static_cast<double>(out.c) / kBytesANanosecond;
  }

  void run(const Bases& bases) const override {
    const xq_tensor a = a_.at(bases), out = out_.at(bases);
    split(out.n * out.d * out.h, threads_for(nanoseconds_), [&](int64_t begin, int64_t end) {
      for (int64_t line = begin; line < end; ++line) {
        const int64_t y = line % out.h, z = line / out.h % out.d, n = line / out.h / out.d;
        const int64_t from_y = place(1, y), from_z = place(0, z);
        const bool outside = from_y == kOutside || from_z == kOutside;
        const uint8_t* from = outside ? nullptr : a.data + n * a.stride_n + from_z * a.stride_d + from_y * a.stride_h;
        copy_line(from, a, out.data + n * out.stride_n + z * out.stride_d + y * out.stride_h, out);
      }
    });
  }

  StepThreads threads() const override { return shared_if(shares_of(nanoseconds_, kTogether) > 1); }

 private:
  static constexpr double kBytesANanosecond = 10;  // roughly: of pixels of some dozens of channels

  // Where in the input the result's place `at` along a dimension is from.
  int64_t place(int dim, int64_t at) const {
    const int64_t size = sizes_[dim];
    at -= before_[dim];
    if (at >= 0 && at < size) return at;
    if (mode_ == kConstant) return kOutside;
    if (mode_ == kReplicate) return at < 0 ? 0 : size - 1;
    return at < 0 ? -at : 2 * (size - 1) - at;
  }

  // A line of pixels, of which runs that lie side by side in both are copied together; none where there is no `from`.
  void copy_line(const uint8_t* from, const xq_tensor& a, uint8_t* to, const xq_tensor& out) const {
    const bool adjacent = a.stride_w == a.c && out.stride_w == out.c;
    for (int64_t x = 0; x < out.w;) {
      const int64_t first = from == nullptr ? kOutside : place(2, x);
      int64_t pixels = 1;
      while (adjacent && x + pixels < out.w && follows(first, pixels, x, from == nullptr)) ++pixels;
      uint8_t* here = to + x * out.stride_w;
      if (first == kOutside) {
        std::memset(here, code_, static_cast<size_t>(pixels * out.c));
      } else {
        std::memcpy(here, from + first * a.stride_w, static_cast<size_t>(pixels * out.c));
      }
      x += pixels;
    }
  }

  bool follows(int64_t first, int64_t pixels, int64_t x, bool outside) const {
    if (first == kOutside) return outside || place(2, x + pixels) == kOutside;
    return place(2, x + pixels) == first + pixels;
  }

  Place a_, out_;
  int64_t sizes_[kDims];  // of the input: depth, height, width
  int32_t before_[kDims];
  Mode mode_ = kConstant;
  uint8_t code_ = 0;
  double nanoseconds_ = 0;  // on one thread
};

const RegisterStep pad("pad", [](StepFields& fields) -> StepPtr { return std::make_unique<PadStep>(fields); });

}  // namespace
}  // namespace x86quant::runtime

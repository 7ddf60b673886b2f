// Convolutions of floats, for layers that are kept in float beside int8 ones: their sums, functions of these, and codes
// of the results where the next layer reads codes. Blocks of results go through all of it while they are in cache.
#include <algorithm>
#include <vector>

#include "../native/float_products.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"
#include "row_rounding.h"
#include "window_copies.h"

namespace x86quant::runtime {
namespace {

constexpr int64_t kFloat = sizeof(float);
// Windows and results of a block, about so many bytes; rows are multiplied twelve at a time.
constexpr int64_t kBlockBytes = 128 << 10, kLeastRows = 12;
// Windows of so many pixels of a line are worth multiplying where they lie, if each takes so many steps of XQ_PANEL sums.
constexpr int64_t kLeastPixels = 24, kLeastSteps = 20;
// Of one thread, roughly: products, and bytes that are read, written or copied.
constexpr double kProductsANanosecond = 25, kBytesANanosecond = 10;
constexpr size_t kMostFunctions = 64;

class FloatConvStep final : public Step {
 public:
  explicit FloatConvStep(StepFields& fields)
      : a_(fields.reals(Access::kRead, "a", kFloat)), window_(fields, a_.view), depthwise_(fields.flag("depthwise")),
        to_codes_(fields.has("out_mult")),
        out_(to_codes_ ? fields.tensor(Access::kWrite, "out") : fields.reals(Access::kWrite, "out", kFloat)) {
    const xq_tensor &a = a_.view, &out = out_.view;
    if (a.c < 1 || out.c < 1) fields.refuse("a", "has no channels");
    if (out.n != a.n || out.d != window_.sizes[0] || out.h != window_.sizes[1] || out.w != window_.sizes[2])
      fields.refuse("out", "has other sizes than there are windows");
    const int64_t pixel = to_codes_ ? 1 : kFloat;
    out_stride_ = out.w > 1 ? out.stride_w : out.h > 1 ? out.stride_h : out.d > 1 ? out.stride_d : out.n > 1 ? out.stride_n : out.c * pixel;
    if (!pixels_follow(out, out_stride_)) fields.refuse("out", "has pixels that do not follow one another");
    if (depthwise_ && out.c != a.c) fields.refuse("out", "has other channels than its input");
    int64_t features = 0, weights = 0;
    const int64_t panels = (out.c + XQ_PANEL - 1) / XQ_PANEL * XQ_PANEL;
    if (__builtin_mul_overflow(window_.taps, a.c, &features) || features > INT64_MAX / 64 ||
        __builtin_mul_overflow(depthwise_ ? window_.taps : features, depthwise_ ? a.c : panels, &weights))
      fields.refuse("kernel", "is an impossible window");
    features_ = features;
    weight_ = fields.table("weight", Type::kFloat, weights);
    bias_ = fields.table("bias", Type::kFloat, depthwise_ ? out.c : panels);
    copies_ = WindowCopies(window_, a.c * kFloat, 0);
    rows_ = out.n * out.d * out.h * out.w;
    as_they_are_ = window_.is_one_pixel() && pixels_follow(a, a.stride_w) && a.stride_w % kFloat == 0;
    where_they_lie_ = !as_they_are_ && !depthwise_ && window_.dilation[2] == 1 && a.stride_w == a.c * kFloat &&
                      window_.inside_end(a.w) - window_.inside_begin() >= kLeastPixels &&
                      window_.kernel[2] * a.c * ((out.c + XQ_PANEL - 1) / XQ_PANEL) >= kLeastSteps;
    read_functions(fields);
    if (to_codes_) rounding_ = RowRounding(fields, "out_mult", fields.zero_point("out_zp"), out.c);
    const int64_t bytes = kFloat * ((as_they_are_ || depthwise_ ? 0 : features_) + out.c);
    block_ = std::min(std::max(kBlockBytes / bytes / kLeastRows, int64_t{1}) * kLeastRows, std::max<int64_t>(rows_, 1));
    const auto of_a_row = static_cast<double>(depthwise_ ? window_.taps : features_) * static_cast<double>(out.c);
    nanoseconds_ = static_cast<double>(rows_) * (of_a_row / kProductsANanosecond + static_cast<double>(bytes) / kBytesANanosecond);
  }

  void run(const Bases& bases) const override {
    if (rows_ == 0) return;
    const xq_tensor a = a_.at(bases);
    uint8_t* out = out_.at(bases).data;
    const bool by_lines = depthwise_ || where_they_lie_;
    split(by_lines ? rows_ / window_.sizes[2] : (rows_ + block_ - 1) / block_, useful_threads(shares()), [&](int64_t begin, int64_t end) {
      if (depthwise_) depthwise_lines(a, out, begin, end);
      else if (where_they_lie_) lines(a, out, begin, end);
      else blocks(a, out, begin, end);
    });
  }

  StepThreads threads() const override { return shared_if(shares() > 1); }

 private:
  int64_t shares() const { return shares_of(nanoseconds_, kTogether); }

  void read_functions(StepFields& fields) {
    if (!fields.has("functions")) return;
    const Words kinds = fields.integers("functions");
    if (kinds.size() > kMostFunctions) fields.refuse("functions", "are too many");
    const Table numbers = fields.table("numbers", Type::kFloat, static_cast<int64_t>(kinds.size()));
    for (size_t i = 0; i < kinds.size(); ++i) {
      if (kinds[i] < 0 || kinds[i] >= XQ_FLOAT_KINDS) fields.refuse("functions", "has one that is none");
      functions_.push_back({static_cast<int32_t>(kinds[i]), numbers.as<float>()[i]});
    }
  }

  // Blocks of windows, times all weights.
  void blocks(const xq_tensor& a, uint8_t* out, int64_t begin, int64_t end) const {
    const Scratch windows(static_cast<size_t>(as_they_are_ ? 0 : block_ * features_ * kFloat));
    const Scratch sums(static_cast<size_t>(results(block_)));
    xq_float_product op = product();
    for (int64_t first = begin * block_; first < std::min(end * block_, rows_); first += block_) {
      const int64_t rows = std::min(block_, rows_ - first);
      if (as_they_are_) {
        op.in_stride = a.stride_w / kFloat, op.in = reinterpret_cast<const float*>(a.data) + first * op.in_stride;
      } else {
        copies_.copy(a, first, rows, windows.data());
        op.in_stride = features_, op.in = reinterpret_cast<const float*>(windows.data());
      }
      finish(sums, out + first * out_stride_, rows, [&](float* to, int64_t stride) {
        op.out = to, op.out_stride = stride;
        xq_float_product_run(&op, 0, rows);
      });
    }
  }

  xq_float_product product() const {
    xq_float_product op{};
    op.weight = weight_.as<float>(), op.bias = bias_.as<float>(), op.out_features = out_.view.c;
    op.features = op.panel = features_, op.isa = native_isa();
    return op;
  }

  // Lines of the result: a line of windows after the other is multiplied where it lies, but for the borders.
  void lines(const xq_tensor& a, uint8_t* out, int64_t begin, int64_t end) const {
    const int64_t width = window_.sizes[2], first = window_.inside_begin(), last = window_.inside_end(a.w);
    const int64_t line_features = window_.kernel[2] * a.c;
    const Scratch sums(static_cast<size_t>(results(width)));
    const Scratch border(static_cast<size_t>(std::max(first, width - last) * features_ * kFloat));
    xq_float_product op = product();
    for (int64_t line = begin; line < end; ++line) {
      const int64_t y = line % window_.sizes[1], z = line / window_.sizes[1] % window_.sizes[0];
      const uint8_t* image = a.data + line / window_.sizes[1] / window_.sizes[0] * a.stride_n;
      finish(sums, out + line * width * out_stride_, width, [&](float* to, int64_t stride) {
        const auto copied = [&](int64_t from, int64_t count) {
          if (count == 0) return;
          copies_.copy(a, line * width + from, count, border.data());
          op.in = reinterpret_cast<const float*>(border.data()), op.in_stride = op.features = features_;
          op.skipped = 0, op.onto = 0, op.out = to + from * stride, op.out_stride = stride;
          xq_float_product_run(&op, 0, count);
        };
        copied(0, first);
        copied(last, width - last);
        op.in_stride = window_.stride[2] * a.c, op.features = line_features;
        op.out = to + first * stride, op.out_stride = stride, op.onto = 0;
        for (int64_t i = 0; i < window_.kernel[0]; ++i)
          for (int64_t j = 0; j < window_.kernel[1]; ++j) {
            const int64_t at_z = z * window_.stride[0] - window_.padding[0] + i * window_.dilation[0];
            const int64_t at_y = y * window_.stride[1] - window_.padding[1] + j * window_.dilation[1];
            if (at_z < 0 || at_z >= a.d || at_y < 0 || at_y >= a.h) continue;
            const auto* from = reinterpret_cast<const float*>(image + at_z * a.stride_d + at_y * a.stride_h);
            op.in = from + (first * window_.stride[2] - window_.padding[2]) * a.c;
            op.skipped = (i * window_.kernel[1] + j) * line_features;
            xq_float_product_run(&op, 0, last - first);
            op.onto = 1;
          }
        if (!op.onto)  // which looks at padding alone
          for (int64_t x = first; x < last; ++x) std::copy_n(op.bias, out_.view.c, to + x * stride);
      });
    }
  }

  // Depthwise: lines of the result, in which pixels that meet the same taps are computed together.
  void depthwise_lines(const xq_tensor& a, uint8_t* out, int64_t begin, int64_t end) const {
    const int64_t width = window_.sizes[2];
    const Scratch sums(static_cast<size_t>(results(width)));
    std::vector<int64_t> offsets(static_cast<size_t>(window_.taps));
    std::vector<int32_t> which(static_cast<size_t>(window_.taps));
    xq_float_taps op{};
    op.weight = weight_.as<float>(), op.bias = bias_.as<float>(), op.channels = a.c, op.isa = native_isa();
    op.in_stride = window_.stride[2] * a.stride_w / kFloat, op.offsets = offsets.data(), op.which = which.data();
    for (int64_t line = begin; line < end; ++line) {
      const int64_t y = line % window_.sizes[1], z = line / window_.sizes[1] % window_.sizes[0];
      const int64_t n = line / window_.sizes[1] / window_.sizes[0];
      finish(sums, out + line * width * out_stride_, width, [&](float* to, int64_t stride) {
        op.out_stride = stride;
        for (int64_t x = 0, next; x < width; x = next) {
          next = alike(x, a.w);
          const int64_t at[] = {z, y, x};
          op.taps = taps_at(a, at, offsets.data(), which.data());
          op.across = next - x > 1 && window_.stride[2] == window_.dilation[2] ? window_.kernel[2] : 1;
          op.in = reinterpret_cast<const float*>(a.data + n * a.stride_n);
          op.out = to + x * stride;
          xq_float_taps_run(&op, 0, next - x);
        }
      });
    }
  }

  // The first pixel of a line behind `x` that meets other taps, or may.
  int64_t alike(int64_t x, int64_t width) const {
    const int64_t end = window_.inside_end(width);
    return x >= window_.inside_begin() && x < end ? end : x + 1;
  }

  // The taps that a pixel meets: where each lies from the image's start.
  int64_t taps_at(const xq_tensor& a, const int64_t (&at)[kWindowDims], int64_t* offsets, int32_t* which) const {
    int64_t count = 0;
    int32_t tap = 0;
    const auto place = [&](int dim, int64_t k) { return at[dim] * window_.stride[dim] - window_.padding[dim] + k * window_.dilation[dim]; };
    for (int64_t i = 0; i < window_.kernel[0]; ++i)
      for (int64_t j = 0; j < window_.kernel[1]; ++j)
        for (int64_t k = 0; k < window_.kernel[2]; ++k, ++tap) {
          const int64_t z = place(0, i), y = place(1, j), x = place(2, k);
          if (z < 0 || z >= a.d || y < 0 || y >= a.h || x < 0 || x >= a.w) continue;
          offsets[count] = (z * a.stride_d + y * a.stride_h + x * a.stride_w) / kFloat;
          which[count++] = tap;
        }
    return count;
  }

  // Bytes of scratch for the sums of `rows` rows: results that stay floats are where they belong.
  int64_t results(int64_t rows) const { return to_codes_ ? rows * out_.view.c * kFloat : 0; }

  // `multiply` writes sums of `rows` rows, whose functions go to `out`.
  template <class Multiply>
  void finish(const Scratch& sums, uint8_t* out, int64_t rows, const Multiply& multiply) const {
    const int64_t channels = out_.view.c;
    float* to = to_codes_ ? reinterpret_cast<float*>(sums.data()) : reinterpret_cast<float*>(out);
    const int64_t stride = to_codes_ ? channels : out_stride_ / kFloat;
    multiply(to, stride);
    const auto how_many = static_cast<int64_t>(functions_.size());
    if (how_many) {
      const bool together = stride == channels;
      for (int64_t row = 0; row < (together ? 1 : rows); ++row)
        xq_float_functions_run(functions_.data(), how_many, to + row * stride, together ? rows * channels : channels, native_isa());
    }
    if (to_codes_) rounding_.run(to, out, rows, out_stride_);
  }

  Place a_;
  Window window_;
  bool depthwise_, to_codes_;
  Place out_;
  int64_t out_stride_ = 0, features_ = 0, rows_ = 0, block_ = 0;
  Table weight_, bias_;
  WindowCopies copies_;
  bool as_they_are_ = false;     // whether the input is these windows
  bool where_they_lie_ = false;  // or lines of them are adjacent in it
  std::vector<xq_float_function> functions_;
  RowRounding rounding_;
  double nanoseconds_ = 0;
};

const RegisterStep float_conv("float_conv", [](StepFields& fields) -> StepPtr { return std::make_unique<FloatConvStep>(fields); });

}  // namespace
}  // namespace x86quant::runtime

// Convolutions of codes that give floats: the codes under each window, tap after tap, times packed rows of weights.
#include <algorithm>
#include <cstring>

#include "../runtime/errors.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

constexpr int kDims = 3;  // depth, height, width
// Windows that are written at a time, about so many bytes: they are multiplied while they are in the second cache.
constexpr int64_t kBlockBytes = 64 << 10, kLeastRows = 8;
constexpr int64_t kLeastPixels = 4096;  // of rows that need no copies, whose weights are read again for each block
constexpr double kBytesANanosecond = 10;  // of windows that are copied, roughly: of some dozens of channels

// `count` copies of `size` bytes each, which are few: a call of memcpy takes longer. The last N overlap those before.
template <size_t N>
void copy_by(const uint8_t* from, int64_t step, uint8_t* to, int64_t stride, int64_t count, int64_t size) {
  const int64_t last = size - static_cast<int64_t>(N);
  for (; count > 0; --count, from += step, to += stride) {
    for (int64_t i = 0; i < last; i += N) std::memcpy(to + i, from + i, N);
    std::memcpy(to + last, from + last, N);
  }
}

void copy_lines(const uint8_t* from, int64_t step, uint8_t* to, int64_t stride, int64_t count, int64_t size) {
  if (size >= 64) copy_by<64>(from, step, to, stride, count, size);
  else if (size >= 16) copy_by<16>(from, step, to, stride, count, size);
  else if (size >= 8) copy_by<8>(from, step, to, stride, count, size);
  else if (size >= 4) copy_by<4>(from, step, to, stride, count, size);
  else if (size >= 2) copy_by<2>(from, step, to, stride, count, size);
  else copy_by<1>(from, step, to, stride, count, size);
}

class ConvRealStep final : public Step {
 public:
  explicit ConvRealStep(StepFields& fields) : a_(fields.tensor(Access::kRead, "a")), pack_(fields.row_pack("pack")) {
    fields.triple("kernel", kernel_);
    fields.triple("stride", stride_);
    fields.triple("padding", padding_);
    fields.triple("dilation", dilation_);
    scale_ = fields.real("a_scale");
    zp_ = fields.zero_point("a_zp");
    const xq_tensor& a = a_.view;
    const int64_t from[] = {a.d, a.h, a.w};
    int64_t taps = 1;
    for (int i = 0; i < kDims; ++i) {
      if (kernel_[i] < 1 || stride_[i] < 1 || dilation_[i] < 1 || padding_[i] < 0) fields.refuse("kernel", "is no window");
      const int64_t room = from[i] + 2 * int64_t{padding_[i]} - int64_t{dilation_[i]} * (kernel_[i] - 1) - 1;
      if (room < 0) fields.refuse("kernel", "is wider than what it looks at");
      sizes_[i] = room / stride_[i] + 1;
      if (__builtin_mul_overflow(taps, kernel_[i], &taps)) fields.refuse("kernel", "is an impossible window");
    }
    int64_t codes = 0;
    if (a.c < 1 || __builtin_mul_overflow(taps, a.c, &codes) || codes != pack_->in_features())
      fields.refuse("pack", "has other inputs than a window of channels");
    out_ = fields.rows(Access::kWrite, "out", sizeof(float), {a.n, sizes_[0], sizes_[1], sizes_[2], pack_->out_features()});
    rows_ = a.n * sizes_[0] * sizes_[1] * sizes_[2];  // which is what the result has room for
    as_they_are_ = is_plain();
    block_ = std::max(kBlockBytes / codes, as_they_are_ ? kLeastPixels : kLeastRows);
    block_ = std::min(block_, std::max<int64_t>(rows_, 1));
    xq_rows op = pack_->call(rows_);
    auto* there = reinterpret_cast<float*>(uintptr_t{64});
    op.in = {reinterpret_cast<uint8_t*>(there), there, reinterpret_cast<int32_t*>(there)};
    op.total = there;
    op.threads = 1;
    const int status = xq_rows_check(&op);
    require(status == XQ_OK, "step \"conv_real\" of a plan: ", xq_status_text(status));
    nanoseconds_ = static_cast<double>(rows_) * static_cast<double>(codes) / kBytesANanosecond;
  }

  void run(const Bases& bases) const override {
    const xq_tensor a = a_.at(bases);
    auto* out = out_.at<float>(bases);
    const int64_t codes = pack_->in_features();
    if (block_ == rows_) {  // few, of which the product finds enough for several threads
      if (as_they_are_) return multiply(a.data, out, rows_);
      const Scratch windows(static_cast<size_t>(rows_ * codes));
      copy_windows(a, 0, rows_, windows.data());
      return multiply(windows.data(), out, rows_);
    }
    split((rows_ + block_ - 1) / block_, useful_threads(shares()), [&](int64_t begin, int64_t end) {
      const Scratch windows(static_cast<size_t>(as_they_are_ ? 0 : block_ * codes));
      const SameScale same(block_, scale_, zp_);
      for (int64_t first = begin * block_; first < std::min(end * block_, rows_); first += block_) {
        const int64_t rows = std::min(block_, rows_ - first);
        if (!as_they_are_) copy_windows(a, first, rows, windows.data());
        xq_rows op = pack_->call(rows);
        same.give(op.in);
        op.in.codes = as_they_are_ ? a.data + first * codes : windows.data(), op.total = out + first * pack_->out_features();
        run_alone(op);
      }
    });
  }

  StepThreads threads() const override { return shared_if(shares() > 1); }

 private:
  // Whether each window is a pixel, and these lie one behind the other.
  bool is_plain() const {
    const xq_tensor& a = a_.view;
    for (int i = 0; i < kDims; ++i)
      if (kernel_[i] != 1 || stride_[i] != 1 || padding_[i] != 0) return false;
    const auto follow = [](int64_t count, int64_t stride, int64_t size) { return count == 1 || stride == size; };
    return follow(a.w, a.stride_w, a.c) && follow(a.h, a.stride_h, a.w * a.c) && follow(a.d, a.stride_d, a.h * a.w * a.c) &&
           follow(a.n, a.stride_n, a.d * a.h * a.w * a.c);
  }

  int64_t shares() const {
    return shares_of(nanoseconds_, kTogether) + shares_of_rows(pack_->call(rows_), pack_->in_features());
  }

  void multiply(uint8_t* codes, float* out, int64_t rows) const {
    const SameScale same(rows, scale_, zp_);
    xq_rows op = pack_->call(rows);
    same.give(op.in);
    op.in.codes = codes, op.total = out;
    run_rows(op, pack_->in_features());
  }

  // By the thread that calls.
  static void run_alone(xq_rows& op) {
    op.threads = 1;
    const Scratch shared(xq_rows_shared(&op)), mine(xq_rows_scratch(&op));
    for (int phase = 0; phase < 2; ++phase) xq_rows_run(&op, phase, 0, xq_rows_items(&op, phase), shared.data(), mine.data());
  }

  void copy_windows(const xq_tensor& a, int64_t first, int64_t count, uint8_t* to) const {
    int64_t at[kDims], n = first;
    for (int i = kDims; i-- > 0; n /= sizes_[i]) at[i] = n % sizes_[i];
    for (int64_t run; count > 0; count -= run, to += run * pack_->in_features()) {
      run = std::min(count, sizes_[2] - at[2]);
      copy_run(a, a.data + n * a.stride_n, at, run, to);
      at[2] = 0;
      if (++at[1] < sizes_[1]) continue;
      at[1] = 0;
      if (++at[0] < sizes_[0]) continue;
      at[0] = 0, ++n;
    }
  }

  // Windows that follow one another in a row of the result: one line of all of them, then the next.
  void copy_run(const xq_tensor& a, const uint8_t* image, const int64_t (&at)[kDims], int64_t run, uint8_t* to) const {
    const int64_t line = kernel_[2] * a.c, width = pack_->in_features(), step = stride_[2];
    const int64_t before = padding_[2] - at[2] * step;  // of the first line, outside of the image
    // Those whose lines lie in the image, as they are.
    const bool joined = dilation_[2] == 1 && a.stride_w == a.c;
    const int64_t room = a.w - kernel_[2] + before;
    const int64_t begin = joined ? std::clamp<int64_t>((before + step - 1) / step, 0, run) : run;
    const int64_t end = std::clamp<int64_t>(room >= 0 ? room / step + 1 : 0, begin, run);
    for (int64_t i = 0; i < kernel_[0]; ++i)
      for (int64_t j = 0; j < kernel_[1]; ++j, to += line) {
        const int64_t z = at[0] * stride_[0] - padding_[0] + i * dilation_[0];
        const int64_t y = at[1] * stride_[1] - padding_[1] + j * dilation_[1];
        if (z < 0 || z >= a.d || y < 0 || y >= a.h) {
          for (int64_t w = 0; w < run; ++w) std::memset(to + w * width, zp_, static_cast<size_t>(line));
          continue;
        }
        const uint8_t* from = image + z * a.stride_d + y * a.stride_h;
        for (int64_t w = 0; w < begin; ++w) copy_taps(a, from, w * step - before, to + w * width);
        if (end > begin) copy_lines(from + (begin * step - before) * a.c, step * a.c, to + begin * width, width, end - begin, line);
        for (int64_t w = end; w < run; ++w) copy_taps(a, from, w * step - before, to + w * width);
      }
  }

  void copy_taps(const xq_tensor& a, const uint8_t* from, int64_t x, uint8_t* to) const {
    for (int64_t k = 0; k < kernel_[2]; ++k, to += a.c, x += dilation_[2])
      if (x < 0 || x >= a.w) std::memset(to, zp_, static_cast<size_t>(a.c));
      else copy_lines(from + x * a.stride_w, 0, to, 0, 1, a.c);
  }

  Place a_;
  RowPackPtr pack_;
  Address out_;
  int64_t sizes_[kDims]{};  // of the result: depth, height, width
  int64_t rows_ = 0, block_ = 0;  // windows: all of them, and how many are multiplied at a time
  bool as_they_are_ = false;      // whether the input is these rows
  int32_t kernel_[kDims]{}, stride_[kDims]{}, padding_[kDims]{}, dilation_[kDims]{};
  float scale_ = 1;
  int32_t zp_ = 0;
  double nanoseconds_ = 0;  // to copy the windows, on one thread
};

const RegisterStep conv_real("conv_real", [](StepFields& fields) -> StepPtr { return std::make_unique<ConvRealStep>(fields); });

}  // namespace
}  // namespace x86quant::runtime

// Convolutions of codes that give floats: the codes under each window, tap after tap, times packed rows of weights.
#include <algorithm>

#include "../runtime/errors.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"
#include "window_copies.h"

namespace x86quant::runtime {
namespace {

// Windows that are written at a time, about so many bytes: they are multiplied while they are in the second cache.
constexpr int64_t kBlockBytes = 64 << 10, kLeastRows = 8;
constexpr int64_t kLeastPixels = 4096;  // of rows that need no copies, whose weights are read again for each block
constexpr double kBytesANanosecond = 10;  // of windows that are copied, roughly: of some dozens of channels

class ConvRealStep final : public Step {
 public:
  explicit ConvRealStep(StepFields& fields) : a_(fields.tensor(Access::kRead, "a")), pack_(fields.row_pack("pack")) {
    scale_ = fields.real("a_scale");
    zp_ = fields.zero_point("a_zp");
    const xq_tensor& a = a_.view;
    window_ = Window(fields, a);
    copies_ = WindowCopies(window_, a.c, zp_);
    int64_t codes = 0;
    if (a.c < 1 || __builtin_mul_overflow(window_.taps, a.c, &codes) || codes != pack_->in_features())
      fields.refuse("pack", "has other inputs than a window of channels");
    out_ = fields.rows(Access::kWrite, "out", sizeof(float), {a.n, window_.sizes[0], window_.sizes[1], window_.sizes[2], pack_->out_features()});
    rows_ = a.n * window_.sizes[0] * window_.sizes[1] * window_.sizes[2];  // which is what the result has room for
    as_they_are_ = window_.is_one_pixel() && pixels_follow(a, a.c);
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
      copies_.copy(a, 0, rows_, windows.data());
      return multiply(windows.data(), out, rows_);
    }
    split((rows_ + block_ - 1) / block_, useful_threads(shares()), [&](int64_t begin, int64_t end) {
      const Scratch windows(static_cast<size_t>(as_they_are_ ? 0 : block_ * codes));
      const SameScale same(block_, scale_, zp_);
      for (int64_t first = begin * block_; first < std::min(end * block_, rows_); first += block_) {
        const int64_t rows = std::min(block_, rows_ - first);
        if (!as_they_are_) copies_.copy(a, first, rows, windows.data());
        xq_rows op = pack_->call(rows);
        same.give(op.in);
        op.in.codes = as_they_are_ ? a.data + first * codes : windows.data(), op.total = out + first * pack_->out_features();
        run_alone(op);
      }
    });
  }

  StepThreads threads() const override { return shared_if(shares() > 1); }

 private:
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

  Place a_;
  RowPackPtr pack_;
  Address out_;
  Window window_;
  WindowCopies copies_;
  int64_t rows_ = 0, block_ = 0;  // windows: all of them, and how many are multiplied at a time
  bool as_they_are_ = false;      // whether the input is these rows
  float scale_ = 1;
  int32_t zp_ = 0;
  double nanoseconds_ = 0;  // to copy the windows, on one thread
};

const RegisterStep conv_real("conv_real", [](StepFields& fields) -> StepPtr { return std::make_unique<ConvRealStep>(fields); });

}  // namespace
}  // namespace x86quant::runtime

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
constexpr int64_t kMostOfALine = int64_t{1} << 28;  // bytes of its windows and of their results, which are in memory at a time
constexpr double kBytesANanosecond = 10;  // of windows that are copied, roughly: of some dozens of channels

// By the thread that calls.
void run_alone(xq_rows& op) {
  op.threads = 1;
  const Scratch shared(xq_rows_shared(&op)), mine(xq_rows_scratch(&op));
  for (int phase = 0; phase < 2; ++phase) xq_rows_run(&op, phase, 0, xq_rows_items(&op, phase), shared.data(), mine.data());
}

// Refuses weights that the kernels cannot multiply so many rows with.
void check_rows(const char* kind, const RowPack& pack, int64_t rows) {
  xq_rows op = pack.call(rows);
  auto* there = reinterpret_cast<float*>(uintptr_t{64});
  op.in = {reinterpret_cast<uint8_t*>(there), there, reinterpret_cast<int32_t*>(there)};
  op.total = there;
  op.threads = 1;
  const int status = xq_rows_check(&op);
  require(status == XQ_OK, "step \"", kind, "\" of a plan: ", xq_status_text(status));
}

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
    check_rows("conv_real", *pack_, rows_);
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

// With few results for each window most lanes of a product would be idle, and each pixel is copied for every tap. So each
// column of taps is a product of its own, all of them in one: windows are a column wide, and their sums for each column are
// added where these columns meet. The pack has scales of one and no bias, so that its results are the sums themselves.
class ConvColumnsStep final : public Step {
 public:
  explicit ConvColumnsStep(StepFields& fields) : a_(fields.tensor(Access::kRead, "a")), pack_(fields.row_pack("pack")) {
    zp_ = fields.zero_point("a_zp");
    const xq_tensor& a = a_.view;
    window_ = Window(fields, a);
    if (window_.kernel[2] != 1 || window_.stride[2] != 1) fields.refuse("kernel", "is no column");
    copies_ = WindowCopies(window_, a.c, zp_);
    int64_t codes = 0;
    if (a.c < 1 || __builtin_mul_overflow(window_.taps, a.c, &codes) || codes != pack_->in_features())
      fields.refuse("pack", "has other inputs than a column of channels");
    columns_ = fields.small("columns"), apart_ = fields.small("apart");
    if (columns_ < 1 || apart_ < 1 || pack_->out_features() % columns_ != 0) fields.refuse("columns", "do not share the results");
    results_ = pack_->out_features() / columns_;
    width_ = window_.sizes[2] - (columns_ - 1) * apart_;
    if (width_ < 1) fields.refuse("columns", "are wider than what they look at");
    const int64_t most = std::max<int64_t>(codes, pack_->out_features() * static_cast<int64_t>(sizeof(float)));
    if (window_.sizes[2] > kMostOfALine / most) fields.refuse("columns", "look at too long a line");
    scale_ = fields.table("scale", Type::kFloat, results_), bias_ = fields.table("bias", Type::kFloat, results_);
    lines_ = a.n * window_.sizes[0] * window_.sizes[1];
    out_ = fields.rows(Access::kWrite, "out", sizeof(float), {a.n, window_.sizes[0], window_.sizes[1], width_, results_});
    block_ = std::clamp<int64_t>(kBlockBytes / codes / window_.sizes[2], 1, std::max<int64_t>(lines_, 1));
    check_rows("conv_columns", *pack_, block_ * window_.sizes[2]);
    const double pixels = static_cast<double>(lines_) * static_cast<double>(window_.sizes[2]);
    nanoseconds_ = pixels * static_cast<double>(codes) / kBytesANanosecond;
  }

  void run(const Bases& bases) const override {
    const xq_tensor a = a_.at(bases);
    auto* out = out_.at<float>(bases);
    const int64_t windows = window_.sizes[2], line = windows * pack_->out_features();
    split((lines_ + block_ - 1) / block_, useful_threads(shares()), [&](int64_t begin, int64_t end) {
      const Scratch codes(static_cast<size_t>(block_ * windows * pack_->in_features()));
      const Scratch products(static_cast<size_t>(block_ * line + kLanes) * sizeof(float));
      const SameScale same(block_ * windows, 1, zp_);
      auto* found = reinterpret_cast<float*>(products.data());
      std::fill_n(found + block_ * line, kLanes, 0.0f);
      for (int64_t first = begin * block_; first < std::min(end * block_, lines_); first += block_) {
        const int64_t lines = std::min(block_, lines_ - first);
        copies_.copy(a, first * windows, lines * windows, codes.data());
        xq_rows op = pack_->call(lines * windows);
        same.give(op.in);
        op.in.codes = codes.data(), op.total = found;
        run_alone(op);
        for (int64_t i = 0; i < lines; ++i)
          for (int64_t r = 0; r < results_; r += kLanes) add_columns(found + i * line, r, out + (first + i) * width_ * results_);
      }
    });
  }

  StepThreads threads() const override { return shared_if(shares() > 1); }

 private:
  static constexpr int64_t kLanes = 4;
  using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
  using Ints = int32_t __attribute__((vector_size(kLanes * sizeof(float))));
  using Words = uint32_t __attribute__((vector_size(kLanes * sizeof(float))));

  int64_t shares() const {
    return shares_of(nanoseconds_, kTogether) + shares_of_rows(pack_->call(lines_ * window_.sizes[2]), pack_->in_features());
  }

  // Up to kLanes results of each pixel of a line. Sums of a column are floats without a fraction; what lies behind the last
  // is read with it, and left out.
  void add_columns(const float* products, int64_t first, float* out) const {
    const int64_t all = pack_->out_features(), next = apart_ * all + results_, lanes = std::min(kLanes, results_ - first);
    double scale[kLanes]{}, bias[kLanes]{};
    for (int64_t r = 0; r < lanes; ++r) scale[r] = scale_.as<float>()[first + r], bias[r] = bias_.as<float>()[first + r];
    products += first, out += first;
    for (int64_t x = 0; x < width_; ++x, products += all, out += results_) {
      Words sums{};  // which weights that are no such pack's may overflow
      const float* column = products;
      for (int64_t t = 0; t < columns_; ++t, column += next) {
        Floats sum;
        std::memcpy(&sum, column, sizeof(sum));
        sums += reinterpret_cast<Words>(__builtin_convertvector(sum, Ints));
      }
      const Floats found = __builtin_convertvector(reinterpret_cast<Ints>(sums), Floats);
      for (int64_t r = 0; r < lanes; ++r) out[r] = static_cast<float>(found[r] * scale[r] + bias[r]);
    }
  }

  Place a_;
  RowPackPtr pack_;
  Table scale_, bias_;
  Address out_;
  Window window_;
  WindowCopies copies_;
  int64_t columns_ = 1, apart_ = 1, results_ = 0;  // columns of taps, pixels from one to the next, results of a window
  int64_t width_ = 0, lines_ = 0, block_ = 0;      // of the result: pixels of a line, and lines; how many at a time
  int32_t zp_ = 0;
  double nanoseconds_ = 0;  // to copy the windows, on one thread
};

const RegisterStep conv_real("conv_real", [](StepFields& fields) -> StepPtr { return std::make_unique<ConvRealStep>(fields); });
const RegisterStep conv_columns("conv_columns", [](StepFields& fields) -> StepPtr { return std::make_unique<ConvColumnsStep>(fields); });

}  // namespace
}  // namespace x86quant::runtime

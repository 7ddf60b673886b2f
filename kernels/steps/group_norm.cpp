// Group normalization of codes: over all positions and a group of channels of each image.
//
// With the mean and the variance of a group's codes, exact before they are rounded to float64,
//
//     rstd = 1 / sqrt(variance + eps)                          eps in squared steps of the input
//     out  = q(fma(code, scale, shift))    scale = weight * rstd,  shift = bias - mean * weight * rstd
//
// q is that of native.h, and weight and bias are divided by the output's scale.
#include <atomic>
#include <cmath>
#include <cstring>

#include "../native/channel_sums.h"
#include "../runtime/errors.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

// Roughly: what one thread reads, of which it has to read everything twice.
constexpr double kBytesANanosecond = 8;
constexpr int64_t kMostChannels = int64_t{1} << 18;

class GroupNorm final : public Step {
 public:
  explicit GroupNorm(StepFields& fields)
      : a_(fields.tensor(Access::kRead, "a")), out_(fields.tensor(Access::kWrite, "out")), groups_(fields.integer("groups")),
        eps_(fields.real("eps")) {
    const xq_tensor &a = a_.view, &out = out_.view;
    if (a.n != out.n || a.d != out.d || a.h != out.h || a.w != out.w || a.c != out.c) fields.refuse("out", "must have the sizes of a");
    if (a.c > kMostChannels) fields.refuse("a", "has too many channels");
    if (groups_ < 1 || a.c % groups_) fields.refuse("groups", "must divide the channels");
    if (!(eps_ >= 0) || !std::isfinite(eps_)) fields.refuse("eps", "must be finite, and not negative");
    if (fields.has("scale_c")) scale_ = fields.table("scale_c", Type::kFloat, a.c);
    if (fields.has("shift_c")) shift_ = fields.table("shift_c", Type::kFloat, a.c);
    plain_scale_ = fields.real("a_mult");
    op_.kind = XQ_OP_AFFINE;
    op_.isa = native_isa();
    op_.groups = 1;
    op_.hi = 255;
    op_.out_zp = fields.zero_point("out_zp");
    if (fields.has("lo")) op_.lo = fields.small("lo");
    if (fields.has("hi")) op_.hi = fields.small("hi");
    if (fields.has("lut")) {
      lut_ = fields.table("lut", Type::kByte, 256);
      op_.lut = lut_.as<uint8_t>();
    }
    xq_op whole = op_;  // whose parameters a run computes
    const float none = 0;
    whole.a = a, whole.out = out, whole.scale_c = whole.shift_c = &none;
    const int status = xq_op_check(&whole);
    require(status == XQ_OK, "step \"", fields.kind(), "\" of a plan: ", xq_status_text(status));
  }

  void run(const Bases& bases) const override {
    const xq_tensor a = a_.at(bases), out = out_.at(bases);
    if (a.n * a.d * a.h * a.w * a.c == 0) return;
    const int threads = threads_for(nanoseconds());
    if (a.n >= threads) {
      split(a.n, threads, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) normalize(image(a, n), image(out, n), 1);
      });
    } else {
      for (int64_t n = 0; n < a.n; ++n) normalize(image(a, n), image(out, n), threads);
    }
  }

  StepThreads threads() const override { return shared_if(shares_of(nanoseconds(), kTogether) > 1); }

 private:
  double nanoseconds() const {
    const xq_tensor& a = a_.view;
    return static_cast<double>(a.n) * static_cast<double>(a.d) * static_cast<double>(a.h) * static_cast<double>(a.w) *
           static_cast<double>(a.c) / kBytesANanosecond;
  }

  static xq_tensor image(xq_tensor t, int64_t n) {
    t.data += n * t.stride_n;
    t.n = 1;
    return t;
  }

  void normalize(const xq_tensor& a, const xq_tensor& out, int threads) const {
    const auto channels = static_cast<size_t>(a.c);
    const Scratch memory(channels * (2 * sizeof(int64_t) + 2 * sizeof(float)));
    auto* sums = reinterpret_cast<int64_t*>(memory.data());
    auto* scale = reinterpret_cast<float*>(sums + 2 * channels);
    std::memset(sums, 0, 2 * channels * sizeof(int64_t));
    const int64_t rows = a.d * a.h;
    if (threads == 1) {
      add_sums(a, 0, rows, sums);
    } else {
      split(rows, threads, [&](int64_t begin, int64_t end) {
        const Scratch own(2 * channels * sizeof(int64_t));
        auto* mine = reinterpret_cast<int64_t*>(own.data());
        std::memset(mine, 0, 2 * channels * sizeof(int64_t));
        add_sums(a, begin, end, mine);
        for (size_t i = 0; i < 2 * channels; ++i) std::atomic_ref<int64_t>(sums[i]).fetch_add(mine[i], std::memory_order_relaxed);
      });
    }
    give_parameters(a, sums, scale);
    xq_op op = op_;
    op.a = a, op.out = out, op.scale_c = scale, op.shift_c = scale + channels;
    split(xq_op_items(&op), threads, [&](int64_t begin, int64_t end) { xq_op_run(&op, begin, end); });
  }

  // Sums, and squares behind them.
  void add_sums(const xq_tensor& a, int64_t begin, int64_t end, int64_t* sums) const {
    const xq_channel_sums op{a, sums, sums + a.c, op_.isa};
    xq_channel_sums_run(&op, begin, end);
  }

  // Scales of all channels, and shifts behind them.
  void give_parameters(const xq_tensor& a, const int64_t* sums, float* scale) const {
    const int64_t each = a.c / groups_;
    const auto* weight = scale_.as<float>();
    const auto* bias = shift_.as<float>();
    const __int128 count = static_cast<__int128>(a.d * a.h * a.w) * each;
    for (int64_t first = 0; first < a.c; first += each) {
      __int128 sum = 0, squares = 0;
      for (int64_t c = first; c < first + each; ++c) sum += sums[c], squares += sums[a.c + c];
      const auto n = static_cast<double>(count);
      const double variance = static_cast<double>(count * squares - sum * sum) / (n * n);
      const double mean = static_cast<double>(sum) / n, rstd = 1 / std::sqrt(variance + static_cast<double>(eps_));
      for (int64_t c = first; c < first + each; ++c) {
        const double factor = static_cast<double>(weight ? weight[c] : plain_scale_) * rstd;
        scale[c] = static_cast<float>(factor);
        scale[a.c + c] = static_cast<float>((bias ? static_cast<double>(bias[c]) : 0.0) - mean * factor);
      }
    }
  }

  Place a_, out_;
  int64_t groups_;
  float eps_, plain_scale_;
  Table scale_, shift_, lut_;
  xq_op op_{};
};

const RegisterStep group_norm("group_norm", [](StepFields& fields) -> StepPtr { return std::make_unique<GroupNorm>(fields); });

}  // namespace
}  // namespace x86quant::runtime

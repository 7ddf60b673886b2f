// Rotary positions: each pair of features of a head, half a head apart, turned by an angle.
#include <algorithm>

#include "../runtime/parallel.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

// Less work than this is not worth waking a thread for: some microseconds of it.
constexpr int64_t kFloatsEach = 30'000;

class Rotate final : public Step {
 public:
  explicit Rotate(StepFields& fields)
      : batch_(fields.integer("batch")), tokens_(fields.integer("tokens")), heads_(fields.integer("heads")),
        size_(fields.integer("size")) {
    for (int64_t count : {batch_, tokens_, heads_, size_})
      if (count < 0) fields.refuse("batch", "and the other sizes must not be negative");
    if (size_ % 2) fields.refuse("size", "must be even");
    x_ = fields.strided(Access::kRead, "x", "x_strides", kFloat, {batch_, tokens_, heads_, size_}, x_strides_);
    cos_ = fields.strided(Access::kRead, "cos", "cos_strides", kFloat, {batch_, tokens_, size_}, cos_strides_);
    sin_ = fields.strided(Access::kRead, "sin", "sin_strides", kFloat, {batch_, tokens_, size_}, sin_strides_);
    out_ = fields.rows(Access::kWrite, "out", kFloat, {batch_, tokens_, heads_, size_});
  }

  void run(const Bases& bases) const override {
    const auto* x = x_.at<const float>(bases);
    const auto *cos = cos_.at<const float>(bases), *sin = sin_.at<const float>(bases);
    auto* out = out_.at<float>(bases);
    const int64_t rows = batch_ * tokens_;
    split(rows, useful_threads(rows * heads_ * size_ / kFloatsEach), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t n = row / tokens_, token = row % tokens_;
        const float* c = cos + n * cos_strides_[0] + token * cos_strides_[1];
        const float* s = sin + n * sin_strides_[0] + token * sin_strides_[1];
        for (int64_t head = 0; head < heads_; ++head)
          rotate(x + n * x_strides_[0] + token * x_strides_[1] + head * x_strides_[2], c, s, out + (row * heads_ + head) * size_);
      }
    });
  }

 private:
  static constexpr int64_t kFloat = sizeof(float);

  void rotate(const float* x, const float* c, const float* s, float* __restrict out) const {
    const int64_t half = size_ / 2;
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      out[i] = a * c[i] - b * s[i];
      out[i + half] = b * c[i + half] + a * s[i + half];
    }
  }

  int64_t batch_, tokens_, heads_, size_;
  int64_t x_strides_[3], cos_strides_[2], sin_strides_[2];
  Address x_, cos_, sin_, out_;
};

const RegisterStep rotate("rotate", [](StepFields& fields) -> StepPtr { return std::make_unique<Rotate>(fields); });

}  // namespace
}  // namespace x86quant::runtime

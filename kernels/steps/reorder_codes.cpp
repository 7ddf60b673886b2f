// Codes of rows with their features in another order: as the columns of a weight lie whose groups are not side by side.
#include <cstring>

#include "../runtime/errors.h"
#include "../runtime/parallel.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

// Less work than this is not worth waking a thread for: some microseconds of it.
constexpr int64_t kCodesEach = 30'000;

class ReorderCodes final : public Step {
 public:
  explicit ReorderCodes(StepFields& fields) : rows_(fields.integer("rows")), features_(fields.integer("features")) {
    if (rows_ < 0) fields.refuse("rows", "must not be negative");
    if (features_ < 1) fields.refuse("features", "must be at least 1");
    codes_ = fields.rows(Access::kRead, "codes", 1, {rows_, features_});
    out_ = fields.rows(Access::kWrite, "out_codes", 1, {rows_, features_});
    if (fields.has("count")) count_ = fields.rows(Access::kIndex, "count", sizeof(int64_t), {1});
    order_ = fields.table("order", Type::kInt, features_);
    const auto* order = order_.as<int32_t>();
    for (int64_t k = 0; k < features_; ++k)
      if (order[k] < 0 || order[k] >= features_) fields.refuse("order", "names a feature that is none");
  }

  void run(const Bases& bases) const override {
    const auto* codes = codes_.at<const uint8_t>(bases);
    auto* out = out_.at<uint8_t>(bases);
    int64_t rows = rows_;
    if (count_) {
      rows = *count_.at<const int64_t>(bases);
      require(rows >= 0 && rows <= rows_, "a step of ", rows_, " rows cannot compute ", rows);
    }
    split(rows, useful_threads(rows * features_ / kCodesEach), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) reorder(codes + row * features_, out + row * features_);
    });
  }

  StepThreads threads() const override { return shared_if(rows_ * features_ / kCodesEach > 1); }

 private:
  void reorder(const uint8_t* from, uint8_t* __restrict to) const {
    const auto* order = order_.as<int32_t>();
    int64_t k = 0;
    for (; k + 8 <= features_; k += 8) {  // stored together
      uint64_t eight = 0;
      for (int i = 0; i < 8; ++i) eight |= uint64_t{from[order[k + i]]} << (8 * i);
      std::memcpy(to + k, &eight, sizeof(eight));
    }
    for (; k < features_; ++k) to[k] = from[order[k]];
  }

  int64_t rows_, features_;
  Address codes_, out_, count_;  // of how many rows, the first ones, are reordered; none: of all
  Table order_;
};

const RegisterStep reorder("reorder_codes", [](StepFields& fields) -> StepPtr { return std::make_unique<ReorderCodes>(fields); });

}  // namespace
}  // namespace x86quant::runtime

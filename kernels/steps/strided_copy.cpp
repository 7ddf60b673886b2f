// Copies elements of any size between tensors of one shape and any strides.
#include "../runtime/strided_copy.h"

#include "../runtime/parallel.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

class StridedCopyStep final : public Step {
 public:
  explicit StridedCopyStep(StepFields& fields) : copy_(copy_of(fields)) {}
  void run(const Bases& bases) const override {
    const auto* from = from_.at<uint8_t>(bases);
    auto* to = to_.at<uint8_t>(bases);
    split(copy_.items(), threads_for(nanoseconds()), [&](int64_t begin, int64_t end) { copy_.run(from, to, begin, end); });
  }
  StepThreads threads() const override { return shared_if(shares_of(nanoseconds(), kTogether) > 1); }

 private:
  // Of elements that lie apart; adjacent ones take a fraction.
  double nanoseconds() const {
    constexpr double kBytesEach = 12;
    return copy_.bytes() / kBytesEach;
  }

  StridedCopy copy_of(StepFields& fields) {
    const int64_t element_size = fields.integer("element_size");
    if (element_size < 1) fields.refuse("element_size", "is not positive");
    const Words sizes = fields.integers("sizes");
    const Words from_strides = fields.integers("from_strides", sizes.size());
    const Words to_strides = fields.integers("to_strides", sizes.size());
    from_ = fields.address(Access::kRead, "from", element_size, sizes, from_strides);
    to_ = fields.address(Access::kWrite, "to", element_size, sizes, to_strides);
    return {element_size, sizes, from_strides, to_strides};
  }

  Address from_, to_;
  StridedCopy copy_;  // strides in bytes
};

const RegisterStep strided_copy("strided_copy", [](StepFields& fields) -> StepPtr {
  return std::make_unique<StridedCopyStep>(fields);
});

}  // namespace
}  // namespace x86quant::runtime

// A convolution or a linear layer, by the pack of any kernel.
#include "../runtime/conv_kernel.h"
#include "../runtime/parallel.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

class Conv final : public Step {
 public:
  explicit Conv(StepFields& fields)
      : pack_(fields.pack("pack")),
        in_(fields.tensor(Access::kRead, "in")),
        out_(fields.tensor(Access::kWrite, "out")),
        residual_(fields.optional_tensor(Access::kRead, "residual")) {
    pack_->check({in_.view, out_.view, residual_.view});
  }
  void run(const Bases& bases) const override { pack_->run({in_.at(bases), out_.at(bases), residual_.at(bases)}); }
  StepThreads threads() const override {
    if (pack_->has_own_threads()) return StepThreads::kOwn;
    return shared_if(shares_of(pack_->nanoseconds(out_.view), kTogether) > 1);
  }

 private:
  PackedConvPtr pack_;
  Place in_, out_, residual_;
};

const RegisterStep conv("conv", [](StepFields& fields) -> StepPtr { return std::make_unique<Conv>(fields); });

}  // namespace
}  // namespace x86quant::runtime

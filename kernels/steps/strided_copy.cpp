// Copies elements of any size between tensors of one shape and any strides.
#include "../runtime/strided_copy.h"

#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

class StridedCopyStep final : public Step {
 public:
  explicit StridedCopyStep(StepFields& fields)
      : copy_(copy_of(fields)), from_(fields.integers("from", 2)), to_(fields.integers("to", 2)) {}
  void run(const Bases& bases) const override { copy_.run(bases[from_[0]] + from_[1], bases[to_[0]] + to_[1]); }

 private:
  static StridedCopy copy_of(StepFields& fields) {
    const int64_t element_size = fields.integer("element_size");
    if (element_size < 1) fields.refuse("element_size", "is not positive");
    const Words sizes = fields.integers("sizes");
    return {element_size, sizes, fields.integers("from_strides", sizes.size()),
            fields.integers("to_strides", sizes.size())};
  }

  StridedCopy copy_;  // strides in bytes
  Words from_, to_;   // base and offset
};

const RegisterStep strided_copy("strided_copy", [](StepFields& fields) -> StepPtr {
  return std::make_unique<StridedCopyStep>(fields);
});

}  // namespace
}  // namespace x86quant::runtime

// The kernel "native": kernels/native on the pool of threads.
#include "kernel.h"
#include "native_linear.h"

namespace x86quant::dynamic {
namespace {

class NativeKernel final : public Kernel {
 public:
  explicit NativeKernel(const Description& d) : linear_(d) {}

  void run(const float* x, int64_t rows, int64_t row_stride, float* out) const override {
    linear_.multiply(x, rows, row_stride, out, linear_.out_features());
  }

  int64_t bytes() const override { return linear_.bytes(); }

 private:
  NativeLinear linear_;
};

const Register native("native", [](const Description& d) { return std::make_shared<NativeKernel>(d); });

}  // namespace
}  // namespace x86quant::dynamic

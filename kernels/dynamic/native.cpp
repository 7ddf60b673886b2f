// The kernel "native": kernels/native on torch's thread pool.
#include <algorithm>

#include "activation.h"
#include "../runtime/memory.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"
#include "kernel.h"

namespace x86quant::dynamic {
namespace {

using runtime::Buffer;

class NativeLinear final : public Kernel {
 public:
  explicit NativeLinear(const Description& d)
      : linear_{static_cast<int32_t>(d.in_features()), static_cast<int32_t>(d.out_features()),
                activation_code(d.activation)} {
    const int isa = native_isa();
    const size_t size = xq_linear_packed_size(&linear_, isa);
    TORCH_CHECK(size > 0, "x86quant: the native kernel refuses this linear");
    packed_ = Buffer(size);
    succeed(xq_linear_pack(&linear_, isa, d.weight.const_data_ptr<int8_t>(),
                           d.scale.const_data_ptr<float>(),
                           d.bias ? d.bias->const_data_ptr<float>() : nullptr, packed_.data()));
  }

  void run(const at::Tensor& x, int64_t rows, int64_t row_stride, at::Tensor& out) const override {
    const auto* in = x.const_data_ptr<float>();
    auto* to = out.mutable_data_ptr<float>();
    // Evenly, so that the last rows are no remnant.
    const int64_t blocks = (rows + most_rows() - 1) / most_rows();
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t first = i * rows / blocks, last = (i + 1) * rows / blocks;
      run_rows(in + first * row_stride, last - first, row_stride, to + first * linear_.out_features);
    }
  }

  int64_t bytes() const override { return static_cast<int64_t>(packed_.size()); }

 private:
  // Less work than these is not worth waking a thread for.
  static constexpr int64_t kMultiplyAddsEach = 500'000;
  static constexpr int64_t kFloatsEach = 100'000;
  // Codes of rows that wait for their product: no more than these bytes, and than a thread keeps of scratch
  // memory. Enough of them that reading all weights again for the next ones does not count.
  static constexpr int64_t kCodeBytes = 8 << 20;
  static constexpr int64_t kFewestRows = 512;

  int64_t most_rows() const { return std::max(kFewestRows, kCodeBytes / (linear_.in_features + 128)); }

  void run_rows(const float* in, int64_t rows, int64_t row_stride, float* out) const {
    xq_linear_call call{};
    call.packed = packed_.data();
    call.in = in;
    call.out = out;
    call.rows = rows;
    call.in_stride = row_stride;
    call.out_stride = linear_.out_features;
    call.threads = runtime::useful_threads(rows * linear_.in_features * linear_.out_features /
                                           kMultiplyAddsEach);
    succeed(xq_linear_check(&call));
    // The caller's own scratch; the threads that help write into it too.
    const runtime::Scratch codes(xq_linear_codes_size(&call));
    call.codes = codes.data();
    if (!xq_linear_by_rows(&call)) {
      const int threads = runtime::useful_threads(rows * linear_.in_features / kFloatsEach);
      runtime::split(rows, threads, [&](int64_t begin, int64_t end) {
        xq_linear_quantize(&call, begin, end);
      });
    }
    runtime::split(xq_linear_items(&call), call.threads, [&](int64_t begin, int64_t end) {
      xq_linear_run(&call, begin, end);
    });
  }

  xq_linear linear_;
  Buffer packed_;
};

const Register native("native", [](const Description& d) { return std::make_shared<NativeLinear>(d); });

}  // namespace
}  // namespace x86quant::dynamic

#include "native_linear.h"

#include <algorithm>
#include <stdexcept>

#include "../runtime/activation.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"

namespace x86quant::dynamic {
namespace {

// Less work than these is not worth waking a thread for.
constexpr int64_t kMultiplyAddsEach = 500'000;
constexpr int64_t kFloatsEach = 100'000;
// Codes of rows that wait for their product: no more than these bytes, and than a thread keeps of scratch
// memory. Enough of them that reading all weights again for the next ones does not count.
constexpr int64_t kCodeBytes = 8 << 20;
constexpr int64_t kFewestRows = 512;

}  // namespace

NativeLinear::NativeLinear(const Description& d)
    : linear_{static_cast<int32_t>(d.weights.in_features), static_cast<int32_t>(d.weights.out_features),
              runtime::activation_code(d.activation)} {
  const size_t size = runtime::packed_size_of(d.weights, linear_.activation);
  if (size == 0) throw std::runtime_error("x86quant: the native kernel refuses this linear");
  packed_ = runtime::Buffer(size, runtime::Readers::kAll);
  runtime::pack_weights(d.weights, linear_.activation, packed_.data());
}

int64_t NativeLinear::most_rows() const { return std::max(kFewestRows, kCodeBytes / (linear_.in_features + 128)); }

void NativeLinear::multiply(const float* in, int64_t rows, int64_t in_stride, float* out, int64_t out_stride) const {
  // Evenly, so that the last rows are no remnant.
  const int64_t blocks = (rows + most_rows() - 1) / most_rows();
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t first = i * rows / blocks, last = (i + 1) * rows / blocks;
    multiply_some(in + first * in_stride, last - first, in_stride, out + first * out_stride, out_stride);
  }
}

void NativeLinear::multiply_some(const float* in, int64_t rows, int64_t in_stride, float* out, int64_t out_stride) const {
  xq_linear_call call{};
  call.packed = packed_.data();
  call.in = in;
  call.out = out;
  call.rows = rows;
  call.in_stride = in_stride;
  call.out_stride = out_stride;
  call.threads = runtime::useful_threads(rows * linear_.in_features * linear_.out_features / kMultiplyAddsEach);
  succeed(xq_linear_check(&call));
  // The caller's own scratch; the threads that help write into it too.
  const runtime::Scratch codes(xq_linear_codes_size(&call));
  call.codes = codes.data();
  if (!xq_linear_by_rows(&call)) {
    const int threads = runtime::useful_threads(rows * linear_.in_features / kFloatsEach);
    runtime::split(rows, threads, [&](int64_t begin, int64_t end) { xq_linear_quantize(&call, begin, end); });
  }
  runtime::split(xq_linear_items(&call), call.threads,
                 [&](int64_t begin, int64_t end) { xq_linear_run(&call, begin, end); });
}

}  // namespace x86quant::dynamic

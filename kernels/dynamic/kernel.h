// What a provider of dynamic linears gives: packed weights that run on float rows.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "../runtime/exported.h"
#include "../runtime/row_pack.h"

namespace x86quant::dynamic {

// The weights are the caller's, and may be gone once a kernel is made.
struct Description {
  runtime::RowWeights weights;
  std::string activation;  // empty: none
};

// Thread safe once constructed.
class Kernel {
 public:
  virtual ~Kernel() = default;
  // x: float (rows, in), rows contiguous in themselves and so many floats apart, at least one; out: float (rows, out),
  // contiguous.
  virtual void run(const float* x, int64_t rows, int64_t row_stride, float* out) const = 0;
  virtual int64_t bytes() const = 0;
};

using KernelPtr = std::shared_ptr<const Kernel>;
using Make = std::function<KernelPtr(const Description&)>;

// Declared once, by a static object beside the kernel.
struct X86QUANT_EXPORTED Register {
  Register(const std::string& name, Make make);
};

KernelPtr make(const std::string& name, const Description& description);

}  // namespace x86quant::dynamic

// What a provider of dynamic linears gives: packed weights that run on float rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "../runtime/exported.h"
#include "row_weights.h"

namespace x86quant::dynamic {

struct Description {
  Weights weights;
  std::string activation;  // empty: none

  int64_t in_features() const { return weights.in_features(); }
  int64_t out_features() const { return weights.out_features(); }
};

// Thread safe once constructed.
class Kernel {
 public:
  virtual ~Kernel() = default;
  // x: float (rows, in), rows contiguous in themselves, at least one; out: float (rows, out),
  // contiguous.
  virtual void run(const at::Tensor& x, int64_t rows, int64_t row_stride, at::Tensor& out) const = 0;
  virtual int64_t bytes() const = 0;
};

using Make = std::function<std::shared_ptr<const Kernel>(const Description&)>;

// Declared once, by a static object beside the kernel.
struct X86QUANT_EXPORTED Register {
  Register(const std::string& name, Make make);
};

std::shared_ptr<const Kernel> make(const std::string& name, const Description& description);

// activation(x), in place.
X86QUANT_EXPORTED void activate(at::Tensor& x, const std::string& activation);

}  // namespace x86quant::dynamic

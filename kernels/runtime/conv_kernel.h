// What a provider of convolutions gives the runtime: packed weights that run on plain memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <functional>
#include <optional>
#include <string>

#include "../native/native.h"

namespace x86quant::runtime {

// A convolution or linear layer (a kernel of 1) in the terms of native.h, with what it owns.
struct ConvDescription {
  xq_conv conv{};
  xq_requant requant{};       // its pointers are those of the tensors below
  at::Tensor weight;          // int8, contiguous: (out, in / groups, kd, kh, kw)
  at::Tensor mult;            // float, one an output channel
  std::optional<at::Tensor> bias, lut;
};

struct ConvCall {
  xq_tensor in, out, residual;  // residual.data is null when there is none
};

// Thread safe once constructed: `run` may be called from several threads at a time.
class PackedConv : public torch::CustomClassHolder {
 public:
  // Throws when it cannot run a call of these shapes. Data pointers are not looked at beyond null.
  virtual void check(const ConvCall& call) const = 0;
  // Runs on torch's thread pool unless already inside it.
  virtual void run(const ConvCall& call) const = 0;
  virtual int64_t bytes() const = 0;
};

using PackConv = std::function<c10::intrusive_ptr<PackedConv>(ConvDescription)>;

// Declared once, by a static object in the provider's folder.
struct RegisterConvKernel {
  RegisterConvKernel(const std::string& name, PackConv pack);
};

c10::intrusive_ptr<PackedConv> pack_conv(const std::string& kernel, ConvDescription description);

}  // namespace x86quant::runtime

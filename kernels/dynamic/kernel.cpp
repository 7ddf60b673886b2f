#include "kernel.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>

#include <map>

namespace x86quant::dynamic {
namespace {

std::map<std::string, Make>& registered() {
  static std::map<std::string, Make> kernels;
  return kernels;
}

}  // namespace

Register::Register(const std::string& name, Make make) {
  registered().emplace(name, std::move(make));
}

std::shared_ptr<const Kernel> make(const std::string& name, const Description& description) {
  const auto found = registered().find(name);
  TORCH_CHECK_VALUE(found != registered().end(), "x86quant: there is no dynamic linear kernel \"", name,
                    "\"");
  return found->second(description);
}

void activate(at::Tensor& x, const std::string& activation) {
  if (activation == "relu") at::relu_(x);
  if (activation == "gelu") at::gelu_(x);
  if (activation == "gelu_tanh") at::gelu_(x, "tanh");
  if (activation == "silu") at::silu_(x);
  if (activation == "sigmoid") at::sigmoid_(x);
  if (activation == "tanh") at::tanh_(x);
}

}  // namespace x86quant::dynamic

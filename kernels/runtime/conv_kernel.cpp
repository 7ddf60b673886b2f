#include "conv_kernel.h"

#include <map>

namespace x86quant::runtime {
namespace {

std::map<std::string, PackConv>& registered() {
  static std::map<std::string, PackConv> kernels;
  return kernels;
}

}  // namespace

RegisterConvKernel::RegisterConvKernel(const std::string& name, PackConv pack) {
  registered().emplace(name, std::move(pack));
}

c10::intrusive_ptr<PackedConv> pack_conv(const std::string& kernel, ConvDescription description) {
  const auto found = registered().find(kernel);
  TORCH_CHECK_VALUE(found != registered().end(), "x86quant: kernel \"", kernel,
                    "\" is not built into the runtime");
  return found->second(std::move(description));
}

}  // namespace x86quant::runtime

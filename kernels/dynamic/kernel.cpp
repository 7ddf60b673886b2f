#include "kernel.h"

#include <map>

#include "../runtime/errors.h"

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

KernelPtr make(const std::string& name, const Description& description) {
  const auto found = registered().find(name);
  require(found != registered().end(), "there is no dynamic linear kernel \"", name, "\"");
  return found->second(description);
}

}  // namespace x86quant::dynamic

#include "packer.h"

#include <map>

namespace x86quant {
namespace {

std::map<std::string, Packer>& packers() {
  static std::map<std::string, Packer> registered;
  return registered;
}

}  // namespace

RegisterPacker::RegisterPacker(const std::string& name, Packer packer) {
  packers().emplace(name, std::move(packer));
}

RegisterStockPacker::RegisterStockPacker(const char* engine, KeyedBy keyed_by, bool unpacks) {
  RegisterPacker(engine,
                 {[engine](const auto& weight, const auto& bias) {
                    return stock_linear(engine_named(engine), weight, bias);
                  },
                  [engine](const auto& weight, const auto& bias, const ConvGeometry& geometry) {
                    return stock_conv<2>(engine_named(engine), weight, bias, geometry);
                  },
                  [engine](const auto& weight, const auto& bias, const ConvGeometry& geometry) {
                    return stock_conv<3>(engine_named(engine), weight, bias, geometry);
                  },
                  keyed_by, unpacks});
}

const Packer& packer(const std::string& name) {
  const auto found = packers().find(name);
  TORCH_CHECK_VALUE(found != packers().end(), "x86quant: nothing packs weights for \"", name,
                    "\"; declare a RegisterPacker of this name beside the kernel");
  return found->second;
}

}  // namespace x86quant

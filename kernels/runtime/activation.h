// Activations by name.
#pragma once

#include <map>
#include <string>

#include "../native/native.h"
#include "errors.h"

namespace x86quant::runtime {

inline int32_t activation_code(const std::string& name) {
  static const std::map<std::string, int32_t> codes = {{"", XQ_ACT_NONE},
                                                       {"relu", XQ_ACT_RELU},
                                                       {"gelu", XQ_ACT_GELU},
                                                       {"gelu_tanh", XQ_ACT_GELU_TANH},
                                                       {"silu", XQ_ACT_SILU},
                                                       {"sigmoid", XQ_ACT_SIGMOID},
                                                       {"tanh", XQ_ACT_TANH}};
  const auto found = codes.find(name);
  require(found != codes.end(), "there is no activation \"", name, "\"");
  return found->second;
}

}  // namespace x86quant::runtime

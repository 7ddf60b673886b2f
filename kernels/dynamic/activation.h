// Activations by name.
#pragma once

#include <map>
#include <string>

#include "../native/native.h"

namespace x86quant::dynamic {

inline int32_t activation_code(const std::string& name) {
  static const std::map<std::string, int32_t> codes = {{"", XQ_ACT_NONE},
                                                       {"relu", XQ_ACT_RELU},
                                                       {"gelu", XQ_ACT_GELU},
                                                       {"gelu_tanh", XQ_ACT_GELU_TANH},
                                                       {"silu", XQ_ACT_SILU}};
  return codes.at(name);
}

}  // namespace x86quant::dynamic

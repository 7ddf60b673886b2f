// What a call of the library ends with when it does not do what was asked.
#pragma once

#include <stdexcept>
#include <string>

#include "../runtime/errors.h"

namespace x86quant::serving {

struct Failure : std::runtime_error {
  template <class... Parts>
  explicit Failure(int code, const Parts&... parts) : std::runtime_error(joined(parts...)), status(code) {}
  Failure(int code, const Refused& refused) : std::runtime_error(refused.what()), status(code) {}
  int status;  // x86quant_status
};

}  // namespace x86quant::serving

// What the runtime throws, without torch. Python gets a ValueError for a Refused, else a RuntimeError.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace x86quant {

// Something that the caller gave is wrong.
struct Refused : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

template <class... Parts>
std::string joined(const Parts&... parts) {
  std::ostringstream text;
  text << "x86quant: ";
  (text << ... << parts);
  return text.str();
}

// Throws a Refused whose message is made of `parts`, unless `holds`.
template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) throw Refused(joined(parts...));
}

}  // namespace x86quant

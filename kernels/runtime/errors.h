// What the runtime throws, without torch. Python gets a ValueError for a Refused, else a RuntimeError.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace x86quant {

// Something that the caller gave is wrong.
struct Refused : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

namespace errors {

// Not by streams, some of whose symbols are younger than the libraries that wheels are for.
inline void append(std::string& to, std::string_view part) { to += part; }
template <class Number>
requires std::is_arithmetic_v<Number>
void append(std::string& to, Number part) {
  to += std::to_string(part);
}

}  // namespace errors

template <class... Parts>
std::string joined(const Parts&... parts) {
  std::string text = "x86quant: ";
  (errors::append(text, parts), ...);
  return text;
}

// Throws a Refused whose message is made of `parts`, unless `holds`.
template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) throw Refused(joined(parts...));
}

// The same where the parts take time to make: they are made only if it does not hold.
#define X86QUANT_REQUIRE(holds, ...)                                   \
  do {                                                                 \
    if (!(holds)) throw ::x86quant::Refused(::x86quant::joined(__VA_ARGS__)); \
  } while (false)

}  // namespace x86quant

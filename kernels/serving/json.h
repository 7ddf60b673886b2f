// JSON, read strictly: each key once, no more nesting than the reader's own limit, numbers as they are written.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace x86quant::serving {

class Json {
 public:
  using List = std::vector<Json>;
  using Object = std::map<std::string, Json, std::less<>>;
  std::variant<std::monostate, bool, int64_t, double, std::string, List, Object> value;

  // Throws a Refused that says where the text is wrong.
  static Json parse(std::string_view text);

  // Each throws a Refused, which names `what`, where the value is of another kind.
  bool flag(const char* what) const;
  int64_t integer(const char* what) const;
  double real(const char* what) const;
  const std::string& text(const char* what) const;
  const List& list(const char* what) const;
  const Object& object(const char* what) const;
  std::vector<int64_t> integers(const char* what) const;
  // Of an object, which must have the key.
  const Json& at(std::string_view key) const;
  bool is_null() const { return value.index() == 0; }
};

}  // namespace x86quant::serving

#include "json.h"

#include <locale.h>
#include <stdlib.h>

#include <charconv>
#include <cmath>

#include "../runtime/errors.h"

namespace x86quant::serving {
namespace {

constexpr int kDeepest = 32;

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Json whole() {
    Json found = any(0);
    skip();
    if (at_ != text_.size()) fail("something follows the value");
    return found;
  }

 private:
  [[noreturn]] void fail(const char* why) const { throw Refused(joined("bad JSON at byte ", at_, ": ", why)); }

  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r'))
      ++at_;
  }

  char next() {
    if (at_ >= text_.size()) fail("it ends too early");
    return text_[at_++];
  }

  bool take(char wanted) {
    skip();
    if (at_ >= text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  void word(std::string_view wanted) {
    if (text_.substr(at_, wanted.size()) != wanted) fail("unknown word");
    at_ += wanted.size();
  }

  Json any(int depth) {
    if (depth > kDeepest) fail("it is nested too deeply");
    skip();
    if (at_ >= text_.size()) fail("it ends too early");
    switch (text_[at_]) {
      case '{': return object(depth);
      case '[': return list(depth);
      case '"': return {string()};
      case 't': word("true"); return {true};
      case 'f': word("false"); return {false};
      case 'n': word("null"); return {};
      default: return number();
    }
  }

  Json object(int depth) {
    Json::Object all;
    ++at_;
    if (take('}')) return {std::move(all)};
    do {
      skip();
      if (at_ >= text_.size() || text_[at_] != '"') fail("a key is missing");
      std::string key = string();
      if (!take(':')) fail("a colon is missing");
      if (!all.emplace(std::move(key), any(depth + 1)).second) fail("a key occurs twice");
    } while (take(','));
    if (!take('}')) fail("an object does not end");
    return {std::move(all)};
  }

  Json list(int depth) {
    Json::List all;
    ++at_;
    if (take(']')) return {std::move(all)};
    do all.push_back(any(depth + 1));
    while (take(','));
    if (!take(']')) fail("a list does not end");
    return {std::move(all)};
  }

  std::string string() {
    std::string found;
    ++at_;
    for (char c; (c = next()) != '"';) {
      if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string");
      if (c != '\\') {
        found += c;
        continue;
      }
      switch (const char escaped = next()) {
        case '"': case '\\': case '/': found += escaped; break;
        case 'n': found += '\n'; break;
        case 't': found += '\t'; break;
        case 'r': found += '\r'; break;
        case 'b': found += '\b'; break;
        case 'f': found += '\f'; break;
        case 'u': unicode(found); break;
        default: fail("an unknown escape");
      }
    }
    return found;
  }

  // A code unit as UTF-8; halves of pairs stay apart, since names are only compared.
  void unicode(std::string& to) {
    unsigned code = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = next();
      const unsigned digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : 16;
      if (digit == 16) fail("a bad \\u escape");
      code = code * 16 + digit;
    }
    if (code < 0x80) {
      to += static_cast<char>(code);
    } else if (code < 0x800) {
      to += static_cast<char>(0xc0 | code >> 6);
      to += static_cast<char>(0x80 | (code & 0x3f));
    } else {
      to += static_cast<char>(0xe0 | code >> 12);
      to += static_cast<char>(0x80 | (code >> 6 & 0x3f));
      to += static_cast<char>(0x80 | (code & 0x3f));
    }
  }

  Json number() {
    const size_t first = at_;
    bool is_real = false;
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '.' || c == 'e' || c == 'E') is_real = true;
      else if (!(c >= '0' && c <= '9') && c != '-' && c != '+') break;
    }
    const char *begin = text_.data() + first, *end = text_.data() + at_;
    if (is_real) {
      // Not from_chars, which is younger than the libraries that wheels are for. Always with a point.
      static const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
      const std::string digits(begin, end);
      char* stop = nullptr;
      const double found = strtod_l(digits.c_str(), &stop, plain);
      if (stop != digits.c_str() + digits.size() || !std::isfinite(found)) fail("a bad number");
      return {found};
    }
    int64_t found = 0;
    const auto [stop, error] = std::from_chars(begin, end, found);
    if (error != std::errc() || stop != end) fail("a bad number");
    return {found};
  }

  std::string_view text_;
  size_t at_ = 0;
};

template <class T>
const T& as(const Json& json, const char* what, const char* kind) {
  const T* found = std::get_if<T>(&json.value);
  require(found != nullptr, what, " is not ", kind);
  return *found;
}

}  // namespace

Json Json::parse(std::string_view text) { return Reader(text).whole(); }

bool Json::flag(const char* what) const { return as<bool>(*this, what, "true or false"); }
int64_t Json::integer(const char* what) const { return as<int64_t>(*this, what, "an integer"); }
double Json::real(const char* what) const { return as<double>(*this, what, "a real number"); }
const std::string& Json::text(const char* what) const { return as<std::string>(*this, what, "a text"); }
const Json::List& Json::list(const char* what) const { return as<List>(*this, what, "a list"); }
const Json::Object& Json::object(const char* what) const { return as<Object>(*this, what, "an object"); }

std::vector<int64_t> Json::integers(const char* what) const {
  std::vector<int64_t> all;
  for (const Json& item : list(what)) all.push_back(item.integer(what));
  return all;
}

const Json& Json::at(std::string_view key) const {
  const Object& all = object("an entry of the file");
  const auto found = all.find(key);
  require(found != all.end(), "an entry of the file lacks \"", key, "\"");
  return found->second;
}

}  // namespace x86quant::serving

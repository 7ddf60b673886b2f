// Constant numbers that a step or a pack reads, whoever owns their memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace x86quant::runtime {

enum class Type { kByte, kChar, kHalf, kFloat, kOther };

inline const char* name_of(Type type) {
  switch (type) {
    case Type::kByte: return "Byte";
    case Type::kChar: return "Char";
    case Type::kHalf: return "Half";
    case Type::kFloat: return "Float";
    case Type::kOther: break;
  }
  return "another";
}

inline size_t bytes_of(Type type) { return type == Type::kFloat ? 4 : type == Type::kHalf ? 2 : 1; }

// Contiguous.
struct Table {
  const void* data = nullptr;
  Type type = Type::kOther;
  int64_t count = 0;
  std::shared_ptr<const void> owner;

  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
};

}  // namespace x86quant::runtime

// Constant numbers that a step or a pack reads, whoever owns their memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace x86quant::runtime {

enum class Type { kBool, kByte, kChar, kShort, kInt, kLong, kHalf, kBFloat16, kFloat, kDouble, kOther };

struct TypeFacts {
  const char *name, *torch_name;
  size_t bytes;
};

inline TypeFacts facts_of(Type type) {
  switch (type) {
    case Type::kBool: return {"Bool", "bool", 1};
    case Type::kByte: return {"Byte", "uint8", 1};
    case Type::kChar: return {"Char", "int8", 1};
    case Type::kShort: return {"Short", "int16", 2};
    case Type::kInt: return {"Int", "int32", 4};
    case Type::kLong: return {"Long", "int64", 8};
    case Type::kHalf: return {"Half", "float16", 2};
    case Type::kBFloat16: return {"BFloat16", "bfloat16", 2};
    case Type::kFloat: return {"Float", "float32", 4};
    case Type::kDouble: return {"Double", "float64", 8};
    case Type::kOther: break;
  }
  return {"another", "another", 1};
}

inline const char* name_of(Type type) { return facts_of(type).name; }
inline size_t bytes_of(Type type) { return facts_of(type).bytes; }

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

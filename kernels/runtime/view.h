// A tensor's memory as kernels see it, whoever owns it.
#pragma once

#include <string>
#include <vector>

#include "errors.h"
#include "table.h"

namespace x86quant::runtime {

// Sizes as they are printed: "[2, 3]".
inline std::string sizes_text(const int64_t* sizes, int64_t dims) {
  std::string text = "[";
  for (int64_t i = 0; i < dims; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

// Sizes and strides are the owner's, strides in elements.
struct View {
  const void* data = nullptr;
  Type type = Type::kOther;
  bool is_cpu = false;
  int64_t dims = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;

  // Of one dimension; negative ones count from the last.
  int64_t size(int64_t i) const { return sizes[i < 0 ? dims + i : i]; }
  int64_t stride(int64_t i) const { return strides[i < 0 ? dims + i : i]; }
  int64_t count() const {
    int64_t product = 1;
    for (int64_t i = 0; i < dims; ++i) product *= sizes[i];
    return product;
  }
  std::vector<int64_t> shape() const { return {sizes, sizes + dims}; }
  std::string text() const { return sizes_text(sizes, dims); }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t i = dims - 1; i >= 0; --i) {
      if (sizes[i] == 0) return true;
      if (sizes[i] != 1 && strides[i] != expected) return count() == 0;
      expected *= sizes[i];
    }
    return true;
  }
  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
};

}  // namespace x86quant::runtime

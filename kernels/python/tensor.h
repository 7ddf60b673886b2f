// Tensors of torch: read by the exchange table of DLPack, and made by it.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "../runtime/table.h"
#include "../runtime/view.h"
#include "torch_api.h"

namespace x86quant::python {

using runtime::Type;
using runtime::View;

// A tensor of Python's, and how it lies in memory as long as nobody changes it. With the GIL.
class Tensor {
 public:
  // Throws a WrongType unless it is a tensor, and whatever torch raises of one that has no memory. Of one that is to be
  // negated when it is read, it is what torch makes of that.
  explicit Tensor(PyObject* object);
  // The same of one that is exactly a tensor and as it lies; nothing of any other.
  static std::optional<Tensor> plain(PyObject* object);

  const View& view() const { return view_; }
  const View* operator->() const { return &view_; }
  PyObject* object() const { return object_.get(); }
  // This, or a copy that is.
  Tensor contiguous() const;

 private:
  Tensor() = default;
  bool look();  // false with an exception set

  Ref object_;
  View view_;
};

using Tensors = std::vector<Tensor>;
using OptionalTensor = std::optional<Tensor>;

// This, or a copy that is; nothing of nothing.
inline OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(tensor->contiguous()) : std::nullopt;
}

// A view of the first, nothing of nothing.
std::vector<View> views_of(const Tensors& tensors);

// Memory for a result, which becomes a tensor at the end.
class NewTensor {
 public:
  NewTensor(Type type, std::vector<int64_t> sizes);  // contiguous
  NewTensor(Type type, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

  template <class T = void>
  T* data() const {
    return static_cast<T*>(memory_->dl_tensor.data);
  }
  int64_t count() const;
  // The tensor, a new reference. With the GIL, once.
  PyObject* release();

 private:
  struct Delete {
    void operator()(DLManagedTensorVersioned* memory) const { memory->deleter(memory); }
  };
  std::unique_ptr<DLManagedTensorVersioned, Delete> memory_;
};

// What `tensor` holds, contiguous and kept, though not by an object of Python's.
runtime::Table table_of(const Tensor& tensor);
std::optional<runtime::Table> table_of(const OptionalTensor& tensor);

// The numbers of `table` as a tensor of one dimension, a new reference.
PyObject* tensor_of(const runtime::Table& table);

}  // namespace x86quant::python

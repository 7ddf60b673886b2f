// What a function of ours was called with, argument by argument.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tensor.h"

namespace x86quant::python {

// The items of a list or a tuple, borrowed; it must not change meanwhile.
class Items {
 public:
  explicit Items(PyObject* given) : given_(given), is_list_(PyList_Check(given)) {
    if (!is_list_ && !PyTuple_Check(given)) throw WrongType("x86quant: a list or a tuple is wanted");
    count_ = static_cast<size_t>(is_list_ ? PyList_Size(given) : PyTuple_Size(given));
  }
  size_t size() const { return count_; }
  PyObject* operator[](size_t i) const {
    const auto at = static_cast<Py_ssize_t>(i);
    PyObject* item = is_list_ ? PyList_GetItem(given_, at) : PyTuple_GetItem(given_, at);
    if (item == nullptr) throw Raised();
    return item;
  }

 private:
  PyObject* given_;
  bool is_list_;
  size_t count_;
};

template <class T, class Make>
std::vector<T> all_of(PyObject* list, const Make& make) {
  const Items items(list);
  std::vector<T> found;
  found.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) found.push_back(make(items[i]));
  return found;
}

inline Tensors tensors_of(PyObject* list) {
  return all_of<Tensor>(list, [](PyObject* item) { return Tensor(item); });
}

// Nothing if one of them is no plain tensor: see Tensor::plain.
inline std::optional<Tensors> plain_tensors(PyObject* list) {
  const Items items(list);
  Tensors found;
  found.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    std::optional<Tensor> x = Tensor::plain(items[i]);
    if (!x) return std::nullopt;
    found.push_back(std::move(*x));
  }
  return found;
}

inline OptionalTensor optional_tensor(PyObject* object) {
  return object == Py_None ? std::nullopt : OptionalTensor(Tensor(object));
}

// By position; those that are missing at the end are None.
class Arguments {
 public:
  Arguments(const char* function, PyObject* const* items, Py_ssize_t count, Py_ssize_t least, Py_ssize_t most)
      : items_(items), count_(count) {
    if (count < least || count > most)
      throw WrongType(joined(function, " takes ", static_cast<int64_t>(most), " arguments, got ", static_cast<int64_t>(count)));
  }
  Arguments(const char* function, PyObject* const* items, Py_ssize_t count, Py_ssize_t all)
      : Arguments(function, items, count, all, all) {}

  PyObject* operator[](Py_ssize_t i) const { return i < count_ ? items_[i] : Py_None; }
  Tensor tensor(Py_ssize_t i) const { return Tensor((*this)[i]); }
  OptionalTensor optional(Py_ssize_t i) const { return optional_tensor((*this)[i]); }
  Tensors tensors(Py_ssize_t i) const { return tensors_of((*this)[i]); }
  int64_t integer(Py_ssize_t i) const { return integer_of((*this)[i]); }
  double real(Py_ssize_t i) const { return real_of((*this)[i]); }
  bool flag(Py_ssize_t i) const {
    const int found = PyObject_IsTrue((*this)[i]);
    if (found < 0) throw Raised();
    return found == 1;
  }
  std::string text(Py_ssize_t i) const { return text_of((*this)[i]); }
  std::string optional_text(Py_ssize_t i) const { return (*this)[i] == Py_None ? std::string() : text(i); }
  std::vector<int64_t> integers(Py_ssize_t i) const { return all_of<int64_t>((*this)[i], integer_of); }
  std::vector<std::string> texts(Py_ssize_t i) const { return all_of<std::string>((*this)[i], text_of); }

 private:
  PyObject* const* items_;
  Py_ssize_t count_;
};

}  // namespace x86quant::python

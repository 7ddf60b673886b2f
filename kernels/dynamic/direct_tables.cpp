#include "direct_tables.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "../runtime/somebody_watches.h"
#include "tables.h"

namespace x86quant::dynamic {
namespace {

// The items of a list or a tuple, which `args` keeps alive.
struct Items {
  explicit Items(PyObject* given) {
    if (!PyList_Check(given) && !PyTuple_Check(given))
      throw torch::TypeError("try_look_up takes lists and whether offsets have a last one");
    items = PySequence_Fast_ITEMS(given);
    count = static_cast<size_t>(PySequence_Fast_GET_SIZE(given));
  }
  PyObject** items = nullptr;
  size_t count = 0;
};

// False if one of them is a subclass, which may be anything, or is to be negated when it is read.
bool tensors_of(const Items& given, std::vector<at::Tensor>& found) {
  found.reserve(given.count);
  for (size_t i = 0; i < given.count; ++i) {
    if (!THPVariable_CheckExact(given.items[i])) return false;
    found.push_back(THPVariable_Unpack(given.items[i]));
    if (found.back().is_neg()) return false;
  }
  return true;
}

}  // namespace

PyObject* try_look_up(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 7) throw torch::TypeError("try_look_up takes seven arguments");
  if (runtime::somebody_watches()) Py_RETURN_NONE;
  std::vector<at::Tensor> operands[4];
  for (size_t i = 0; i < 4; ++i)
    if (!tensors_of(Items(args[i]), operands[i])) Py_RETURN_NONE;
  std::vector<int64_t> geometry;
  const Items numbers(args[4]), words(args[5]);
  geometry.reserve(numbers.count);
  for (size_t i = 0; i < numbers.count; ++i) {
    geometry.push_back(PyLong_AsLongLong(numbers.items[i]));
    if (geometry.back() == -1 && PyErr_Occurred()) throw python_error();
  }
  std::vector<std::string> names;
  names.reserve(words.count);
  for (size_t i = 0; i < words.count; ++i) {
    const char* name = PyUnicode_AsUTF8(words.items[i]);
    if (name == nullptr) throw python_error();
    names.emplace_back(name);
  }
  const bool last = args[6] == Py_True;
  at::Tensor out;
  {
    pybind11::gil_scoped_release no_gil;
    out = Tables(std::move(operands[0]), geometry, std::move(names)).run(operands[1], operands[2], operands[3], last);
  }
  return THPVariable_Wrap(std::move(out));
  END_HANDLE_TH_ERRORS
}

}  // namespace x86quant::dynamic

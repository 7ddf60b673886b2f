// Building and running a program from Python without torch's dispatcher. A call through torch.ops costs tens of
// microseconds once a network has pushed the interpreter's data out of the cache, and torch takes as long to find
// out the types of a dictionary's values.
#include <ATen/Parallel.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/api/object.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include "../dynamic/direct_tables.h"
#include "../dynamic/row_linear.h"
#include "somebody_watches.h"
#include "torch_program.h"
#include "torch_tables.h"
#include "watch.h"

namespace x86quant::runtime {
namespace {

c10::intrusive_ptr<TorchProgram> program_of(PyObject* number) {
  if (!PyLong_Check(number)) throw torch::TypeError("a program's handle is a number");
  const int64_t handle = PyLong_AsLongLong(number);
  if (handle == -1 && PyErr_Occurred()) throw python_error();
  c10::intrusive_ptr<TorchProgram> program = ProgramHandles::find(handle);
  TORCH_CHECK_VALUE(program, "x86quant: ", handle, " is the handle of no program that is alive");
  return program;
}

int64_t integer_of(PyObject* number) {
  const int64_t value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred()) throw python_error();
  return value;
}

// Of integers unless the first is a real; the rest must be like it.
Field list_of(PyObject* list) {
  const Py_ssize_t size = PyList_GET_SIZE(list);
  const bool reals = size > 0 && PyFloat_Check(PyList_GET_ITEM(list, 0));
  Words integers;
  std::vector<double> doubles;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    if (!(reals ? PyFloat_Check(item) : PyLong_Check(item)))
      throw torch::TypeError("x86quant: a list of a step holds integers or reals alone");
    reals ? doubles.push_back(PyFloat_AS_DOUBLE(item)) : integers.push_back(integer_of(item));
  }
  return reals ? Field(std::move(doubles)) : Field(std::move(integers));
}

Field field_of(PyObject* value) {
  if (PyBool_Check(value)) return Field(value == Py_True);
  if (PyLong_Check(value)) return integer_of(value);
  if (PyFloat_Check(value)) return PyFloat_AS_DOUBLE(value);
  if (PyList_Check(value)) return list_of(value);
  if (THPVariable_Check(value)) return table_of(THPVariable_Unpack(value));
  if (value == Py_None) return {};
  try {
    const c10::IValue object(py::cast<torch::jit::Object>(py::handle(value))._ivalue());
    if (object.type() == c10::getCustomClassType<c10::intrusive_ptr<dynamic::RowLinear>>())
      return object.toCustomClass<dynamic::RowLinear>()->pack;
    return object.toCustomClass<TorchPack>()->pack;
  } catch (const py::cast_error&) {
    throw torch::TypeError(std::string("x86quant: a field of a step cannot be of type ") + Py_TYPE(value)->tp_name);
  }
}

// add_step(handle, kind, fields): appends a step to a program; see step.h.
PyObject* add_step(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3 || !PyUnicode_Check(args[1]) || !PyDict_Check(args[2]))
    throw torch::TypeError("add_step takes a program's handle, a kind and a dictionary");
  const c10::intrusive_ptr<TorchProgram> program = program_of(args[0]);
  StepFields::Values fields;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(args[2], &at, &key, &value);) {
    const char* name = PyUnicode_AsUTF8(key);
    if (name == nullptr) throw python_error();
    fields.emplace(name, field_of(value));
  }
  const char* kind = PyUnicode_AsUTF8(args[1]);
  if (kind == nullptr) throw python_error();
  with_value_errors([&] { program->steps->add(kind, fields); });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// try_run(handle, inputs): a tuple of results, or None if the program is for other inputs or another number of
// threads, or if somebody watches.
PyObject* try_run(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2 || !PyTuple_Check(args[1])) throw torch::TypeError("try_run takes a program's handle and a tuple");
  const c10::intrusive_ptr<TorchProgram> program = program_of(args[0]);
  std::vector<at::Tensor> inputs;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i) {
    PyObject* input = PyTuple_GET_ITEM(args[1], i);
    if (!THPVariable_CheckExact(input)) Py_RETURN_NONE;  // a subclass may be anything
    inputs.push_back(THPVariable_Unpack(input));
  }
  if (somebody_watches()) Py_RETURN_NONE;
  if (!program->takes(inputs) || program->steps->threads() != at::get_num_threads()) Py_RETURN_NONE;
  std::vector<at::Tensor> outputs;
  {
    pybind11::gil_scoped_release no_gil;
    outputs = with_value_errors([&] { return program->run(inputs); });
  }
  THPObjectPtr results(PyTuple_New(static_cast<Py_ssize_t>(outputs.size())));
  if (!results) throw python_error();
  for (size_t i = 0; i < outputs.size(); ++i)
    PyTuple_SET_ITEM(results.get(), i, THPVariable_Wrap(std::move(outputs[i])));
  return results.release();
  END_HANDLE_TH_ERRORS
}

// parts_up_to(whole, count): a list of whole[i, :, :, :count] for each i, or None if somebody watches.
PyObject* parts_up_to(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2 || !THPVariable_CheckExact(args[0]) || !PyLong_Check(args[1]))
    throw torch::TypeError("parts_up_to takes a tensor and a number");
  if (somebody_watches()) Py_RETURN_NONE;
  const at::Tensor& whole = THPVariable_Unpack(args[0]);
  const int64_t most = integer_of(args[1]);
  TORCH_CHECK_VALUE(whole.dim() >= 4 && most >= 0 && most <= whole.size(3), "x86quant: a tensor of ", whole.sizes(),
                    " has no ", most, " places along its dimension 3");
  std::vector<int64_t> sizes(whole.sizes().begin() + 1, whole.sizes().end());
  sizes[2] = most;
  const at::IntArrayRef strides = whole.strides().slice(1);
  THPObjectPtr parts(PyList_New(whole.size(0)));
  if (!parts) throw python_error();
  const at::AutoDispatchBelowADInplaceOrView plain;  // nothing here has a gradient
  for (int64_t i = 0; i < whole.size(0); ++i)
    PyList_SET_ITEM(parts.get(), i, THPVariable_Wrap(whole.as_strided(sizes, strides, whole.storage_offset() + i * whole.stride(0))));
  return parts.release();
  END_HANDLE_TH_ERRORS
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"add_step", as_method(add_step), METH_FASTCALL, nullptr},
    {"parts_up_to", as_method(parts_up_to), METH_FASTCALL, nullptr},
    {"try_look_up", as_method(dynamic::try_look_up), METH_FASTCALL, nullptr},
    {"try_run", as_method(try_run), METH_FASTCALL, nullptr},
    {"unchanged_since", unchanged_since, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace x86quant::runtime

PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&x86quant::runtime::module);
  PyObject* watch = x86quant::runtime::watch_type();
  if (module == nullptr || watch == nullptr || PyModule_AddObject(module, "Watch", watch) < 0) return nullptr;
  return module;
}

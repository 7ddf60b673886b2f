// Running a program from Python without torch's dispatcher. A call through torch.ops costs tens of
// microseconds once a network has pushed the interpreter's data out of the cache.
#include <ATen/Parallel.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "program.h"

namespace x86quant::runtime {
namespace {

// try_run(handle, inputs): a tuple of results, or None if the program is for other inputs or another number of
// threads.
PyObject* try_run(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2 || !PyLong_Check(args[0]) || !PyTuple_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "try_run takes a program's handle and a tuple");
    return nullptr;
  }
  const int64_t handle = PyLong_AsLongLong(args[0]);
  if (handle == -1 && PyErr_Occurred()) return nullptr;
  const c10::intrusive_ptr<Program> program = ProgramHandles::find(handle);
  TORCH_CHECK_VALUE(program, "x86quant: ", handle, " is the handle of no program that is alive");
  std::vector<at::Tensor> inputs;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i) {
    PyObject* input = PyTuple_GET_ITEM(args[1], i);
    if (!THPVariable_CheckExact(input)) Py_RETURN_NONE;  // a subclass may be anything
    inputs.push_back(THPVariable_Unpack(input));
  }
  if (!program->takes(inputs) || program->threads() != at::get_num_threads()) Py_RETURN_NONE;
  std::vector<at::Tensor> outputs;
  {
    pybind11::gil_scoped_release no_gil;
    outputs = program->run(inputs);
  }
  THPObjectPtr results(PyTuple_New(static_cast<Py_ssize_t>(outputs.size())));
  if (!results) throw python_error();
  for (size_t i = 0; i < outputs.size(); ++i)
    PyTuple_SET_ITEM(results.get(), i, THPVariable_Wrap(std::move(outputs[i])));
  return results.release();
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"try_run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(try_run)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace x86quant::runtime

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&x86quant::runtime::module); }

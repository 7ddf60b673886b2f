// Running a program from Python without torch's dispatcher. A call through torch.ops costs tens of
// microseconds once a network has pushed the interpreter's data out of the cache.
#include <ATen/Parallel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <vector>

#include "program.h"
#include "watch.h"

namespace x86quant::runtime {
namespace {

// Keys of an ordinary tensor in memory. Any other means that the bytes are not the values (sparse,
// negated, quantized) or that somebody must see the op (a subclass, a transform, a fake tensor).
constexpr c10::DispatchKeySet kPlainTensor =
    c10::DispatchKeySet(c10::DispatchKey::CPU) | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) |
    c10::DispatchKeySet(c10::DispatchKey::AutogradCPU) | c10::DispatchKeySet(c10::DispatchKey::AutocastCPU);

// Keys that a thread has when nobody watches the ops it calls: no tracer, mode or transform.
const c10::DispatchKeySet kUnwatched = c10::default_included_set | c10::autocast_dispatch_keyset;

bool is_plain(const at::Tensor& x) {
  return kPlainTensor.has_all(x.key_set()) && x.unsafeGetTensorImpl()->has_storage();
}

// try_run(address, inputs): a tuple of results, or None if the program is for other inputs or
// another number of threads, or if somebody watches the ops that run. The caller keeps the program
// of this address alive.
PyObject* try_run(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2 || !PyLong_Check(args[0]) || !PyTuple_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "try_run takes an address and a tuple");
    return nullptr;
  }
  if (!kUnwatched.has_all(c10::impl::tls_local_dispatch_key_set().included_)) Py_RETURN_NONE;
  const auto* program = reinterpret_cast<const Program*>(PyLong_AsVoidPtr(args[0]));
  std::vector<at::Tensor> inputs;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i) {
    PyObject* input = PyTuple_GET_ITEM(args[1], i);
    if (!THPVariable_CheckExact(input)) Py_RETURN_NONE;  // a subclass may be anything
    inputs.push_back(THPVariable_Unpack(input));
    if (!is_plain(inputs.back())) Py_RETURN_NONE;
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

template <class Function>
PyCFunction function(Function* f) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

PyMethodDef methods[] = {
    {"try_run", function(try_run), METH_FASTCALL, nullptr},
    {"watch", function(watch), METH_FASTCALL, nullptr},
    {"unchanged", function(unchanged), METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace x86quant::runtime

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&x86quant::runtime::module); }

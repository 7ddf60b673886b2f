#include "torch_api.h"

// Of torch's stable C interface, whose headers read much else.
extern "C" {
int32_t aoti_record_function_start(const char* name, void* named, const void* inputs, uint64_t count,
                                   AtenRecordFunctionOpaque** handle);
int32_t aoti_record_function_end(AtenRecordFunctionOpaque* handle);
}

namespace x86quant::python {
namespace {

TorchApi found;

PyObject* attribute(const Ref& of, const char* name) { return Ref(PyObject_GetAttrString(of.get(), name)).release(); }

Ref module(const char* name) { return Ref(PyImport_ImportModule(name)); }

// Whether a function without arguments returns anything but `nothing`.
bool returns_other(PyObject* function, PyObject* nothing) {
  const Ref result(PyObject_CallNoArgs(function));
  return result.get() != nothing;
}

}  // namespace

void find_torch() {
  const Ref torch = module("torch"), inner = module("torch._C"), transforms = module("torch._C._functorch"),
            autograd = module("torch._C._autograd"), nn = module("torch.nn");
  found.tensor = attribute(torch, "Tensor");
  found.parameter = attribute(nn, "Parameter");
  const Ref type = Ref::to(found.tensor);
  const Ref table(PyObject_GetAttrString(found.tensor, "__dlpack_c_exchange_api__"));
  found.exchange = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(table.get(), "dlpack_exchange_api"));
  if (found.exchange == nullptr) throw Raised();
  if (found.exchange->header.version.major != DLPACK_MAJOR_VERSION || !found.exchange->dltensor_from_py_object_no_sync) {
    PyErr_SetString(PyExc_ImportError, "this torch exchanges tensors by another version of DLPack");
    throw Raised();
  }
  found.contiguous = attribute(type, "contiguous");
  found.is_neg = attribute(type, "is_neg");
  found.resolve_neg = attribute(type, "resolve_neg");
  found.dispatch_modes = attribute(inner, "_len_torch_dispatch_stack");
  found.is_tracing = attribute(inner, "_is_tracing");
  found.transforms = attribute(transforms, "peek_interpreter_stack");
  found.is_profiled = attribute(autograd, "_profiler_enabled");
}

const TorchApi& torch_api() { return found; }

bool somebody_watches() {
  const Ref modes(PyObject_CallNoArgs(found.dispatch_modes));
  return integer_of(modes.get()) != 0 || returns_other(found.is_tracing, Py_False) ||
         returns_other(found.transforms, Py_None);
}

Labelled::Labelled(const char* name) {
  if (returns_other(found.is_profiled, Py_False)) aoti_record_function_start(name, nullptr, nullptr, 0, &handle_);
}

Labelled::~Labelled() {
  if (handle_) aoti_record_function_end(handle_);
}

}  // namespace x86quant::python

// Views of a tensor without torch's dispatcher, which takes longer than the rest of a token.
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/object_ptr.h>

#include "fast.h"

namespace x86quant::fast {
namespace {

// Whether a mode, a tracer or a transform must see the ops that run.
bool somebody_watches() {
  return c10::impl::TorchDispatchModeTLS::stack_len() > 0 || torch::jit::tracer::isTracing() ||
         c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

}  // namespace

PyObject* parts_up_to(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* tensor = nullptr;
  long long most = 0;
  if (!PyArg_ParseTuple(args, "OL", &tensor, &most)) return nullptr;
  if (!THPVariable_CheckExact(tensor)) throw torch::TypeError("parts_up_to takes a tensor and a number");
  if (somebody_watches()) Py_RETURN_NONE;
  const at::Tensor& whole = THPVariable_Unpack(tensor);
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

}  // namespace x86quant::fast

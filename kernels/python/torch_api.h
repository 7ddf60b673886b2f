// What is used of torch: its class of tensors, the exchange table of DLPack, and whether anybody looks at what runs.
// No symbol of its C++, whose names and layouts change from version to version.
#pragma once

#include <ATen/dlpack.h>  // DLPack's own header: C, which knows nothing of torch

#include "objects.h"

struct AtenRecordFunctionOpaque;

namespace x86quant::python {

struct TorchApi {
  const DLPackExchangeAPI* exchange;
  PyObject *tensor, *parameter;                        // the classes
  PyObject *contiguous, *is_neg, *resolve_neg;         // methods of tensors
  PyObject *dispatch_modes, *is_tracing, *transforms;  // functions that tell of modes, tracers and transforms
  PyObject* is_profiled;

  // Whether it is a tensor and no object of a subclass, which may be anything.
  bool is_exactly_tensor(PyObject* object) const {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return type == tensor || type == parameter;
  }
  bool is_tensor(PyObject* object) const {
    return is_exactly_tensor(object) || PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(tensor));
  }
};

// Filled once, before anything else here is called; throws where torch has no such thing.
void find_torch();
const TorchApi& torch_api();

// Whether a mode, a tracer or a transform must see the ops that run, so that they go by torch's dispatcher.
bool somebody_watches();

// While it lives, torch's profiler sees a call of this name, if one is running.
class Labelled {
 public:
  explicit Labelled(const char* name);
  ~Labelled();
  Labelled(const Labelled&) = delete;
  Labelled& operator=(const Labelled&) = delete;

 private:
  AtenRecordFunctionOpaque* handle_ = nullptr;
};

}  // namespace x86quant::python

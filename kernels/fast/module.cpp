#include "fast.h"

namespace {

PyMethodDef methods[] = {
    {"parts_up_to", x86quant::fast::parts_up_to, METH_VARARGS, nullptr},
    {"unchanged_since", x86quant::fast::unchanged_since, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fast", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

#define X86QUANT_INIT_OF(name) PyInit_##name
#define X86QUANT_INIT(name) X86QUANT_INIT_OF(name)

// The name of the module is another for each torch and Python: see setup.py.
PyMODINIT_FUNC X86QUANT_INIT(TORCH_EXTENSION_NAME)() {
  PyObject* module = PyModule_Create(&definition);
  PyObject* watch = x86quant::fast::watch_type();
  if (module == nullptr || watch == nullptr || PyModule_AddObject(module, "Watch", watch) < 0) return nullptr;
  return module;
}

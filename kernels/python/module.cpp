#include "module.h"

#include "torch_api.h"

namespace x86quant::python {
namespace {

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

PyObject* make_module() {
  find_torch();
  Ref module(PyModule_Create(&definition));
#ifdef Py_GIL_DISABLED  // else the import would turn it on again
  if (PyUnstable_Module_SetGIL(module.get(), Py_MOD_GIL_NOT_USED) < 0) throw Raised();
#endif
  for (const Part& part : {program_part(), runtime_part(), row_part(), linear_part(), recurrent_part(),
                           product_part(), table_part(), watch_part(), calibration_part()}) {
    if (part.functions && PyModule_AddFunctions(module.get(), part.functions) < 0) throw Raised();
    if (part.add_types) part.add_types(module.get());
  }
  return module.release();
}

}  // namespace

void add_type(PyObject* module, const char* name, PyObject* owned) {
  const Ref type(owned);
  if (PyModule_AddObjectRef(module, name, type.get()) < 0) throw Raised();
}

}  // namespace x86quant::python

PyMODINIT_FUNC PyInit__C() {
  return x86quant::python::answer([] { return x86quant::python::make_module(); });
}

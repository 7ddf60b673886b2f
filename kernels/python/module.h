// The parts of the module `x86quant._C`, each of which adds its functions and types.
#pragma once

#include "objects.h"

namespace x86quant::python {

// What a file gives the module: functions, and types, which `add_types` makes.
struct Part {
  PyMethodDef* functions;
  void (*add_types)(PyObject* module);  // or null
};

void add_type(PyObject* module, const char* name, PyObject* owned);

Part program_part();
Part runtime_part();
Part row_part();
Part linear_part();
Part recurrent_part();
Part product_part();
Part table_part();
Part watch_part();
Part calibration_part();

}  // namespace x86quant::python

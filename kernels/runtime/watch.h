// Telling, at every call, whether the tensors of a model are as they were when it was packed.
#pragma once

#include <Python.h>

namespace x86quant::runtime {

// The Python type Watch(dictionaries), of a tuple of the dictionaries that hold a model's tensors and modules.
// Its method `holds` says whether nothing in them was replaced, moved or written to since. A new reference, or
// null with an exception set.
PyObject* watch_type();

}  // namespace x86quant::runtime

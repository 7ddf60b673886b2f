// Telling, at every call, whether the tensors of a model are as they were when it was packed.
#pragma once

#include <Python.h>

namespace x86quant::runtime {

// The Python type Watch(dictionaries), of a tuple of the dictionaries that hold a model's tensors and modules.
// Its method `holds` says whether nothing in them was replaced, moved or written to since. A new reference, or
// null with an exception set.
PyObject* watch_type();

// The Python function unchanged_since(dictionaries, counts), of a tuple of dictionaries and a bytearray of 8 bytes for
// each: whether none of them was given, or lost, an entry or had one replaced since the last call with these counts,
// which are brought up to date. It may answer no where nothing changed.
PyObject* unchanged_since(PyObject* self, PyObject* args);

}  // namespace x86quant::runtime

// What is faster where it was built for the very torch and Python at hand: it reads their objects. Everything here has its
// slower form in kernels/python/watch.cpp, or in Python.
#pragma once

#define X86QUANT_OF_ONE_PYTHON
#include <Python.h>

namespace x86quant::fast {

// The Python type Watch: see python/watch_object.h. A new reference, or null with an exception set.
PyObject* watch_type();

// unchanged_since(dictionaries, counts), of a tuple of dictionaries and a bytearray of 8 bytes for each: whether none of
// them was given, or lost, an entry or had one replaced since the last call with these counts, which are brought up to
// date. It may answer no where nothing changed.
PyObject* unchanged_since(PyObject* self, PyObject* args);

// parts_up_to(whole, count): a list of whole[i, :, :, :count] for each i, or None if somebody watches.
PyObject* parts_up_to(PyObject* self, PyObject* args);

}  // namespace x86quant::fast

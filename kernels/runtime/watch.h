// Telling whether the tensors of a model are as they were when it was packed.
#pragma once

#include <Python.h>

namespace x86quant::runtime {

// watch(dictionary, ...): a capsule that remembers the objects in the dictionaries and, of tensors,
// where their data are and how often they were written to.
PyObject* watch(PyObject*, PyObject* const* args, Py_ssize_t count);

// unchanged(capsule): whether all is as it was. A tensor replaced, moved or written to is a change.
PyObject* unchanged(PyObject*, PyObject* capsule);

}  // namespace x86quant::runtime

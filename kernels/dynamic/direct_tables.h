// Lookups from Python without torch's dispatcher, which takes as long as a small one.
#pragma once

#include <Python.h>

namespace x86quant::dynamic {

// try_look_up(rows, indices, offsets, weights, geometry, names, last_offset), all but the last one lists or tuples:
// as torch.ops.x86quant.look_up_bags; None if somebody watches, or an operand is more than a tensor's memory.
PyObject* try_look_up(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace x86quant::dynamic

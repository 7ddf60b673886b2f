// Telling whether the tensors of a model are as they were when it was packed, by what every torch tells; kernels/fast/ does
// the same faster where it was built for the torch and the Python at hand. The functions here have the same names.
#include "module.h"
#include "tensor.h"
#include "watch_object.h"

namespace x86quant::python {
namespace {

PyObject* interned(const char* text) { return Ref(PyUnicode_InternFromString(text)).release(); }

// How a tensor is: where its data are, how they lie, and how often it was written to.
struct State {
  const void* data = nullptr;
  int64_t version = 0;
  DLDataType type{};
  std::vector<int64_t> geometry;

  bool operator==(const State& o) const {
    return data == o.data && version == o.version && type.code == o.type.code && type.bits == o.type.bits &&
           geometry == o.geometry;
  }
};

State state_of(PyObject* tensor) {
  static PyObject* const version = interned("_version");
  State found;
  DLTensor seen;
  if (torch_api().exchange->dltensor_from_py_object_no_sync(tensor, &seen) == 0) {
    found.data = seen.data, found.type = seen.dtype;
    found.geometry.assign(seen.shape, seen.shape + seen.ndim);
    found.geometry.insert(found.geometry.end(), seen.strides, seen.strides + seen.ndim);
  } else {
    PyErr_Clear();  // sparse, say: without memory of its own
  }
  if (PyObject* number = PyObject_GetAttr(tensor, version)) {
    const Ref counted(number);
    found.version = integer_of(number);
  } else {
    PyErr_Clear();  // torch counts no writes to tensors made in inference mode
  }
  return found;
}

struct Watch {
  std::vector<PyObject*> dictionaries, values;
  std::vector<PyObject*> watched;                    // those of the dictionaries in turn, borrowed from `values`
  std::vector<std::pair<PyObject*, State>> tensors;  // of them

  void remember(PyObject* dictionary) {
    dictionaries.push_back(Py_NewRef(dictionary));
    const size_t first = watched.size();
    each_item(dictionary, [&](PyObject*, PyObject* value) {
      watched.push_back(value);
      values.push_back(Py_NewRef(value));
      return true;
    });
    for (size_t i = first; i < watched.size(); ++i) {
      PyObject* value = watched[i];
      if (!torch_api().is_tensor(value)) continue;
      tensors.emplace_back(value, state_of(value));
      // While its memory is kept no other tensor has that address.
      PyObject* memory = PyObject_CallMethod(value, "untyped_storage", nullptr);
      memory ? values.push_back(memory) : PyErr_Clear();
    }
  }

  bool holds() const {
    size_t i = 0;
    for (PyObject* dictionary : dictionaries)
      if (!each_item(dictionary, [&](PyObject*, PyObject* value) { return i < watched.size() && watched[i++] == value; }))
        return false;
    if (i != watched.size()) return false;
    for (const auto& [tensor, known] : tensors)
      if (!(state_of(tensor) == known)) return false;
    return true;
  }
};

// unchanged_since(dictionaries, counts): there is no way to know.
PyObject* unchanged_since(PyObject*, PyObject*) { return PyBool_FromLong(0); }

// parts_up_to(whole, count): by torch's own ops.
PyObject* parts_up_to(PyObject*, PyObject*) { return none(); }

PyMethodDef functions[] = {
    {"parts_up_to", parts_up_to, METH_VARARGS, nullptr},
    {"unchanged_since", unchanged_since, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

void add_types(PyObject* module) { add_type(module, "Watch", WatchType<Watch>::make_type("x86quant._C.Watch")); }

}  // namespace

Part watch_part() { return {functions, add_types}; }

}  // namespace x86quant::python

// The Python type Watch(dictionaries), of a tuple of the dictionaries that hold a model's tensors and modules: its method
// `holds` says whether nothing in them was replaced, moved or written to since.
#pragma once

#include <new>
#include <utility>
#include <vector>

#include "objects.h"

namespace x86quant::python {

// `Watch` has what is kept, `dictionaries` and `values`, references that this type gives up, and
//   void remember(PyObject* dictionary);  // that it is as it is
//   bool holds() const;
template <class Watch>
class WatchType {
 public:
  // A new reference.
  static PyObject* make_type(const char* name) {
    static PyMethodDef methods[] = {{"holds", holds, METH_NOARGS, "Whether nothing was replaced, moved or written to since."},
                                    {nullptr, nullptr, 0, nullptr}};
    PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                           {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                           {Py_tp_clear, reinterpret_cast<void*>(clear)},
                           {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                           {Py_tp_methods, methods},
                           {0, nullptr}};
    PyType_Spec spec = {name, sizeof(Object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
    return PyType_FromSpec(&spec);
  }

 private:
  struct Object {
    PyObject_HEAD
    Watch watch;
  };

  static Watch& watch_of(PyObject* self) { return reinterpret_cast<Object*>(self)->watch; }

  static PyObject* make(PyTypeObject* type, PyObject* args, PyObject* named) {
    return answer([&]() -> PyObject* {
      PyObject* dictionaries = nullptr;
      if (named != nullptr || !PyArg_ParseTuple(args, "O!", &PyTuple_Type, &dictionaries))
        throw WrongType("x86quant: Watch takes a tuple of dictionaries");
      const Py_ssize_t count = PyTuple_Size(dictionaries);
      for (Py_ssize_t i = 0; i < count; ++i)
        if (!PyDict_Check(PyTuple_GetItem(dictionaries, i))) throw WrongType("x86quant: Watch takes a tuple of dictionaries");
      Ref self(PyType_GenericAlloc(type, 0));
      Watch* watch = new (&watch_of(self.get())) Watch;
      for (Py_ssize_t i = 0; i < count; ++i) watch->remember(PyTuple_GetItem(dictionaries, i));
      return self.release();
    });
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    for (PyObject* object : watch_of(self).dictionaries) Py_VISIT(object);
    for (PyObject* object : watch_of(self).values) Py_VISIT(object);
    return 0;
  }

  static int clear(PyObject* self) {
    Watch emptied;  // first out of reach, then released: a destructor may look at us
    std::swap(emptied, watch_of(self));
    for (PyObject* object : emptied.dictionaries) Py_DECREF(object);
    for (PyObject* object : emptied.values) Py_DECREF(object);
    return 0;
  }

  static void destroy(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    watch_of(self).~Watch();
    PyObject_GC_Del(self);
    Py_DECREF(type);
  }

  static PyObject* holds(PyObject* self, PyObject*) {
    return answer([&] { return PyBool_FromLong(watch_of(self).holds()); });
  }
};

}  // namespace x86quant::python

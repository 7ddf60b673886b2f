// Python types whose objects hold a C++ value.
#pragma once

#include <memory>
#include <new>

#include "objects.h"

namespace x86quant::python {

// What the objects of one type hold: each has a `Held` that it is made with, and nothing that refers to Python.
template <class Held>
class HolderType {
 public:
  // The type, a new reference.
  static PyObject* make(const char* name, PyMethodDef* methods, newfunc constructor = nullptr) {
    PyType_Slot slots[4] = {{Py_tp_dealloc, reinterpret_cast<void*>(destroy)}, {Py_tp_methods, methods}};
    if (constructor) slots[2] = {Py_tp_new, reinterpret_cast<void*>(constructor)};
    const unsigned flags = Py_TPFLAGS_DEFAULT | (constructor ? 0 : Py_TPFLAGS_DISALLOW_INSTANTIATION);
    PyType_Spec spec = {name, sizeof(Object), 0, flags, slots};
    type_ = reinterpret_cast<PyTypeObject*>(Ref(PyType_FromSpec(&spec)).release());
    return Py_NewRef(reinterpret_cast<PyObject*>(type_));
  }

  // An object with that value, a new reference.
  static PyObject* object(Held value) {
    Ref made(PyType_GenericAlloc(type_, 0));
    new (&reinterpret_cast<Object*>(made.get())->value) Held(std::move(value));
    return made.release();
  }

  static bool is_of(PyObject* object) { return Py_TYPE(object) == type_; }
  static Held& of(PyObject* object) { return reinterpret_cast<Object*>(object)->value; }

 private:
  struct Object {
    PyObject_HEAD
    Held value;
  };

  static void destroy(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    of(self).~Held();
    PyObject_Free(self);
    Py_DECREF(type);
  }

  static inline PyTypeObject* type_ = nullptr;
};

}  // namespace x86quant::python

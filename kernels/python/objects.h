// References to Python's objects, and errors between Python and C++. All of it by the limited API: one build serves every
// version of Python.
#pragma once

#ifndef X86QUANT_OF_ONE_PYTHON
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "../runtime/errors.h"

namespace x86quant::python {

// Python's exception is set.
struct Raised {};

// An argument is of another type than is taken: a TypeError.
struct WrongType : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A reference that is given up at the end, with the GIL.
class Ref {
 public:
  Ref() = default;
  // Takes over `owned`; throws what Python has raised where it is null.
  explicit Ref(PyObject* owned) : object_(owned) {
    if (owned == nullptr) throw Raised();
  }
  static Ref to(PyObject* borrowed) { return Ref(Py_NewRef(borrowed)); }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// What `body` returns; null with an exception set for what it throws.
template <class Body>
auto answer(const Body& body) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (const Raised&) {
  } catch (const WrongType& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const Refused& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return {};
}

// What `body` returns, run while other Python threads do.
template <class Body>
auto without_gil(const Body& body) {
  struct Released {
    PyThreadState* state = PyEval_SaveThread();
    ~Released() { PyEval_RestoreThread(state); }
  } const released;
  return body();
}

inline int64_t integer_of(PyObject* number) {
  const int64_t value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred()) throw Raised();
  return value;
}

inline double real_of(PyObject* number) {
  const double value = PyFloat_AsDouble(number);
  if (value == -1 && PyErr_Occurred()) throw Raised();
  return value;
}

inline std::string text_of(PyObject* text) {
  Py_ssize_t size = 0;
  const char* found = PyUnicode_AsUTF8AndSize(text, &size);
  if (found == nullptr) throw Raised();
  return {found, static_cast<size_t>(size)};
}

inline PyObject* to_python(const std::string& text) {
  return Ref(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()))).release();
}
inline PyObject* to_python(int64_t value) { return Ref(PyLong_FromLongLong(value)).release(); }
inline PyObject* none() { return Py_NewRef(Py_None); }

// A tuple of objects that are given away.
template <class... Objects>
PyObject* tuple_of(Objects... owned) {
  PyObject* const items[] = {owned...};
  PyObject* made = PyTuple_New(sizeof...(Objects));
  for (size_t i = 0; i < sizeof...(Objects); ++i)
    made ? (void)PyTuple_SetItem(made, static_cast<Py_ssize_t>(i), items[i]) : Py_DECREF(items[i]);
  return Ref(made).release();
}

// A list of what `make(i)` returns, a new reference.
template <class Make>
PyObject* list_of(size_t count, const Make& make) {
  Ref made(PyList_New(static_cast<Py_ssize_t>(count)));
  for (size_t i = 0; i < count; ++i)
    if (PyList_SetItem(made.get(), static_cast<Py_ssize_t>(i), make(i)) < 0) throw Raised();
  return made.release();
}

// While it lives no other thread changes `object`: where there is a GIL, that sees to it.
class Locked {
 public:
#ifdef Py_GIL_DISABLED
  explicit Locked(PyObject* object) { PyCriticalSection_Begin(&section_, object); }
  ~Locked() { PyCriticalSection_End(&section_); }
#else
  explicit Locked(PyObject*) {}
  ~Locked() {}
#endif
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
#ifdef Py_GIL_DISABLED
  PyCriticalSection section_;
#endif
};

// Gives `body` each key and value of a dictionary, borrowed, until it returns false: whether it never did.
template <class Body>
bool each_item(PyObject* dictionary, const Body& body) {
  const Locked locked(dictionary);
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dictionary, &at, &key, &value);)
    if (!body(key, value)) return false;
  return true;
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace x86quant::python

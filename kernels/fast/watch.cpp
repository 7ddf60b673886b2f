// Telling, at every call, whether the tensors of a model are as they were when it was packed.
#include <torch/csrc/autograd/python_variable.h>  // before Python.h, as torch wants it

#include "fast.h"

#include <cstring>
#include <vector>

#include "../python/watch_object.h"

namespace x86quant::fast {
namespace {

// Where a tensor's data are, which share_memory_ and `tensor.data = other` change.
const void* address_of(const c10::TensorImpl& x) {
  if (!x.has_storage()) return nullptr;
  const auto* start = static_cast<const char*>(x.unsafe_storage().data());
  return start + static_cast<size_t>(x.storage_offset()) * x.itemsize();
}

// How often it was written to, which torch does not count for tensors made in inference mode.
uint32_t version_of(const c10::TensorImpl& x) {
  return x.version_counter().enabled() ? x.version_counter().current_version() : 0;
}

// References to Python objects, and memory, are kept so that no address comes back as another's. Tensors are found
// by their Python objects at every look: torch may exchange what is behind two of them (swap_tensors), and refuses
// where anybody else holds on to it.
struct Watch {
  struct Tensor {
    PyObject* object;  // borrowed from `values`
    const void* data;
    uint32_t version;
    uint32_t rank;
    caffe2::TypeMeta dtype;
    c10::Storage memory;
    const c10::TensorImpl* hint;  // where the tensor was, to fetch it early; it may be gone
  };
  std::vector<PyObject*> dictionaries, values;
  std::vector<const void*> keys_hints;  // where the keys of each dictionary were
  std::vector<Tensor> tensors;
  std::vector<int64_t> geometry;  // of all tensors in turn, sizes and strides

  static const c10::TensorImpl& impl(PyObject* object) { return *THPVariable_Unpack(object).unsafeGetTensorImpl(); }

  void remember(PyObject* dictionary) {
    dictionaries.push_back(Py_NewRef(dictionary));
    keys_hints.push_back(reinterpret_cast<PyDictObject*>(dictionary)->ma_keys);
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(dictionary, &at, &key, &value);) {
      values.push_back(Py_NewRef(value));
      if (!THPVariable_Check(value)) continue;
      const c10::TensorImpl& x = impl(value);
      Tensor tensor{value, address_of(x), version_of(x), 0, x.dtype(), {}, &x};
      if (x.has_storage()) {
        tensor.memory = x.storage();
        tensor.rank = static_cast<uint32_t>(x.dim());
        geometry.insert(geometry.end(), x.sizes().begin(), x.sizes().end());
        geometry.insert(geometry.end(), x.strides().begin(), x.strides().end());
      }
      tensors.push_back(std::move(tensor));
    }
  }

  bool holds() const {
    // A network has pushed all of this out of the cache: loads are started early, or each would wait for another.
    size_t i = 0;
    for (size_t d = 0; d < dictionaries.size(); ++d) {
      if (d + kAhead < dictionaries.size()) fetch_dictionary(d + kAhead);
      PyObject *key = nullptr, *value = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(dictionaries[d], &at, &key, &value); ++i)
        if (i == values.size() || values[i] != value) return false;
    }
    if (i != values.size()) return false;
    const int64_t* known = geometry.data();
    for (size_t t = 0; t < tensors.size(); ++t) {
      if (t + kAhead < tensors.size()) fetch(tensors[t + kAhead]);
      if (!is_same(tensors[t], known)) return false;
      known += 2 * tensors[t].rank;
    }
    return true;
  }

 private:
  static constexpr size_t kAhead = 8;

  void fetch_dictionary(size_t index) const {
    constexpr int kKeyLines = 3;  // of a few entries
    __builtin_prefetch(dictionaries[index]);
    for (int line = 0; line < kKeyLines; ++line)
      __builtin_prefetch(static_cast<const char*>(keys_hints[index]) + line * 64);
  }

  static void fetch(const Tensor& tensor) {
    __builtin_prefetch(tensor.object);
    __builtin_prefetch(tensor.memory.unsafeGetStorageImpl());
    for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(tensor.hint) + line);
  }

  static bool is_same(const Tensor& tensor, const int64_t* known) {
    const c10::TensorImpl& x = impl(tensor.object);
    if (tensor.data != address_of(x) || tensor.version != version_of(x) || tensor.dtype != x.dtype()) return false;
    if (!x.has_storage()) return tensor.rank == 0;
    const size_t rank = tensor.rank;
    return x.sizes() == c10::IntArrayRef(known, rank) && x.strides() == c10::IntArrayRef(known + rank, rank);
  }
};

// CPython counts the changes of all dictionaries until 3.13.
#if PY_VERSION_HEX < 0x030D0000
uint64_t changes_of(PyObject* dictionary) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return reinterpret_cast<PyDictObject*>(dictionary)->ma_version_tag;
#pragma GCC diagnostic pop
}
constexpr bool kCountsChanges = true;
#else
uint64_t changes_of(PyObject*) { return 0; }
constexpr bool kCountsChanges = false;
#endif

}  // namespace

PyObject* unchanged_since(PyObject*, PyObject* args) {
  PyObject *dictionaries = nullptr, *counts = nullptr;
  if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &dictionaries, &PyByteArray_Type, &counts)) return nullptr;
  const Py_ssize_t n = PyTuple_GET_SIZE(dictionaries);
  if (PyByteArray_GET_SIZE(counts) != n * Py_ssize_t{sizeof(uint64_t)}) {
    PyErr_SetString(PyExc_ValueError, "unchanged_since takes 8 bytes for each dictionary");
    return nullptr;
  }
  char* at = PyByteArray_AS_STRING(counts);
  bool same = kCountsChanges;
  for (Py_ssize_t i = 0; i < n; ++i, at += sizeof(uint64_t)) {
    PyObject* dictionary = PyTuple_GET_ITEM(dictionaries, i);
    if (!PyDict_Check(dictionary)) {
      PyErr_SetString(PyExc_TypeError, "unchanged_since takes a tuple of dictionaries");
      return nullptr;
    }
    const uint64_t changes = changes_of(dictionary);
    if (std::memcmp(at, &changes, sizeof(changes)) == 0) continue;
    same = false;
    std::memcpy(at, &changes, sizeof(changes));
  }
  return PyBool_FromLong(same);
}

PyObject* watch_type() { return python::WatchType<Watch>::make_type("x86quant.fast.Watch"); }

}  // namespace x86quant::fast

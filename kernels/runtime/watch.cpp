#include <torch/csrc/autograd/python_variable.h>  // before Python.h, as torch wants it

#include "watch.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <utility>
#include <vector>

namespace x86quant::runtime {
namespace {

// Keeps dictionaries and objects alive, so that no address can be used again for another.
class Watch {
 public:
  explicit Watch(std::vector<THPObjectPtr> dictionaries) : dictionaries_(std::move(dictionaries)) {
    for (const THPObjectPtr& dictionary : dictionaries_) {
      PyObject *key = nullptr, *value = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(dictionary.get(), &at, &key, &value);) {
        Py_INCREF(value);
        Entry entry{THPObjectPtr(value), {}, {}};
        if (THPVariable_Check(value)) {
          entry.tensor = THPVariable_Unpack(value);
          entry.state = state(entry.tensor);
        }
        entries_.push_back(std::move(entry));
      }
    }
  }

  // Called with the GIL.
  bool holds() const {
    size_t i = 0;
    for (const THPObjectPtr& dictionary : dictionaries_) {
      PyObject *key = nullptr, *value = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(dictionary.get(), &at, &key, &value); ++i) {
        if (i == entries_.size() || entries_[i].object.get() != value) return false;
        const Entry& entry = entries_[i];
        if (entry.tensor.defined() && state(entry.tensor) != entry.state) return false;
      }
    }
    return i == entries_.size();
  }

 private:
  // Where the data are, which share_memory_ and `tensor.data = other` change, and how often they
  // were written to, which torch does not count for tensors made in inference mode.
  using State = std::pair<const void*, uint32_t>;

  struct Entry {
    THPObjectPtr object;
    at::Tensor tensor;
    State state;
  };

  static State state(const at::Tensor& x) {
    const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
    const c10::VariableVersion& counter = impl->version_counter();
    return {impl->has_storage() ? impl->unsafe_storage().data_ptr().get() : nullptr,
            counter.enabled() ? counter.current_version() : 0};
  }

  std::vector<THPObjectPtr> dictionaries_;
  std::vector<Entry> entries_;
};

constexpr const char* kWatch = "x86quant.Watch";

}  // namespace

PyObject* watch(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  std::vector<THPObjectPtr> dictionaries;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!PyDict_Check(args[i])) {
      PyErr_SetString(PyExc_TypeError, "watch takes dictionaries");
      return nullptr;
    }
    Py_INCREF(args[i]);
    dictionaries.emplace_back(args[i]);
  }
  return PyCapsule_New(new Watch(std::move(dictionaries)), kWatch, [](PyObject* capsule) {
    delete static_cast<Watch*>(PyCapsule_GetPointer(capsule, kWatch));
  });
  END_HANDLE_TH_ERRORS
}

PyObject* unchanged(PyObject*, PyObject* capsule) {
  HANDLE_TH_ERRORS
  const auto* watch = static_cast<const Watch*>(PyCapsule_GetPointer(capsule, kWatch));
  if (watch == nullptr) return nullptr;
  return PyBool_FromLong(watch->holds());
  END_HANDLE_TH_ERRORS
}

}  // namespace x86quant::runtime

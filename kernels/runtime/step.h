// A step of a program: its interface, how it reads its fields from a plan, and how a kind is declared.
//
// A kind of step is one file in kernels/steps: a function that reads the fields of its kind, each under its name
// and as the type it has, checks them, and returns the step. Fields that are missing, of another type or length,
// or not read by the kind are refused, with the names of the kind and the field.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "memory.h"

namespace x86quant::runtime {

class Step {
 public:
  virtual ~Step() = default;
  // From any number of threads at a time. Shares its work among torch's threads where that is worth it.
  virtual void run(const Bases& bases) const = 0;
};

using StepPtr = std::unique_ptr<Step>;
using Words = std::vector<int64_t>;

// Of one step of a plan, by name.
class StepFields {
 public:
  using Values = std::map<std::string, c10::IValue>;

  StepFields(std::string kind, Values values) : kind_(std::move(kind)), values_(std::move(values)) {}

  const std::string& kind() const { return kind_; }
  bool has(const char* name) const { return values_.count(name) > 0; }

  // A tensor of the plan: base, offset, n, d, h, w, c, and the strides of n, d, h and w in bytes. Base 0 is the
  // arena, then come the inputs, then the outputs.
  Place tensor(const char* name);
  Place optional_tensor(const char* name) { return has(name) ? tensor(name) : Place{}; }
  // The same without what it looks like: base and offset.
  Address address(const char* name);
  Address optional_address(const char* name) { return has(name) ? address(name) : Address{}; }
  int64_t integer(const char* name);
  int32_t small(const char* name);  // an integer of 32 bits
  bool flag(const char* name);
  float real(const char* name);
  Words integers(const char* name, size_t count);
  Words integers(const char* name);  // of any number
  void triple(const char* name, int32_t (&to)[3]);
  void triple(const char* name, float (&to)[3]);
  // Contiguous, of so many elements. The step keeps it alive.
  at::Tensor table(const char* name, at::ScalarType type, int64_t count);

  template <class T>
  c10::intrusive_ptr<T> object(const char* name) {
    const c10::IValue value = get(name);
    if (!value.isObject()) refuse(name, "is an object of the extension");
    return value.toCustomClass<T>();
  }

  // Throws: field `name` of this step is wrong, and how.
  [[noreturn]] void refuse(const std::string& name, const std::string& why) const;
  // Throws if there is a field that nobody has read.
  void finish() const;

 private:
  c10::IValue get(const char* name);
  std::vector<double> reals(const char* name, size_t count);

  std::string kind_;
  Values values_;
  std::set<std::string> read_;
};

// Declared once for each kind, by a static object in its file.
struct RegisterStep {
  RegisterStep(const char* kind, StepPtr (*make)(StepFields& fields));
};

// Throws a ValueError that names the kind, and the field, of whatever is wrong.
StepPtr make_step(const std::string& kind, const StepFields::Values& fields);
std::vector<std::string> step_kinds();

}  // namespace x86quant::runtime

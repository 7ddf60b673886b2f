// A step of a program: its interface, how it reads its fields from a plan, and how a kind is declared.
//
// A kind of step is one file in kernels/steps: a function that reads the fields of its kind, each under its name
// and as the type it has, checks them, and returns the step. Fields that are missing, of another type or length,
// or not read by the kind are refused, with the names of the kind and the field.
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "conv_kernel.h"
#include "memory.h"
#include "reach.h"
#include "row_pack.h"
#include "table.h"

namespace x86quant::runtime {

// Which threads a step runs on: one; those of the runtime, which it shares a loop among; or others.
enum class StepThreads { kOne, kShared, kOwn };

class Step {
 public:
  virtual ~Step() = default;
  // From any number of threads at a time. Shares its work among the pool's threads where that is worth it.
  virtual void run(const Bases& bases) const = 0;
  // Where there are enough of them.
  virtual StepThreads threads() const { return StepThreads::kOne; }
};

inline StepThreads shared_if(bool worth) { return worth ? StepThreads::kShared : StepThreads::kOne; }

using StepPtr = std::unique_ptr<Step>;
using Words = std::vector<int64_t>;

// What a field of a step may be.
using Field = std::variant<std::monostate, bool, int64_t, double, Words, std::vector<double>, Table, PackedConvPtr, RowPackPtr>;

// Of one step of a plan, by name.
class StepFields {
 public:
  using Values = std::map<std::string, Field>;

  StepFields(std::string kind, Values values) : kind_(std::move(kind)), values_(std::move(values)) {}

  const std::string& kind() const { return kind_; }
  bool has(const char* name) const { return values_.count(name) > 0; }

  // A tensor of the plan: base, offset, n, d, h, w, c, and the strides of n, d, h and w in bytes. Base 0 is the
  // arena, then come the inputs, then the outputs. Of codes, whose channels are adjacent, or of reals whose channels
  // are so many bytes apart.
  Place tensor(Access access, const char* name) { return place(access, name, 1, 1); }
  Place optional_tensor(Access access, const char* name) { return has(name) ? tensor(access, name) : Place{}; }
  Place reals(Access access, const char* name, int64_t stride_c) { return place(access, name, stride_c, sizeof(float)); }
  // The same without what it looks like: elements of so many bytes, with strides in bytes.
  Address address(Access access, const char* name, int64_t element_size, const Words& sizes, const Words& strides);
  // The same one behind the other.
  Address rows(Access access, const char* name, int64_t element_size, const Words& sizes);
  // The same with strides in elements, all but the last of them in the field `strides_name`: the elements of the last
  // dimension are adjacent. `to`, an array, receives the strides of the field.
  template <class Strides>
  Address strided(Access access, const char* name, const char* strides_name, int64_t element_size, const Words& sizes,
                  Strides& to) {
    const Words given = integers(strides_name, sizes.size() - 1);
    std::copy(given.begin(), given.end(), std::begin(to));
    return address(access, name, element_size, sizes, adjacent_in_bytes(strides_name, given, element_size));
  }
  // Elements one behind the other: `size` of them, or all of an input that is open, if there is a field `count_name`.
  OpenAddress elements(Access access, const char* name, const char* count_name, int64_t element_size, int64_t size);
  int64_t integer(const char* name);
  int32_t small(const char* name);  // an integer of 32 bits
  int32_t zero_point(const char* name);  // a code
  bool flag(const char* name);
  float real(const char* name);
  Words integers(const char* name, size_t count);
  Words integers(const char* name);  // of any number
  void triple(const char* name, int32_t (&to)[3]);
  void triple(const char* name, float (&to)[3]);
  // Of so many elements. The step keeps it.
  Table table(const char* name, Type type, int64_t count);
  PackedConvPtr pack(const char* name);
  RowPackPtr row_pack(const char* name);

  // Throws: field `name` of this step is wrong, and how.
  [[noreturn]] void refuse(const std::string& name, const std::string& why) const;
  // Throws if there is a field that nobody has read.
  void finish() const;
  // All that the step may read or write, by its tensors. Throws if it would write over what it reads.
  const Reach& reach() const;

 private:
  const Field& get(const char* name);
  Place place(Access access, const char* name, int64_t stride_c, int64_t element_size);
  Words adjacent_in_bytes(const char* name, Words strides, int64_t element_size) const;
  Address base_and_offset(const char* name);
  void require_whole_elements(const char* name, int64_t element_size, int64_t offset, const Words& strides) const;
  std::vector<double> reals_of(const char* name, size_t count);
  template <class T>
  const T& as(const char* name, const char* wanted);

  std::string kind_;
  Values values_;
  std::set<std::string> read_;
  Reach reach_;
};

// Declared once for each kind, by a static object in its file.
struct RegisterStep {
  RegisterStep(const char* kind, StepPtr (*make)(StepFields& fields));
};

// Throws a Refused that names the kind, and the field, of whatever is wrong. `reach` receives that of the step.
StepPtr make_step(const std::string& kind, const StepFields::Values& fields, Reach& reach);
std::vector<std::string> step_kinds();

}  // namespace x86quant::runtime

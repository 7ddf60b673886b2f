#include "step.h"

namespace x86quant::runtime {
namespace {

using Make = StepPtr (*)(StepFields&);

std::map<std::string, Make>& kinds() {
  static std::map<std::string, Make> all;
  return all;
}

}  // namespace

RegisterStep::RegisterStep(const char* kind, Make make) {
  TORCH_INTERNAL_ASSERT(kinds().emplace(kind, make).second, "two steps are called ", kind);
}

StepPtr make_step(const std::string& kind, const StepFields::Values& values) {
  const auto found = kinds().find(kind);
  TORCH_CHECK_VALUE(found != kinds().end(), "x86quant: there is no kind of step \"", kind, "\"");
  StepFields fields(kind, values);
  StepPtr step = found->second(fields);
  fields.finish();
  return step;
}

std::vector<std::string> step_kinds() {
  std::vector<std::string> names;
  for (const auto& kind : kinds()) names.push_back(kind.first);
  return names;
}

void StepFields::refuse(const std::string& name, const std::string& why) const {
  TORCH_CHECK_VALUE(false, "x86quant: step \"", kind_, "\" of a plan: field \"", name, "\" ", why);
}

c10::IValue StepFields::get(const char* name) {
  const auto found = values_.find(name);
  if (found == values_.end()) refuse(name, "is missing");
  read_.insert(name);
  return found->second;
}

void StepFields::finish() const {
  for (const auto& item : values_)
    if (!read_.count(item.first)) refuse(item.first, "is not one of this kind's");
}

Words StepFields::integers(const char* name) {
  const c10::IValue value = get(name);
  if (!value.isIntList()) refuse(name, "takes integers, got " + value.tagKind());
  return value.toIntVector();
}

Words StepFields::integers(const char* name, size_t count) {
  Words words = integers(name);
  if (words.size() != count)
    refuse(name, "takes " + std::to_string(count) + " integers, got " + std::to_string(words.size()));
  return words;
}

std::vector<double> StepFields::reals(const char* name, size_t count) {
  const c10::IValue value = get(name);
  if (!value.isDoubleList()) refuse(name, "takes reals, got " + value.tagKind());
  std::vector<double> all = value.toDoubleVector();
  if (all.size() != count)
    refuse(name, "takes " + std::to_string(count) + " reals, got " + std::to_string(all.size()));
  return all;
}

int64_t StepFields::integer(const char* name) {
  const c10::IValue value = get(name);
  if (!value.isInt()) refuse(name, "takes an integer, got " + value.tagKind());
  return value.toInt();
}

int32_t StepFields::small(const char* name) {
  const int64_t value = integer(name);
  if (value != static_cast<int32_t>(value)) refuse(name, "is too large: " + std::to_string(value));
  return static_cast<int32_t>(value);
}

bool StepFields::flag(const char* name) {
  const c10::IValue value = get(name);
  if (!value.isBool()) refuse(name, "takes true or false, got " + value.tagKind());
  return value.toBool();
}

float StepFields::real(const char* name) {
  const c10::IValue value = get(name);
  if (!value.isDouble()) refuse(name, "takes a real, got " + value.tagKind());
  return static_cast<float>(value.toDouble());
}

void StepFields::triple(const char* name, int32_t (&to)[3]) {
  const Words words = integers(name, 3);
  for (int i = 0; i < 3; ++i) {
    if (words[i] != static_cast<int32_t>(words[i])) refuse(name, "is too large: " + std::to_string(words[i]));
    to[i] = static_cast<int32_t>(words[i]);
  }
}

void StepFields::triple(const char* name, float (&to)[3]) {
  const std::vector<double> all = reals(name, 3);
  for (int i = 0; i < 3; ++i) to[i] = static_cast<float>(all[i]);
}

at::Tensor StepFields::table(const char* name, at::ScalarType type, int64_t count) {
  const c10::IValue value = get(name);
  if (!value.isTensor()) refuse(name, "takes a tensor, got " + value.tagKind());
  const at::Tensor& table = value.toTensor();
  if (table.scalar_type() != type || table.numel() != count || !table.is_cpu())
    refuse(name, "takes a tensor of " + std::to_string(count) + " elements of type " + c10::toString(type) + ", got " +
                     std::to_string(table.numel()) + " of type " + c10::toString(table.scalar_type()));
  return table.contiguous();
}

Address StepFields::address(const char* name) {
  const Words words = integers(name, 2);
  return {static_cast<int32_t>(words[0]), words[1]};
}

Place StepFields::tensor(const char* name) {
  const Words words = integers(name, 11);
  Place place;
  place.base = static_cast<int32_t>(words[0]);
  place.offset = words[1];
  xq_tensor& t = place.view;
  t.n = words[2], t.d = words[3], t.h = words[4], t.w = words[5], t.c = words[6];
  t.stride_n = words[7], t.stride_d = words[8], t.stride_h = words[9], t.stride_w = words[10];
  // Stands for the address that a run will fill in: checks look whether there is one.
  t.data = reinterpret_cast<uint8_t*>(uintptr_t{64});
  return place;
}

}  // namespace x86quant::runtime

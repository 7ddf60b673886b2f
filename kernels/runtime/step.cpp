#include "step.h"

#include <algorithm>

#include "errors.h"

namespace x86quant::runtime {
namespace {

using Make = StepPtr (*)(StepFields&);

std::map<std::string, Make>& kinds() {
  static std::map<std::string, Make> all;
  return all;
}

const char* type_of(const Field& field) {
  static constexpr const char* kNames[] = {"None", "Bool", "Int", "Double", "IntList", "DoubleList", "Tensor", "Object", "Object"};
  return kNames[field.index()];
}

}  // namespace

RegisterStep::RegisterStep(const char* kind, Make make) {
  if (!kinds().emplace(kind, make).second) throw std::logic_error(joined("two steps are called ", kind));
}

StepPtr make_step(const std::string& kind, const StepFields::Values& values, Reach& reach) {
  const auto found = kinds().find(kind);
  require(found != kinds().end(), "there is no kind of step \"", kind, "\"");
  StepFields fields(kind, values);
  StepPtr step = found->second(fields);
  fields.finish();
  reach = fields.reach();
  return step;
}

std::vector<std::string> step_kinds() {
  std::vector<std::string> names;
  for (const auto& kind : kinds()) names.push_back(kind.first);
  return names;
}

void StepFields::refuse(const std::string& name, const std::string& why) const {
  throw Refused(joined("step \"", kind_, "\" of a plan: field \"", name, "\" ", why));
}

const Field& StepFields::get(const char* name) {
  const auto found = values_.find(name);
  if (found == values_.end()) refuse(name, "is missing");
  read_.insert(name);
  return found->second;
}

void StepFields::finish() const {
  for (const auto& item : values_)
    if (!read_.count(item.first)) refuse(item.first, "is not one of this kind's");
}

template <class T>
const T& StepFields::as(const char* name, const char* wanted) {
  const Field& value = get(name);
  const T* found = std::get_if<T>(&value);
  if (found == nullptr) refuse(name, std::string("takes ") + wanted + ", got " + type_of(value));
  return *found;
}

Words StepFields::integers(const char* name) { return as<Words>(name, "integers"); }

Words StepFields::integers(const char* name, size_t count) {
  Words words = integers(name);
  if (words.size() != count)
    refuse(name, "takes " + std::to_string(count) + " integers, got " + std::to_string(words.size()));
  return words;
}

std::vector<double> StepFields::reals_of(const char* name, size_t count) {
  std::vector<double> all = as<std::vector<double>>(name, "reals");
  if (all.size() != count)
    refuse(name, "takes " + std::to_string(count) + " reals, got " + std::to_string(all.size()));
  return all;
}

int64_t StepFields::integer(const char* name) { return as<int64_t>(name, "an integer"); }

int32_t StepFields::small(const char* name) {
  const int64_t value = integer(name);
  if (value != static_cast<int32_t>(value)) refuse(name, "is too large: " + std::to_string(value));
  return static_cast<int32_t>(value);
}

int32_t StepFields::zero_point(const char* name) {
  const int64_t value = integer(name);
  if (value < 0 || value > 255) refuse(name, "is no code: " + std::to_string(value));
  return static_cast<int32_t>(value);
}

bool StepFields::flag(const char* name) { return as<bool>(name, "true or false"); }

float StepFields::real(const char* name) { return static_cast<float>(as<double>(name, "a real")); }

void StepFields::triple(const char* name, int32_t (&to)[3]) {
  const Words words = integers(name, 3);
  std::transform(words.begin(), words.end(), to, [&](int64_t word) {
    if (word != static_cast<int32_t>(word)) refuse(name, "is too large: " + std::to_string(word));
    return static_cast<int32_t>(word);
  });
}

void StepFields::triple(const char* name, float (&to)[3]) {
  const std::vector<double> all = reals_of(name, 3);
  std::transform(all.begin(), all.end(), to, [](double real) { return static_cast<float>(real); });
}

Table StepFields::table(const char* name, Type type, int64_t count) {
  const Table& table = as<Table>(name, "a tensor");
  if (table.type != type || table.count != count)
    refuse(name, "takes a tensor of " + std::to_string(count) + " elements of type " + name_of(type) + ", got " +
                     std::to_string(table.count) + " of type " + name_of(table.type));
  return table;
}

PackedConvPtr StepFields::pack(const char* name) {
  const PackedConvPtr& pack = as<PackedConvPtr>(name, "packed weights");
  if (pack == nullptr) refuse(name, "is empty");
  return pack;
}

RowPackPtr StepFields::row_pack(const char* name) {
  const RowPackPtr& pack = as<RowPackPtr>(name, "packed weights of rows");
  if (pack == nullptr) refuse(name, "is empty");
  return pack;
}

const Reach& StepFields::reach() const {
  require(reach_.is_apart(), "step \"", kind_, "\" of a plan writes over what it reads or writes elsewhere");
  return reach_;
}

Words StepFields::adjacent_in_bytes(const char* name, Words strides, int64_t element_size) const {
  for (int64_t& stride : strides)
    if (__builtin_mul_overflow(stride, element_size, &stride)) refuse(name, "is too large");
  strides.push_back(element_size);
  return strides;
}

Address StepFields::address(Access access, const char* name, int64_t element_size, const Words& sizes, const Words& strides) {
  const Address found = base_and_offset(name);
  require_whole_elements(name, element_size, found.offset, strides);
  reach_.add({access, found.base, found.offset, element_size, sizes, strides});
  return found;
}

Address StepFields::rows(Access access, const char* name, int64_t element_size, const Words& sizes) {
  Words strides(sizes.size());
  int64_t step = element_size;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    if (__builtin_mul_overflow(step, sizes[i], &step)) refuse(name, "has an impossible size");
  }
  return address(access, name, element_size, sizes, strides);
}

OpenAddress StepFields::elements(Access access, const char* name, const char* count_name, int64_t element_size, int64_t size) {
  if (!has(count_name)) return {address(access, name, element_size, {size}, {element_size}), {}};
  const OpenAddress found{base_and_offset(name), base_and_offset(count_name)};
  if (found.first.offset != 0) refuse(name, "is open and does not begin where its input does");
  reach_.add(Reach::Open{found.first.base, element_size, found.count.base, found.count.offset});
  return found;
}

Address StepFields::base_and_offset(const char* name) {
  const Words found = integers(name, 2);
  if (found[0] < 0 || found[0] != static_cast<int32_t>(found[0])) refuse(name, "has no base " + std::to_string(found[0]));
  return {static_cast<int32_t>(found[0]), found[1]};
}

void StepFields::require_whole_elements(const char* name, int64_t element_size, int64_t offset, const Words& strides) const {
  const auto whole = [&](int64_t bytes) { return bytes % element_size == 0; };
  if (!whole(offset) || !std::all_of(strides.begin(), strides.end(), whole))
    refuse(name, "does not lie at whole elements of " + std::to_string(element_size) + " bytes");
}

Place StepFields::place(Access access, const char* name, int64_t stride_c, int64_t element_size) {
  const Words words = integers(name, 11);
  // Kernels multiply two of these.
  for (size_t i = 2; i < 7; ++i)
    require(words[i] == static_cast<int32_t>(words[i]), "a tensor of a plan has impossible sizes or strides: ", words[i]);
  Place place;
  place.base = static_cast<int32_t>(words[0]);
  if (place.base != words[0] || place.base < 0) refuse(name, "has no base " + std::to_string(words[0]));
  place.offset = words[1];
  xq_tensor& t = place.view;
  t.n = words[2], t.d = words[3], t.h = words[4], t.w = words[5], t.c = words[6];
  t.stride_n = words[7], t.stride_d = words[8], t.stride_h = words[9], t.stride_w = words[10];
  // Stands for the address that a run will fill in: checks look whether there is one.
  t.data = reinterpret_cast<uint8_t*>(uintptr_t{64});
  const Words strides = {t.stride_n, t.stride_d, t.stride_h, t.stride_w, stride_c};
  require_whole_elements(name, element_size, place.offset, strides);
  reach_.add({access, words[0], words[1], element_size, {t.n, t.d, t.h, t.w, t.c}, strides});
  return place;
}

}  // namespace x86quant::runtime

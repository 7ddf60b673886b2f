#include "strided_copy.h"

#include <algorithm>
#include <cstring>

namespace x86quant::runtime {
namespace {

template <class T>
void copy_each(int64_t count, const uint8_t* from, int64_t from_step, uint8_t* to, int64_t to_step) {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + i * from_step, sizeof value);
    std::memcpy(to + i * to_step, &value, sizeof value);
  }
}

}  // namespace

StridedCopy::StridedCopy(int64_t element_size, const std::vector<int64_t>& sizes,
                         const std::vector<int64_t>& from_strides, const std::vector<int64_t>& to_strides) {
  for (size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i] != 1) axes_.push_back({sizes[i], from_strides[i], to_strides[i]});
  // Writes go forward through memory.
  std::stable_sort(axes_.begin(), axes_.end(),
                   [](const Axis& a, const Axis& b) { return a.to > b.to; });
  if (element_size != 1) axes_.push_back({element_size, 1, 1});
  // Axes that continue one another on both sides are one.
  for (size_t i = axes_.size(); i-- > 1;) {
    Axis &outer = axes_[i - 1], &inner = axes_[i];
    if (outer.from != inner.size * inner.from || outer.to != inner.size * inner.to) continue;
    outer = {outer.size * inner.size, inner.from, inner.to};
    axes_.erase(axes_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  // Elements that lie apart are moved whole.
  const bool apart = axes_.size() > 1 && axes_.back().size == element_size && axes_.back().from == 1 && axes_.back().to == 1;
  if (apart && (element_size == 4 || element_size == 8)) {
    axes_.pop_back();
    unit_ = element_size;
  }
}

void StridedCopy::run(const uint8_t* from, uint8_t* to) const { copy(0, from, to); }

void StridedCopy::copy(std::size_t index, const uint8_t* from, uint8_t* to) const {
  if (index == axes_.size()) {
    *to = *from;
    return;
  }
  const Axis axis = axes_[index];
  if (index + 1 < axes_.size()) {
    for (int64_t i = 0; i < axis.size; ++i) copy(index + 1, from + i * axis.from, to + i * axis.to);
  } else if (unit_ == 1 && axis.from == 1 && axis.to == 1) {
    std::memcpy(to, from, static_cast<size_t>(axis.size));
  } else {
    const auto each = unit_ == 8 ? copy_each<uint64_t> : unit_ == 4 ? copy_each<uint32_t> : copy_each<uint8_t>;
    each(axis.size, from, axis.from, to, axis.to);
  }
}

}  // namespace x86quant::runtime

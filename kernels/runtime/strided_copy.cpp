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

// Elements of a block: of so many rows of each side every cache line that is touched is used up while it is in L1.
constexpr int64_t kBlock = 16;

// Rows of one side are columns of the other: elements are adjacent along `rows` there and along `columns` here.
void transpose(int64_t rows, int64_t columns, const uint8_t* from, int64_t from_column, uint8_t* to, int64_t to_row) {
  constexpr int64_t kSize = sizeof(uint32_t);
  for (int64_t column = 0; column < columns; column += kBlock) {
    const int64_t last_column = std::min(columns, column + kBlock);
    for (int64_t row = 0; row < rows; row += kBlock) {
      const int64_t last_row = std::min(rows, row + kBlock);
      for (int64_t r = row; r < last_row; ++r)
        copy_each<uint32_t>(last_column - column, from + r * kSize + column * from_column, from_column,
                            to + r * to_row + column * kSize, kSize);
    }
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

double StridedCopy::bytes() const {
  auto found = static_cast<double>(unit_);
  for (const Axis& axis : axes_) found *= static_cast<double>(axis.size);
  return found;
}

void StridedCopy::run(const uint8_t* from, uint8_t* to, int64_t begin, int64_t end) const {
  if (axes_.empty()) {
    *to = *from;
  } else {
    copy(0, from, to, begin, end);
  }
}

// Whether the last two axes, of which `index` is the first, only swap places.
bool StridedCopy::transposes(std::size_t index) const {
  if (index + 2 != axes_.size() || unit_ != 4) return false;
  const Axis &rows = axes_[index], &columns = axes_[index + 1];
  return rows.from == unit_ && columns.to == unit_;
}

void StridedCopy::copy(std::size_t index, const uint8_t* from, uint8_t* to, int64_t begin, int64_t end) const {
  const Axis axis = axes_[index];
  from += begin * axis.from, to += begin * axis.to;
  const int64_t count = end - begin;
  if (transposes(index)) {
    const Axis columns = axes_[index + 1];
    transpose(count, columns.size, from, columns.from, to, axis.to);
  } else if (index + 1 < axes_.size()) {
    for (int64_t i = 0; i < count; ++i) copy(index + 1, from + i * axis.from, to + i * axis.to, 0, axes_[index + 1].size);
  } else if (unit_ == 1 && axis.from == 1 && axis.to == 1) {
    std::memcpy(to, from, static_cast<size_t>(count));
  } else {
    const auto each = unit_ == 8 ? copy_each<uint64_t> : unit_ == 4 ? copy_each<uint32_t> : copy_each<uint8_t>;
    each(count, from, axis.from, to, axis.to);
  }
}

}  // namespace x86quant::runtime

#include "strided_copy.h"

#include <emmintrin.h>

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

// Tiles of elements whose rows become columns. 16 bytes by 16: each round interleaves the first half of the registers with
// the second, which moves one bit of a byte's place from its column to its row.
struct BytesTile {
  using Element = uint8_t;
  static constexpr int64_t kSide = 16;
  static void transpose(const uint8_t* from, int64_t from_column, uint8_t* to, int64_t to_row) {
    __m128i now[kSide], next[kSide];
    for (int64_t i = 0; i < kSide; ++i) now[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_column));
    for (int round = 0; round < 4; ++round) {
      for (int64_t i = 0; i < kSide / 2; ++i) {
        next[2 * i] = _mm_unpacklo_epi8(now[i], now[i + kSide / 2]);
        next[2 * i + 1] = _mm_unpackhi_epi8(now[i], now[i + kSide / 2]);
      }
      std::copy(next, next + kSide, now);
    }
    for (int64_t i = 0; i < kSide; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_row), now[i]);
  }
};

struct WordsTile {
  using Element = uint32_t;
  static constexpr int64_t kSide = 4;
  static void transpose(const uint8_t* from, int64_t from_column, uint8_t* to, int64_t to_row) {
    __m128i now[kSide];
    for (int64_t i = 0; i < kSide; ++i) now[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_column));
    const __m128i a = _mm_unpacklo_epi32(now[0], now[1]), b = _mm_unpackhi_epi32(now[0], now[1]);
    const __m128i c = _mm_unpacklo_epi32(now[2], now[3]), d = _mm_unpackhi_epi32(now[2], now[3]);
    const __m128i rows[kSide] = {_mm_unpacklo_epi64(a, c), _mm_unpackhi_epi64(a, c), _mm_unpacklo_epi64(b, d),
                                 _mm_unpackhi_epi64(b, d)};
    for (int64_t i = 0; i < kSide; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_row), rows[i]);
  }
};

// Rows of one side are columns of the other: elements are adjacent along `rows` there and along `columns` here, of which as
// many are written together as a cache line holds.
template <class Tile>
void transpose(int64_t rows, int64_t columns, const uint8_t* from, int64_t from_column, uint8_t* to, int64_t to_row) {
  using Element = typename Tile::Element;
  constexpr int64_t kSize = sizeof(Element), kSide = Tile::kSide, kTogether = 64 / kSize;
  const auto one_by_one = [&](int64_t row, int64_t last_row, int64_t column, int64_t last_column) {
    for (; row < last_row; ++row)
      copy_each<Element>(last_column - column, from + row * kSize + column * from_column, from_column,
                         to + row * to_row + column * kSize, kSize);
  };
  const int64_t tiled_rows = rows - rows % kSide;
  for (int64_t first = 0; first < columns; first += kTogether) {
    const int64_t last = std::min(columns, first + kTogether), tiled = last - (last - first) % kSide;
    for (int64_t row = 0; row < tiled_rows; row += kSide) {
      for (int64_t column = first; column < tiled; column += kSide)
        Tile::transpose(from + row * kSize + column * from_column, from_column, to + row * to_row + column * kSize, to_row);
      one_by_one(row, row + kSide, tiled, last);
    }
    one_by_one(tiled_rows, rows, first, last);
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
  if (index + 2 != axes_.size() || (unit_ != 1 && unit_ != 4)) return false;
  const Axis &rows = axes_[index], &columns = axes_[index + 1];
  return rows.from == unit_ && columns.to == unit_;
}

void StridedCopy::copy(std::size_t index, const uint8_t* from, uint8_t* to, int64_t begin, int64_t end) const {
  const Axis axis = axes_[index];
  from += begin * axis.from, to += begin * axis.to;
  const int64_t count = end - begin;
  if (transposes(index)) {
    const Axis columns = axes_[index + 1];
    (unit_ == 1 ? transpose<BytesTile> : transpose<WordsTile>)(count, columns.size, from, columns.from, to, axis.to);
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

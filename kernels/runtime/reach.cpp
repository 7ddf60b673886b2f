#include "reach.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "errors.h"

namespace x86quant::runtime {
namespace {

// More bytes, or more elements, than any tensor has; products of two such numbers fit 128 bits.
constexpr int64_t kMost = int64_t{1} << 46;

bool is_possible(int64_t value) { return value >= -kMost && value <= kMost; }

int64_t bytes_of(const Extent& extent) {
  int64_t bytes = extent.element_size;  // at most 2^46 elements, whose size was a tensor's
  for (const int64_t size : extent.sizes)
    if (__builtin_mul_overflow(bytes, size, &bytes)) return INT64_MAX;
  return bytes;
}

// The bytes of an extent modulo `step`: where they begin, and how far they reach from there, perhaps beyond `step`.
struct Residues {
  __int128 first, span;
};

Residues residues(const Extent& extent, int64_t step) {
  __int128 first = extent.offset, span = extent.element_size;
  for (size_t i = 0; i < extent.sizes.size(); ++i) {
    const __int128 stride = extent.strides[i] % step ? extent.strides[i] : 0, moved = stride * (extent.sizes[i] - 1);
    if (moved < 0) first += moved;
    span += moved < 0 ? -moved : moved;
  }
  first %= step;
  return {first < 0 ? first + step : first, span};
}

// Whether two extents that lie among each other are known to share no byte: as slices of one tensor do, whose steps are
// the same and whose places within a step are not.
bool are_slices(const Extent& a, const Extent& b) {
  for (const Extent* one : {&a, &b})
    for (size_t i = 0; i < one->sizes.size(); ++i) {
      const int64_t step = std::abs(one->strides[i]);
      if (one->sizes[i] == 1 || step < 2) continue;
      const Residues x = residues(a, step), y = residues(b, step);
      const __int128 apart = (y.first - x.first + step) % step;
      if (apart >= x.span && apart + y.span <= step) return true;
    }
  return false;
}

bool may_meet(const Extent& a, const Extent& b) {
  if (a.base != b.base) return false;
  const Reach::Range x = Reach::range_of(a), y = Reach::range_of(b);
  return x.first < y.last && y.first < x.last && !are_slices(a, b);
}

// Whether each element surely has bytes of its own: each stride steps over all that the smaller ones reach.
bool is_distinct(const Extent& extent) {
  std::vector<std::pair<int64_t, int64_t>> axes;  // of a stride and its size
  for (size_t i = 0; i < extent.sizes.size(); ++i)
    if (extent.sizes[i] > 1) axes.emplace_back(std::abs(extent.strides[i]), extent.sizes[i]);
  std::sort(axes.begin(), axes.end());
  __int128 span = extent.element_size;
  for (const auto& [stride, size] : axes) {
    if (stride < span) return false;
    span += static_cast<__int128>(stride) * (size - 1);
  }
  return true;
}

}  // namespace

void Reach::Range::extend(const Range& other) {
  first = std::min(first, other.first);
  last = std::max(last, other.last);
}

Reach::Range Reach::range_of(const Extent& extent) {
  using Wide = __int128;
  const auto& [access, base, offset, element_size, sizes, strides] = extent;
  Wide first = offset, last = Wide{offset} + element_size, elements = 1;
  bool possible = element_size > 0 && is_possible(element_size) && sizes.size() == strides.size();
  for (size_t i = 0; possible && i < sizes.size(); ++i) {
    possible = sizes[i] > 0 && is_possible(sizes[i]) && is_possible(strides[i]);
    if (!possible) break;
    Wide& end = strides[i] < 0 ? first : last;  // same either way at 0
    end += Wide{sizes[i] - 1} * strides[i];
    elements *= sizes[i];
    possible = elements <= kMost;
  }
  require(possible && first >= -kMost && last <= kMost, "a tensor of a plan has impossible sizes or strides");
  return {static_cast<int64_t>(first), static_cast<int64_t>(last)};
}

void Reach::add(Extent extent) {
  const Range range = range_of(extent);
  Touched& touched = touched_[extent.base];
  touched.all.extend(range);
  if (extent.is_written()) {
    touched.written.extend(range);
    if (__builtin_add_overflow(touched.written_bytes, bytes_of(extent), &touched.written_bytes)) touched.written_bytes = INT64_MAX;
  }
  if (extent.is_read()) touched.read.extend(range);
  if (extent.access == Access::kUpdate) touched.updated.extend(range);
  if (extent.access == Access::kIndex) touched.index.extend(range);
  extents_.push_back(std::move(extent));
}

bool Reach::is_apart() const {
  for (size_t i = 0; i < extents_.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if ((extents_[i].is_written() || extents_[j].is_written()) && may_meet(extents_[i], extents_[j])) return false;
  return true;
}

bool Reach::reads(int64_t base) const {
  const auto found = touched_.find(base);
  return found != touched_.end() && !found->second.read.is_empty();
}

bool Reach::surely_writes(int64_t base, int64_t bytes, int64_t parts, int64_t advance) const {
  if (surely_written(base, parts, advance, extents_.size()) < bytes) return false;
  if (!reads(base)) return true;
  const Touched& touched = touched_.at(base);
  const int64_t before = surely_written(base, 1, 0, touched.before_read);  // by one part: same either way, where that is 1
  if (parts == 1) return before >= bytes;
  // Parts run side by side: each reads what it has written itself.
  const auto is_own = [&](const Range& range) { return range.first >= 0 && range.last <= advance; };
  return is_own(touched.read) && is_own(touched.written) && before >= advance;
}

int64_t Reach::surely_written(int64_t base, int64_t parts, int64_t advance, size_t count) const {
  std::vector<Extent> found;
  for (size_t i = 0; i < count; ++i)
    if (const Extent& extent = extents_[i]; extent.base == base && extent.access == Access::kWrite) {
      found.push_back(extent);
      found.back().sizes.push_back(parts), found.back().strides.push_back(advance);
    }
  // What is written whole counts before what is written of it again.
  const auto is_larger = [](const Extent& a, const Extent& b) { return bytes_of(a) > bytes_of(b); };  // same either way if level
  std::stable_sort(found.begin(), found.end(), is_larger);
  std::vector<Extent> counted;
  int64_t bytes = 0;
  for (const Extent& extent : found) {
    const auto meets = [&](const Extent& other) { return may_meet(extent, other); };
    if (!is_distinct(extent) || std::any_of(counted.begin(), counted.end(), meets)) continue;
    bytes += bytes_of(extent);  // no more than the tensor has
    counted.push_back(extent);
  }
  return bytes;
}

std::vector<Reach::Range> Reach::ranges(int64_t base) const {
  std::vector<Range> found;
  for (const Extent& extent : extents_)
    if (extent.base == base) found.push_back(range_of(extent));
  return found;
}

void Reach::add(const Reach& step) {
  for (const auto& [base, other] : step.touched_) {
    Touched& mine = touched_[base];
    if (mine.read.is_empty()) mine.before_read = extents_.size();
    mine.all.extend(other.all), mine.read.extend(other.read), mine.written.extend(other.written);
    mine.updated.extend(other.updated), mine.index.extend(other.index);
    if (__builtin_add_overflow(mine.written_bytes, other.written_bytes, &mine.written_bytes)) mine.written_bytes = INT64_MAX;
  }
  open_.insert(open_.end(), step.open_.begin(), step.open_.end());
  std::copy_if(step.extents_.begin(), step.extents_.end(), std::back_inserter(extents_),
               [](const Extent& extent) { return extent.is_written() && extent.base > 0; });
}

}  // namespace x86quant::runtime

#include "reach.h"

#include <algorithm>

#include "errors.h"

namespace x86quant::runtime {
namespace {

// More bytes, or more elements, than any tensor has; products of two such numbers fit 128 bits.
constexpr int64_t kMost = int64_t{1} << 46;

bool is_possible(int64_t value) { return value >= -kMost && value <= kMost; }

}  // namespace

void Reach::add(int64_t base, int64_t offset, int64_t element_size, const std::vector<int64_t>& sizes,
                const std::vector<int64_t>& strides) {
  using Wide = __int128;
  Wide first = offset, last = Wide{offset} + element_size, elements = 1;
  bool possible = is_possible(offset) && element_size > 0 && is_possible(element_size) && sizes.size() == strides.size();
  for (size_t i = 0; possible && i < sizes.size(); ++i) {
    possible = sizes[i] > 0 && is_possible(sizes[i]) && is_possible(strides[i]);
    if (!possible) break;
    (strides[i] < 0 ? first : last) += Wide{sizes[i] - 1} * strides[i];
    elements *= sizes[i];
    possible = elements <= kMost;
  }
  require(possible && first >= -kMost && last <= kMost, "a tensor of a plan has impossible sizes or strides");
  add(base, {static_cast<int64_t>(first), static_cast<int64_t>(last)});
}

void Reach::add(const Reach& other) {
  for (const auto& [base, range] : other.ranges_) add(base, range);
  open_.insert(open_.end(), other.open_.begin(), other.open_.end());
}

void Reach::add(int64_t base, Range range) {
  const auto [found, is_new] = ranges_.emplace(base, range);
  if (is_new) return;
  found->second.first = std::min(found->second.first, range.first);
  found->second.last = std::max(found->second.last, range.last);
}

}  // namespace x86quant::runtime

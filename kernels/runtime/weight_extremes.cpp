#include "weight_extremes.h"

#include <algorithm>

// The extension runs nowhere without it.
#define XQ_TARGET "avx2"
#include "../native/target.h"

namespace x86quant::runtime {
namespace {

constexpr int64_t kBytes = sizeof(__m256i);

// Of one sign: the weights of the other one are 0.
class RowSums {
 public:
  // Written out: one that the compiler makes is not for this target.
  RowSums() { first_ = second_ = pair_ = total_ = _mm256_setzero_si256(); }

  void add(__m256i x) {  // 0 to 127, or 128 as a byte without sign
    second_ = _mm256_max_epu8(second_, _mm256_min_epu8(first_, x)), first_ = _mm256_max_epu8(first_, x);
    const __m256i ones = _mm256_set1_epi8(1), pairs = _mm256_maddubs_epi16(x, ones);
    pair_ = _mm256_max_epi16(pair_, pairs);
    total_ = _mm256_add_epi32(total_, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }

  int64_t neighbours() const {
    alignas(32) int16_t pairs[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), pair_);
    return *std::max_element(pairs, pairs + 16);
  }
  int64_t any_two() const {
    alignas(32) uint8_t all[2 * kBytes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(all), first_);
    _mm256_store_si256(reinterpret_cast<__m256i*>(all + kBytes), second_);
    int first = 0, second = 0;
    for (const uint8_t x : all) second = std::max(second, std::min<int>(first, x)), first = std::max<int>(first, x);
    return first + second;
  }
  int64_t whole() const {
    alignas(32) int32_t parts[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(parts), total_);
    int64_t sum = 0;
    for (const int32_t part : parts) sum += part;
    return sum;
  }

 private:
  // The largest bytes of each lane, sums of neighbours, and all of a row together.
  __m256i first_, second_, pair_, total_;
};

}  // namespace

WeightExtremes weight_extremes(const int8_t* weights, int64_t rows, int64_t size) {
  WeightExtremes found;
  const __m256i zero = _mm256_setzero_si256();
  for (int64_t row = 0; row < rows; ++row, weights += size) {
    RowSums positive, negative;
    const auto add = [&](const int8_t* from) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      positive.add(_mm256_max_epi8(x, zero));
      negative.add(_mm256_sub_epi8(zero, _mm256_min_epi8(x, zero)));
    };
    int64_t i = 0;
    for (; i + kBytes <= size; i += kBytes) add(weights + i);
    if (i < size) {
      int8_t rest[kBytes] = {};
      std::copy(weights + i, weights + size, rest);
      add(rest);
    }
    const auto extend = [&](SumRange& range, auto sum) {
      range.high = std::max(range.high, (positive.*sum)());
      range.low = std::min(range.low, -(negative.*sum)());
    };
    extend(found.neighbours, &RowSums::neighbours);
    extend(found.any_two, &RowSums::any_two);
    extend(found.rows, &RowSums::whole);
  }
  return found;
}

}  // namespace x86quant::runtime

XQ_TARGET_END

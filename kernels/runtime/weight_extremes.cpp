// What the overflow proof needs to know of weights, as kernels/saturation.py says and computes in plain torch:
// here in one pass over them.
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace x86quant::runtime {
namespace {

constexpr int kLanes = 16;

// The two largest of a row, and the two smallest; 0 stands for those of the other sign.
class TwoAtEitherEnd {
 public:
  // The row may be read up to a multiple of kLanes, with zeros there.
  void add(const int8_t* row, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes)
      for (int k = 0; k < kLanes; ++k) {
        const int8_t x = row[i + k];
        high_[1][k] = std::max(high_[1][k], std::min(high_[0][k], x)), high_[0][k] = std::max(high_[0][k], x);
        low_[1][k] = std::min(low_[1][k], std::max(low_[0][k], x)), low_[0][k] = std::min(low_[0][k], x);
      }
  }
  int64_t high() const { return sum_of_two(high_, std::greater<int>()); }
  int64_t low() const { return sum_of_two(low_, std::less<int>()); }

 private:
  template <class Order>
  static int64_t sum_of_two(const int8_t (&of)[2][kLanes], const Order& order) {
    std::vector<int> all(&of[0][0], &of[0][0] + 2 * kLanes);
    std::partial_sort(all.begin(), all.begin() + 2, all.end(), order);
    return all[0] + all[1];
  }

  int8_t high_[2][kLanes] = {}, low_[2][kLanes] = {};
};

struct Sums {
  int64_t low = 0, high = 0;
  void add(int64_t a, int64_t b) { low = std::min(low, a), high = std::max(high, b); }
};

// Of neighbours (0, 1), (2, 3), ... along a row, which is zero behind its end.
Sums pairs_of(const int8_t* row, int64_t size) {
  int low = 0, high = 0;
  for (int64_t i = 0; i < size; i += 2) {
    const int a = row[i], b = row[i + 1];
    high = std::max(high, std::max(a, 0) + std::max(b, 0)), low = std::min(low, std::min(a, 0) + std::min(b, 0));
  }
  return {low, high};
}

Sums whole(const int8_t* row, int64_t size) {
  Sums sums;
  for (int64_t i = 0; i < size; ++i) sums.low += std::min<int>(row[i], 0), sums.high += std::max<int>(row[i], 0);
  return sums;
}

// For `rows` of int8: the least and the greatest sum of neighbours, of any two, and of all weights of a row.
std::vector<int64_t> weight_extremes(const at::Tensor& rows) {
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.scalar_type() == at::kChar && rows.is_contiguous(),
                    "x86quant: extremes are of rows of int8");
  const int64_t size = rows.size(1);
  std::vector<int8_t> row(static_cast<size_t>((size + kLanes - 1) / kLanes * kLanes + 2));
  Sums pairs, any, all;
  for (int64_t i = 0; i < rows.size(0); ++i) {
    std::copy_n(rows.const_data_ptr<int8_t>() + i * size, size, row.data());
    const Sums neighbours = pairs_of(row.data(), size), sum = whole(row.data(), size);
    TwoAtEitherEnd two;
    two.add(row.data(), size);
    pairs.add(neighbours.low, neighbours.high), any.add(two.low(), two.high()), all.add(sum.low, sum.high);
  }
  return {pairs.low, pairs.high, any.low, any.high, all.low, all.high};
}

TORCH_LIBRARY_FRAGMENT(x86quant, m) {
  m.def("weight_extremes(Tensor rows) -> int[]", [](const at::Tensor& rows) { return weight_extremes(rows); });
}

}  // namespace
}  // namespace x86quant::runtime

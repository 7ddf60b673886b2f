// The bytes that steps may touch, of each base: what is held against the memory there is.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace x86quant::runtime {

class Reach {
 public:
  struct Range {
    int64_t first = 0, last = 0;  // bytes, the last one exclusive
  };

  // Elements of so many bytes from `offset` on; strides in bytes. Throws a Refused for sizes and strides that no
  // memory could have.
  void add(int64_t base, int64_t offset, int64_t element_size, const std::vector<int64_t>& sizes,
           const std::vector<int64_t>& strides);
  // All elements of an input that has another number of them in each call, and the int64 that says how many.
  struct Open {
    int64_t base, element_size, count_base, count_offset;
  };
  void add(const Open& open) { open_.push_back(open); }
  void add(const Reach& other);

  const std::map<int64_t, Range>& ranges() const { return ranges_; }
  const std::vector<Open>& open() const { return open_; }

 private:
  void add(int64_t base, Range range);

  std::map<int64_t, Range> ranges_;
  std::vector<Open> open_;
};

}  // namespace x86quant::runtime

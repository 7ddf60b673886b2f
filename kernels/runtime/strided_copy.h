// Copies bytes between two strided arrays of the same shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace x86quant::runtime {

class StridedCopy {
 public:
  // Of elements of so many bytes. Strides in bytes; they may differ in any way.
  StridedCopy(int64_t element_size, const std::vector<int64_t>& sizes,
              const std::vector<int64_t>& from_strides, const std::vector<int64_t>& to_strides);
  void run(const uint8_t* from, uint8_t* to) const { run(from, to, 0, items()); }
  // The part of it that is the items from `begin` to `end`, which threads may share.
  void run(const uint8_t* from, uint8_t* to, int64_t begin, int64_t end) const;
  int64_t items() const { return axes_.empty() ? 1 : axes_.front().size; }
  double bytes() const;

 private:
  struct Axis {
    int64_t size, from, to;
  };
  void copy(std::size_t axis, const uint8_t* from, uint8_t* to, int64_t begin, int64_t end) const;
  bool transposes(std::size_t axis) const;

  std::vector<Axis> axes_;  // outermost first
  int64_t unit_ = 1;        // bytes that the innermost axis moves at a time
};

}  // namespace x86quant::runtime

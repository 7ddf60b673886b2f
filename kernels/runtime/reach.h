// The bytes that steps touch, of each base, and how: what is held against the memory there is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace x86quant::runtime {

// What a step does to a tensor. Of these only an update may go to an input of the program, and only where the program's
// owner allows it: the cache of a decoder.
enum class Access {
  kRead,
  kWrite,
  kWriteSome,  // of these bytes; which ones shows in a run
  kUpdate,     // reads, and writes some
  kIndex,      // reads numbers that say where it reads or writes: checked once, so nobody may write to them meanwhile
};

// Elements of so many bytes from `offset` on; strides in bytes.
struct Extent {
  Access access;
  int64_t base, offset, element_size;
  std::vector<int64_t> sizes, strides;

  bool is_written() const { return access == Access::kWrite || access == Access::kWriteSome || access == Access::kUpdate; }
  bool is_read() const { return access == Access::kRead || access == Access::kUpdate || access == Access::kIndex; }
};

class Reach {
 public:
  struct Range {
    int64_t first = INT64_MAX, last = 0;  // bytes, the last one exclusive; empty at first

    bool is_empty() const { return first >= last; }
    bool operator==(const Range&) const = default;
    void extend(const Range& other);
  };
  struct Touched {
    Range all, read, written, updated, index;
    int64_t written_bytes = 0;  // of all writes together, of which several may be to one byte
    size_t before_read = 0;     // of several steps, extents written by those before the first that reads
  };

  // Throws a Refused for sizes and strides that no memory could have.
  static Range range_of(const Extent& extent);

  void add(Extent extent);
  // All elements of an input that has another number of them in each call, and the int64 that says how many.
  struct Open {
    int64_t base, element_size, count_base, count_offset;
  };
  void add(const Open& open) { open_.push_back(open); }

  // Of one step: whether it writes over nothing else that it reads or writes. Steps read as they go, so that an index
  // could change after it was checked.
  bool is_apart() const;

  // Of several steps.
  void add(const Reach& step);

  const std::map<int64_t, Touched>& touched() const { return touched_; }
  const std::vector<Open>& open() const { return open_; }
  // Of several steps: whether `bytes` bytes of `base` are surely written, each before any of them is read, where each
  // part of `parts` moves on by `advance` bytes.
  bool surely_writes(int64_t base, int64_t bytes, int64_t parts, int64_t advance) const;
  bool reads(int64_t base) const;
  // Of one step: what it touches of a base, a range for each tensor.
  std::vector<Range> ranges(int64_t base) const;

 private:
  // Bytes of `base` that the first `count` extents write, at least: of tensors that are known to share none.
  int64_t surely_written(int64_t base, int64_t parts, int64_t advance, size_t count) const;

  std::vector<Extent> extents_;  // of one step; of several, what they write outside of the arena
  std::map<int64_t, Touched> touched_;
  std::vector<Open> open_;
};

}  // namespace x86quant::runtime

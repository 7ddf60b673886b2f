#include <cstdio>
#include <random>
#include <set>

#include "check.h"
#include "runtime/errors.h"
#include "runtime/reach.h"

using namespace x86quant;
using namespace x86quant::runtime;

namespace {

std::mt19937 random_bits(1);
int64_t below(int64_t bound) { return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(bound)); }

using Bytes = std::set<int64_t>;

Bytes bytes_of(const Extent& extent, int64_t moved = 0) {
  Bytes places{extent.offset + moved}, bytes;
  for (size_t i = 0; i < extent.sizes.size(); ++i) {
    Bytes more;
    for (const int64_t place : places)
      for (int64_t at = 0; at < extent.sizes[i]; ++at) more.insert(place + at * extent.strides[i]);
    places = more;
  }
  for (const int64_t place : places)
    for (int64_t at = 0; at < extent.element_size; ++at) bytes.insert(place + at);
  return bytes;
}

Reach::Range span(const Bytes& bytes) {
  return bytes.empty() ? Reach::Range{} : Reach::Range{*bytes.begin(), *bytes.rbegin() + 1};
}

// Of a few bytes, mostly as tensors lie: the next stride steps over what the smaller ones reach, or nearly.
Extent any_extent(int64_t bases) {
  static const Access kinds[] = {Access::kRead, Access::kWrite, Access::kWrite, Access::kWriteSome, Access::kUpdate, Access::kIndex};
  Extent made{kinds[below(6)], below(bases), below(6), int64_t{1} << below(3), {}, {}};
  int64_t stride = made.element_size;
  for (int64_t i = below(4); i > 0; --i) {
    const int64_t size = 1 + below(3);
    made.sizes.push_back(size), made.strides.push_back(stride);
    stride = stride * size + below(3) - (below(4) == 0);
  }
  for (size_t i = 0; i < made.sizes.size(); ++i)
    if (below(8) == 0) made.offset += (made.sizes[i] - 1) * made.strides[i], made.strides[i] = -made.strides[i];
  return made;
}

Reach of_step(const std::vector<Extent>& extents) {
  Reach step;
  for (const Extent& extent : extents) step.add(extent);
  return step;
}

void check_touched(const Reach& reach, const std::vector<Extent>& extents, int64_t base) {
  Bytes all, read, written, updated, index;
  int64_t count = 0;
  for (const Extent& extent : extents) {
    if (extent.base != base) continue;
    const Bytes bytes = bytes_of(extent);
    all.insert(bytes.begin(), bytes.end());
    const auto [access, _, offset, element_size, sizes, strides] = extent;
    if (access == Access::kRead || access == Access::kUpdate || access == Access::kIndex) read.insert(bytes.begin(), bytes.end());
    if (access == Access::kUpdate) updated.insert(bytes.begin(), bytes.end());
    if (access == Access::kIndex) index.insert(bytes.begin(), bytes.end());
    if (access == Access::kRead || access == Access::kIndex) continue;
    written.insert(bytes.begin(), bytes.end());
    int64_t elements = element_size;
    for (const int64_t size : sizes) elements *= size;
    count += elements;
  }
  CHECK(reach.reads(base) == !read.empty());
  const auto found = reach.touched().find(base);
  CHECK((found != reach.touched().end()) == !all.empty());
  if (all.empty()) return;
  const Reach::Touched& touched = found->second;
  CHECK(touched.all == span(all) && touched.read == span(read) && touched.written == span(written));
  CHECK(touched.updated == span(updated) && touched.index == span(index) && touched.written_bytes == count);
}

// Whether each of `bytes` bytes is written, and none is read that the same part has not written in an earlier step.
bool is_written(const std::vector<std::vector<Extent>>& steps, int64_t base, int64_t bytes, int64_t parts, int64_t advance) {
  Bytes all;
  for (int64_t part = 0; part < parts; ++part) {
    Bytes mine;
    for (const auto& step : steps) {
      Bytes now;
      for (const Extent& extent : step) {
        if (extent.base != base) continue;
        const Bytes touched = bytes_of(extent, part * advance);
        if (extent.access == Access::kWrite) now.insert(touched.begin(), touched.end());
        if (extent.access == Access::kRead || extent.access == Access::kUpdate || extent.access == Access::kIndex)
          for (const int64_t byte : touched)
            if (!mine.count(byte)) return false;
      }
      mine.insert(now.begin(), now.end());
    }
    all.insert(mine.begin(), mine.end());
  }
  for (int64_t byte = 0; byte < bytes; ++byte)
    if (!all.count(byte)) return false;
  return true;
}

int sure_of_one = 0, sure_of_parts = 0, apart = 0;

void one_step() {
  std::vector<Extent> extents;
  for (int64_t i = 1 + below(3); i > 0; --i) extents.push_back(any_extent(2));
  const Reach step = of_step(extents);
  bool shares = false;
  for (size_t i = 0; i < extents.size(); ++i) {
    const Bytes mine = bytes_of(extents[i]);
    CHECK(Reach::range_of(extents[i]) == span(mine));
    for (size_t j = 0; j < i; ++j) {
      if (extents[i].base != extents[j].base || !(extents[i].is_written() || extents[j].is_written())) continue;
      for (const int64_t byte : bytes_of(extents[j])) shares = shares || mine.count(byte);
    }
  }
  CHECK(!(step.is_apart() && shares));
  apart += step.is_apart() && extents.size() > 1;
  for (const int64_t base : {0, 1}) {
    check_touched(step, extents, base);
    std::vector<Reach::Range> ranges;
    for (const Extent& extent : extents)
      if (extent.base == base) ranges.push_back(span(bytes_of(extent)));
    CHECK(step.ranges(base) == ranges);
  }
}

void several_steps() {
  std::vector<std::vector<Extent>> steps;
  std::vector<Extent> all;
  Reach reach;
  int64_t bytes = 0;
  for (int64_t i = 1 + below(3); i > 0; --i) {
    steps.emplace_back();
    for (int64_t k = 1 + below(2); k > 0; --k) steps.back().push_back(any_extent(3));
    for (Extent& extent : steps.back()) {
      const int64_t first = Reach::range_of(extent).first;
      if (first < 0 || below(3) > 0) extent.offset -= first;
      if (extent.base == 1) bytes = std::max(bytes, Reach::range_of(extent).last);
      all.push_back(extent);
    }
    reach.add(of_step(steps.back()));
  }
  for (const int64_t base : {0, 1, 2}) check_touched(reach, all, base);
  const int64_t parts = 1 + below(3), advance = bytes + below(3) - 1;
  if (bytes == 0 || advance < 0) return;
  const int64_t whole = parts == 1 ? bytes : bytes + advance * (parts - 1);
  const bool sure = reach.surely_writes(1, whole, parts, advance);
  CHECK(!sure || is_written(steps, 1, whole, parts, advance));
  (parts == 1 ? sure_of_one : sure_of_parts) += sure;
}

Extent row(Access access, int64_t offset, int64_t bytes) { return {access, 1, offset, 1, {bytes}, {1}}; }

bool sure(const std::vector<std::vector<Extent>>& steps, int64_t bytes, int64_t parts, int64_t advance) {
  Reach reach;
  for (const auto& step : steps) reach.add(of_step(step));
  return reach.surely_writes(1, bytes, parts, advance);
}

void what_is_sure() {
  const Extent whole = row(Access::kWrite, 0, 8), read = row(Access::kRead, 0, 8);
  CHECK(sure({{whole}}, 8, 1, 0) && !sure({{whole}}, 9, 1, 0));
  CHECK(sure({{whole}, {read}}, 8, 1, 0) && !sure({{read}, {whole}}, 8, 1, 0) && !sure({{whole, read}}, 8, 1, 0));
  CHECK(sure({{row(Access::kWrite, 0, 4)}, {row(Access::kWrite, 4, 4)}, {read}}, 8, 1, 0));
  CHECK(!sure({{row(Access::kWrite, 0, 4)}, {read}, {row(Access::kWrite, 4, 4)}}, 8, 1, 0));
  CHECK(sure({{row(Access::kWrite, 2, 2)}, {whole}}, 8, 1, 0));  // a part of it before
  CHECK(!sure({{row(Access::kWriteSome, 0, 8)}}, 8, 1, 0) && !sure({{row(Access::kUpdate, 0, 8)}}, 8, 1, 0));
  CHECK(sure({{whole}}, 24, 3, 8) && !sure({{whole}}, 24, 3, 7) && !sure({{whole}}, 24, 2, 8));
  CHECK(sure({{whole}, {read}}, 24, 3, 8) && !sure({{whole}, {row(Access::kRead, 0, 9)}}, 24, 3, 8));
  CHECK(!sure({{whole}, {row(Access::kRead, -1, 8)}}, 24, 3, 8) && !sure({{read}, {whole}}, 24, 3, 8));
  CHECK(!sure({{row(Access::kWrite, 0, 4)}, {read}, {row(Access::kWrite, 4, 4)}}, 24, 3, 8));
  CHECK(!sure({{row(Access::kWrite, 8, 8)}, {row(Access::kRead, 8, 8)}}, 24, 3, 8));
  const Extent crossed{Access::kWrite, 1, 0, 1, {4, 3}, {1, 2}};  // 12 elements on 8 bytes
  CHECK(!sure({{crossed}}, 12, 1, 0));
}

bool is_refused(const Extent& extent) {
  try {
    Reach::range_of(extent);
  } catch (const Refused&) {
    return true;
  }
  return false;
}

void what_is_refused() {
  const int64_t most = int64_t{1} << 46;
  CHECK(!is_refused({Access::kRead, 0, 0, 1, {most}, {1}}) && is_refused({Access::kRead, 0, 1, 1, {most}, {1}}));
  CHECK(!is_refused({Access::kRead, 0, -most, 1, {}, {}}) && is_refused({Access::kRead, 0, -most - 1, 1, {}, {}}));
  CHECK(!is_refused({Access::kRead, 0, 0, most, {}, {}}) && is_refused({Access::kRead, 0, -1, most + 1, {}, {}}));
  CHECK(is_refused({Access::kRead, 0, 0, 0, {1}, {1}}) && is_refused({Access::kRead, 0, 0, -1, {1}, {1}}));
  CHECK(is_refused({Access::kRead, 0, 0, 1, {0}, {1}}) && is_refused({Access::kRead, 0, 0, 1, {-1}, {1}}));
  CHECK(is_refused({Access::kRead, 0, 0, 1, {1}, {}}) && is_refused({Access::kRead, 0, 0, 1, {}, {1}}));
  CHECK(is_refused({Access::kRead, 0, 0, 1, {most + 1}, {0}}) && is_refused({Access::kRead, 0, 0, 1, {1}, {most + 1}}));
  CHECK(!is_refused({Access::kRead, 0, 0, 1, {most / 2, 2}, {0, 0}}) && is_refused({Access::kRead, 0, 0, 1, {most / 2, 3}, {0, 0}}));
  CHECK(is_refused({Access::kRead, 0, 0, 1, {2}, {-most - 1}}) && !is_refused({Access::kRead, 0, 0, 1, {2}, {-most}}));
  // More bytes than are counted, of which none is counted twice.
  Reach reach;
  for (int i = 0; i < 3; ++i) reach.add({Access::kWrite, 1, 0, most, {most}, {0}});
  CHECK(reach.touched().at(1).written_bytes == INT64_MAX);
  Reach two;
  two.add(reach), two.add(reach);
  CHECK(two.touched().at(1).written_bytes == INT64_MAX);
}

}  // namespace

int main() {
  what_is_sure();
  what_is_refused();
  for (int i = 0; i < 15'000; ++i) one_step(), several_steps();
  std::printf("%d %d %d\n", apart, sure_of_one, sure_of_parts);
}

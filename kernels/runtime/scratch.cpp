#include "scratch.h"

namespace x86quant::runtime {
namespace {

// One buffer for each level of nesting.
struct Levels {
  std::vector<Buffer> buffers;
  size_t in_use = 0;
};

Levels& levels() {
  thread_local Levels of_this_thread;
  return of_this_thread;
}

}  // namespace

Scratch::Scratch(size_t bytes) {
  Levels& all = levels();
  if (all.in_use == all.buffers.size()) all.buffers.emplace_back();
  Buffer& mine = all.buffers[all.in_use];
  if (mine.size() < bytes) {
    mine = Buffer();  // freed first: the two never coexist
    mine = Buffer(bytes);
  }
  data_ = mine.data();
  ++all.in_use;
}

Scratch::~Scratch() {
  Levels& all = levels();
  Buffer& mine = all.buffers[--all.in_use];
  if (mine.size() > kMostKept) mine = Buffer();
}

}  // namespace x86quant::runtime

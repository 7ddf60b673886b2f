// A file read into memory at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "memory.h"

namespace x86quant::runtime {

struct FileFacts {
  bool is_regular;
  uint32_t owner, mode;  // as the system has them
};

class WholeFile {
 public:
  // False, with errno, where it cannot be read; or where `accepts` says no to what it is.
  bool read(const std::string& path, bool (*accepts)(const FileFacts& facts));

  const uint8_t* data() const { return bytes_.data(); }
  size_t size() const { return size_; }

 private:
  Buffer bytes_;
  size_t size_ = 0;
};

}  // namespace x86quant::runtime

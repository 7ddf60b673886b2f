// Packed weights beside a program file, so that the next load need not order them again.
//
// They are used if they were written by this very library, for this file, this level and these caches, nothing in them
// has changed, and nobody but this user or root could have written them: kernels follow what packed weights say. Else
// they are as good as not there.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../runtime/table.h"

namespace x86quant::serving {

// What packed weights depend on.
struct CacheKey {
  std::string level;
  int64_t l1, l2;
  uint32_t program;  // the checksum of the program file
  uint64_t program_size;

  std::string text() const;
};

// All of them, in the order of the program file, or none.
std::optional<std::vector<runtime::Table>> read_packed(const std::string& path, const CacheKey& key);

// Whether they were written; where not, the next load packs again.
bool write_packed(const std::string& path, const CacheKey& key, const std::vector<runtime::Table>& packed);

}  // namespace x86quant::serving

// Packed weights beside a model's file, so that the next load need not order them again.
//
// They are used if they were written by this very library, for this file, this level and these caches, nothing in them
// has changed, and nobody but this user or root could have written them: kernels follow what packed weights say. Else
// they are as good as not there.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "table.h"

namespace x86quant::runtime {

// What packed weights depend on.
struct CacheKey {
  std::string level;
  int64_t l1, l2;
  std::string model;  // what tells its file from any other

  std::string text() const;
};

// All of them, in the order in which they were written, or none; then `why` says why not.
std::optional<std::vector<Table>> read_packed(const std::string& path, const CacheKey& key, std::string* why = nullptr);

// Whether they were written; where not, the next load packs again.
bool write_packed(const std::string& path, const CacheKey& key, const std::vector<Table>& packed);

}  // namespace x86quant::runtime

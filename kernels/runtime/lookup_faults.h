// What is wrong with an index or an offset, in words.
#pragma once

#include <string>

#include "../native/lookup.h"

namespace x86quant::runtime {

inline std::string fault_text(const xq_lookup& op, const xq_lookup_fault& fault) {
  const std::string value = std::to_string(fault.value), position = std::to_string(fault.position);
  switch (fault.kind) {
    case XQ_FAULT_INDEX:
      return "index " + value + " at position " + position + " is not in 0.." + std::to_string(op.row_count - 1);
    case XQ_FAULT_FIRST: return "offsets must start with 0, got " + value;
    case XQ_FAULT_OFFSET:
      return "offset " + position + " is less than the one before it, or beyond the " + std::to_string(op.index_count) +
             " indices: " + value;
    default:
      return "the last offset is " + value + ", but there are " + std::to_string(op.index_count) + " indices";
  }
}

// What a table is called.
inline std::string table_text(const std::string& name, int64_t rows) {
  return "the table " + (name.empty() ? "of " + std::to_string(rows) + " rows" : name);
}

}  // namespace x86quant::runtime

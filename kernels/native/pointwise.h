#pragma once
#include "internal.h"
namespace {
inline void op_rows(const xq_op& op, int64_t begin, int64_t end) { xq::op_reference(op, begin, end); }
}

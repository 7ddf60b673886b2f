// The kinds of steps a program has.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "conv_kernel.h"
#include "memory.h"
#include "program.h"
#include "strided_copy.h"

namespace x86quant::runtime {

std::unique_ptr<Step> conv_step(c10::intrusive_ptr<PackedConv> conv, const Place& in,
                                const Place& out, const Place& residual);

std::unique_ptr<Step> op_step(const std::string& kind, const Place& a, const Place& b, const Place& out,
                              const c10::Dict<std::string, Words>& integers,
                              const c10::Dict<std::string, std::vector<double>>& reals,
                              const c10::Dict<std::string, at::Tensor>& tables);

std::unique_ptr<Step> copy_step(StridedCopy copy, int64_t from_base, int64_t from_offset,
                                int64_t to_base, int64_t to_offset);

}  // namespace x86quant::runtime

// Between torch's tensors and the runtime's tables.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include "conv_kernel.h"

namespace x86quant::runtime {

inline Table table_of(const at::Tensor& tensor) {
  auto kept = std::make_shared<const at::Tensor>(tensor.contiguous());
  Type type = Type::kOther;
  if (tensor.scalar_type() == at::kByte) type = Type::kByte;
  if (tensor.scalar_type() == at::kChar) type = Type::kChar;
  if (tensor.scalar_type() == at::kHalf) type = Type::kHalf;
  if (tensor.scalar_type() == at::kFloat) type = Type::kFloat;
  if (!tensor.is_cpu()) type = Type::kOther;
  const void* data = type == Type::kOther ? nullptr : kept->const_data_ptr();
  return {data, type, tensor.numel(), std::move(kept)};
}

inline at::Tensor tensor_of(const Table& table, at::IntArrayRef sizes) {
  const auto type = table.type == Type::kFloat ? at::kFloat : table.type == Type::kChar ? at::kChar : at::kByte;
  const auto keep = [owner = table.owner](void*) {};
  return at::from_blob(const_cast<void*>(table.data), sizes, keep, type);
}

// (out, in / groups, kd, kh, kw)
inline at::Tensor weight_of(const ConvDescription& d) {
  const xq_conv& c = d.conv;
  return tensor_of(d.weight, {c.out_channels, d.in_each, c.kernel[0], c.kernel[1], c.kernel[2]});
}

}  // namespace x86quant::runtime

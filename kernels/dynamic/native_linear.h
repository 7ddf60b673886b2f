// An int8 linear on float rows by kernels/native: packed weights, and products on the pool of threads.
#pragma once

#include "../native/native.h"
#include "../runtime/memory.h"
#include "kernel.h"

namespace x86quant::dynamic {

class NativeLinear {
 public:
  explicit NativeLinear(const Description& d);

  // out = activation(rows of `in` times the weight + bias); strides in floats.
  void multiply(const float* in, int64_t rows, int64_t in_stride, float* out, int64_t out_stride) const;

  int64_t in_features() const { return linear_.in_features; }
  int64_t out_features() const { return linear_.out_features; }
  int64_t bytes() const { return static_cast<int64_t>(packed_.size()); }

 private:
  int64_t most_rows() const;
  void multiply_some(const float* in, int64_t rows, int64_t in_stride, float* out, int64_t out_stride) const;

  xq_linear linear_;
  runtime::Buffer packed_;
};

}  // namespace x86quant::dynamic

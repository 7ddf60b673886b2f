// A step that is an op of native.h: what the files of these kinds share.
#pragma once

#include "../runtime/step.h"

namespace x86quant::runtime {

// Filled by a kind from its fields, then made a step. It starts with tensors "a" and "out", of codes unless given.
class NativeOp {
 public:
  NativeOp(xq_op_kind kind, StepFields& fields) : NativeOp(kind, fields, fields.tensor(Access::kRead, "a"), fields.tensor(Access::kWrite, "out")) {}
  NativeOp(xq_op_kind kind, StepFields& fields, Place a, Place out);

  StepFields& fields;
  xq_op op{};
  Place a, b, out;

  void read_b();                     // tensor "b"
  void read_rounding();              // "out_zp"; "lo", "hi" and "lut", where it has them
  const uint8_t* codes(const char* name);                // a table of 256 codes
  const float* reals(const char* name);                  // a table of 256 floats
  const float* one_a_channel(const char* name);          // a float for each channel of the output

  // Checks the op.
  StepPtr step() &&;

 private:
  std::vector<Table> kept_;  // what op points to
};

}  // namespace x86quant::runtime

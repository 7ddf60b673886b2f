// Ops with parameters of their own for every channel.
#include "native_op.h"

namespace x86quant::runtime {
namespace {

StepPtr affine(StepFields& fields) {
  NativeOp op(XQ_OP_AFFINE, fields);
  op.op.a_zp = fields.zero_point("a_zp");
  op.op.scale_c = op.one_a_channel("scale_c");
  op.op.shift_c = op.one_a_channel("shift_c");
  op.read_rounding();
  return std::move(op).step();
}

StepPtr layer_norm(StepFields& fields) {
  NativeOp op(XQ_OP_LAYER_NORM, fields);
  op.op.a_mult = fields.real("a_mult");
  op.op.eps = fields.real("eps");
  if (fields.has("scale_c")) op.op.scale_c = op.one_a_channel("scale_c");
  if (fields.has("shift_c")) op.op.shift_c = op.one_a_channel("shift_c");
  op.read_rounding();
  return std::move(op).step();
}

const RegisterStep kinds[] = {{"affine", affine}, {"layer_norm", layer_norm}};

}  // namespace
}  // namespace x86quant::runtime

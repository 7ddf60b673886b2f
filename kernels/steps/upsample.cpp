// Upsampling.
#include "native_op.h"

namespace x86quant::runtime {
namespace {

StepPtr upsample(xq_op_kind kind, StepFields& fields) {
  NativeOp op(kind, fields);
  fields.triple("scale", op.op.scale);
  op.op.align_corners = fields.flag("align_corners");
  op.op.a_zp = fields.zero_point("a_zp");
  op.op.a_mult = fields.real("a_mult");
  op.read_rounding();
  return std::move(op).step();
}

const RegisterStep kinds[] = {
    {"nearest", [](StepFields& fields) { return upsample(XQ_OP_NEAREST, fields); }},
    {"bilinear", [](StepFields& fields) { return upsample(XQ_OP_BILINEAR, fields); }},
};

}  // namespace
}  // namespace x86quant::runtime

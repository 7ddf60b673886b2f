// Ops on codes in their places: tables, other scales, sums, products, channels in another order.
#include "native_op.h"

namespace x86quant::runtime {
namespace {

StepPtr copy(StepFields& fields) { return NativeOp(XQ_OP_COPY, fields).step(); }

StepPtr lut(StepFields& fields) {
  NativeOp op(XQ_OP_LUT, fields);
  op.op.lut = op.codes("lut");
  return std::move(op).step();
}

StepPtr requantize(StepFields& fields) {
  NativeOp op(XQ_OP_REQUANT, fields);
  op.op.a_zp = fields.zero_point("a_zp");
  op.op.a_mult = fields.real("a_mult");
  op.read_rounding();
  return std::move(op).step();
}

StepPtr add(StepFields& fields) {
  NativeOp op(XQ_OP_ADD, fields);
  op.read_b();
  op.op.a_zp = fields.zero_point("a_zp"), op.op.b_zp = fields.zero_point("b_zp");
  op.op.a_mult = fields.real("a_mult"), op.op.b_mult = fields.real("b_mult");
  op.read_rounding();
  return std::move(op).step();
}

StepPtr mul(StepFields& fields) {
  NativeOp op(XQ_OP_MUL, fields);
  op.read_b();
  op.op.a_zp = fields.zero_point("a_zp"), op.op.b_zp = fields.zero_point("b_zp");
  op.op.a_mult = fields.real("mult");
  op.read_rounding();
  return std::move(op).step();
}

StepPtr shuffle(StepFields& fields) {
  NativeOp op(XQ_OP_SHUFFLE, fields);
  op.op.groups = fields.small("groups");
  return std::move(op).step();
}

const RegisterStep kinds[] = {
    {"copy", copy}, {"lut", lut}, {"requantize", requantize}, {"add", add}, {"mul", mul}, {"shuffle", shuffle},
};

}  // namespace
}  // namespace x86quant::runtime

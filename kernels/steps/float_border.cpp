// From float32 to codes and back.
#include "native_op.h"

namespace x86quant::runtime {
namespace {

StepPtr quantize(StepFields& fields) {
  const int64_t stride_c = fields.integer("a_stride_c");
  NativeOp op(XQ_OP_QUANTIZE, fields, fields.reals(Access::kRead, "a", stride_c), fields.tensor(Access::kWrite, "out"));
  op.op.a_stride_c = stride_c;
  op.op.a_mult = fields.real("a_mult");
  op.read_rounding();
  return std::move(op).step();
}

StepPtr dequantize(StepFields& fields) {
  const int64_t stride_c = fields.integer("out_stride_c");
  NativeOp op(XQ_OP_DEQUANTIZE, fields, fields.tensor(Access::kRead, "a"), fields.reals(Access::kWrite, "out", stride_c));
  op.op.out_stride_c = stride_c;
  op.op.a_zp = fields.zero_point("a_zp");
  op.op.a_mult = fields.real("a_mult");
  return std::move(op).step();
}

StepPtr lut_real(StepFields& fields) {
  const int64_t stride_c = fields.integer("out_stride_c");
  NativeOp op(XQ_OP_LUT_REAL, fields, fields.tensor(Access::kRead, "a"), fields.reals(Access::kWrite, "out", stride_c));
  op.op.out_stride_c = stride_c;
  op.op.reals = op.reals("table");
  return std::move(op).step();
}

const RegisterStep kinds[] = {{"quantize", quantize}, {"dequantize", dequantize}, {"lut_real", lut_real}};

}  // namespace
}  // namespace x86quant::runtime

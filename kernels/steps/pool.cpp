// Pools.
#include "native_op.h"

namespace x86quant::runtime {
namespace {

void read_window(NativeOp& op) {
  op.fields.triple("kernel", op.op.kernel);
  op.fields.triple("stride", op.op.stride);
  op.fields.triple("padding", op.op.padding);
  op.fields.triple("dilation", op.op.dilation);
}

void read_average(NativeOp& op) {
  op.op.a_zp = op.fields.zero_point("a_zp");
  op.op.a_mult = op.fields.real("a_mult");
  op.read_rounding();
}

StepPtr max_pool(StepFields& fields) {
  NativeOp op(XQ_OP_MAX_POOL, fields);
  read_window(op);
  return std::move(op).step();
}

StepPtr avg_pool(StepFields& fields) {
  NativeOp op(XQ_OP_AVG_POOL, fields);
  read_window(op);
  read_average(op);
  op.op.count_include_pad = fields.flag("count_include_pad");
  return std::move(op).step();
}

StepPtr adaptive_avg_pool(StepFields& fields) {
  NativeOp op(XQ_OP_ADAPTIVE_POOL, fields);
  read_average(op);
  return std::move(op).step();
}

const RegisterStep kinds[] = {
    {"max_pool", max_pool}, {"avg_pool", avg_pool}, {"adaptive_avg_pool", adaptive_avg_pool}};

}  // namespace
}  // namespace x86quant::runtime

// Codes of rows of floats that a step has computed.
#pragma once

#include "../runtime/errors.h"
#include "../runtime/native_cpu.h"
#include "../runtime/step.h"

namespace x86quant::runtime {

class RowRounding {
 public:
  RowRounding() = default;
  // Reads the field of the factor, and has the zero point. Throws what the native op has against it.
  RowRounding(StepFields& fields, const char* factor, int32_t zero_point, int64_t channels) : channels_(channels) {
    op_.kind = XQ_OP_QUANTIZE, op_.isa = native_isa(), op_.hi = 255, op_.groups = 1;
    op_.a_stride_c = sizeof(float), op_.a_mult = fields.real(factor), op_.out_zp = zero_point;
    const xq_op one = of(reinterpret_cast<float*>(uintptr_t{64}), reinterpret_cast<uint8_t*>(uintptr_t{64}), 1, channels);
    const int status = xq_op_check(&one);
    require(status == XQ_OK, "step \"", fields.kind(), "\" of a plan: ", xq_status_text(status));
  }

  // Of rows one behind the other, to rows that are `apart` bytes from one another.
  void run(float* from, uint8_t* to, int64_t rows, int64_t apart) const {
    const xq_op op = of(from, to, rows, apart);
    xq_op_run(&op, 0, xq_op_items(&op));
  }

 private:
  xq_op of(float* from, uint8_t* to, int64_t rows, int64_t apart) const {
    const auto view = [&](uint8_t* data, int64_t stride) {
      xq_tensor t{};
      t.data = data, t.n = t.d = t.h = 1, t.w = rows, t.c = channels_;
      t.stride_w = stride, t.stride_h = t.stride_d = t.stride_n = rows * stride;
      return t;
    };
    xq_op op = op_;
    op.a = view(reinterpret_cast<uint8_t*>(from), channels_ * static_cast<int64_t>(sizeof(float))), op.out = view(to, apart);
    return op;
  }

  xq_op op_{};
  int64_t channels_ = 0;
};

}  // namespace x86quant::runtime

// Products of floats: dispatch and the plain loops.
#include "float_products.h"

#include <cmath>

#include "float_loops.h"
#include "internal.h"

namespace xq {
namespace {

void product_reference(const xq_float_product& op, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t n = 0; n < op.out_features; ++n) {
      const float* weight = op.weight + (n / XQ_PANEL * op.panel + op.skipped) * XQ_PANEL + n % XQ_PANEL;
      float sum = op.onto ? op.out[row * op.out_stride + n] : op.bias[n];
      for (int64_t k = 0; k < op.features; ++k) sum = std::fma(op.in[row * op.in_stride + k], weight[k * XQ_PANEL], sum);
      op.out[row * op.out_stride + n] = sum;
    }
}

void taps_reference(const xq_float_taps& op, int64_t begin, int64_t end) {
  for (int64_t pixel = begin; pixel < end; ++pixel)
    for (int64_t c = 0; c < op.channels; ++c) {
      float sum = op.bias[c];
      for (int64_t t = 0; t < op.taps; ++t)
        sum = std::fma(op.in[pixel * op.in_stride + op.offsets[t] + c], op.weight[op.which[t] * op.channels + c], sum);
      op.out[pixel * op.out_stride + c] = sum;
    }
}

float function_of(const xq_float_function& f, float y, float x) {
  switch (f.kind) {
    case XQ_FLOAT_ADD: return y + f.a;
    case XQ_FLOAT_MUL: return y * f.a;
    case XQ_FLOAT_LEAST: return y < f.a ? f.a : y;
    case XQ_FLOAT_MOST: return y > f.a ? f.a : y;
    case XQ_FLOAT_SIGMOID: return 1 / (1 + std::exp(-y));
    case XQ_FLOAT_TANH: return std::tanh(y);
    case XQ_FLOAT_TIMES_X: return y * x;
    default: return y;
  }
}

void functions_reference(const xq_float_function* functions, int64_t how_many, float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float x = values[i], y = x;
    for (int64_t f = 0; f < how_many; ++f) {
      y = function_of(functions[f], y, x);
      if (functions[f].kind == XQ_FLOAT_X) x = y;
    }
    values[i] = y;
  }
}

}  // namespace
}  // namespace xq

using namespace xq;

void xq_float_product_run(const xq_float_product* op, int64_t begin, int64_t end) {
  op->isa == XQ_ISA_REFERENCE ? product_reference(*op, begin, end) : float_loops_of(op->isa).product(*op, begin, end);
}

void xq_float_taps_run(const xq_float_taps* op, int64_t begin, int64_t end) {
  op->isa == XQ_ISA_REFERENCE ? taps_reference(*op, begin, end) : float_loops_of(op->isa).taps(*op, begin, end);
}

void xq_float_functions_run(const xq_float_function* functions, int64_t how_many, float* values, int64_t count, int32_t isa) {
  isa == XQ_ISA_REFERENCE ? functions_reference(functions, how_many, values, count)
                          : float_loops_of(isa).functions(functions, how_many, values, count);
}

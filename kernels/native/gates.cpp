// The gates of LSTMs and GRUs: dispatch and the plain loops.
#include "gates.h"

#include <cmath>

#include "float_loops.h"
#include "internal.h"

namespace xq {
namespace {

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

void lstm_reference(const xq_lstm_gates& op, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n)
    for (int64_t u = 0; u < op.units; ++u) {
      const auto sum = [&](int64_t gate) {
        return op.own[n * op.own_stride + gate * op.units + u] + op.hidden[n * op.hidden_stride + gate * op.units + u];
      };
      float& c = op.c[n * op.c_stride + u];
      c = std::fma(sigmoid(sum(1)), c, sigmoid(sum(0)) * std::tanh(sum(2)));
      op.h[n * op.h_stride + u] = sigmoid(sum(3)) * std::tanh(c);
    }
}

void gru_reference(const xq_gru_gates& op, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n)
    for (int64_t u = 0; u < op.units; ++u) {
      const float *own = op.own + n * op.own_stride + u, *hidden = op.hidden + n * op.hidden_stride + u;
      const float before = op.before[n * op.before_stride + u];
      const float reset = sigmoid(own[0] + hidden[0]), update = sigmoid(own[op.units] + hidden[op.units]);
      const float fresh = std::tanh(std::fma(reset, hidden[2 * op.units], own[2 * op.units]));
      op.h[n * op.h_stride + u] = std::fma(update, before - fresh, fresh);
    }
}

}  // namespace
}  // namespace xq

using namespace xq;

void xq_lstm_gates_run(const xq_lstm_gates* op, int64_t begin, int64_t end) {
  op->isa == XQ_ISA_REFERENCE ? lstm_reference(*op, begin, end) : float_loops_of(op->isa).lstm_gates(*op, begin, end);
}

void xq_gru_gates_run(const xq_gru_gates* op, int64_t begin, int64_t end) {
  op->isa == XQ_ISA_REFERENCE ? gru_reference(*op, begin, end) : float_loops_of(op->isa).gru_gates(*op, begin, end);
}

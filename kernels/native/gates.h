// What follows the matrix products of an LSTM or a GRU at one step, in float32.
//
// `own` is the share of the gates that comes from the input, `hidden` what comes from the state; both have the
// gates of a sequence in torch's order, adjacent: i, f, g, o, or r, z, n. Sequences are rows, `*_stride` floats
// apart. Sigmoid and tanh are rational approximations, wrong by less than 6e-7 everywhere, the same bytes at every level.
// NaN stays NaN. x86quant/ops/recurrence.py has every step of them.
//
//     LSTM   c = fma(sigmoid(f), c, sigmoid(i) * tanh(g)),  h = sigmoid(o) * tanh(c)
//     GRU    n = tanh(fma(sigmoid(r), hidden_n, own_n)),    h = fma(sigmoid(z), h - n, n)
#pragma once

#include "native.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct xq_lstm_gates {
  const float *own, *hidden;
  int64_t own_stride, hidden_stride;
  float *c, *h;
  int64_t c_stride, h_stride;
  int64_t units;
  int32_t isa;
} xq_lstm_gates;

typedef struct xq_gru_gates {
  const float *own, *hidden;
  int64_t own_stride, hidden_stride;
  const float* before;  // the state so far, whose rows are `before_stride` apart
  float* h;             // may be the same
  int64_t before_stride, h_stride;
  int64_t units;
  int32_t isa;
} xq_gru_gates;

// Sequences [begin, end).
XQ_API void xq_lstm_gates_run(const xq_lstm_gates* op, int64_t begin, int64_t end);
XQ_API void xq_gru_gates_run(const xq_gru_gates* op, int64_t begin, int64_t end);

#ifdef __cplusplus
}
#endif

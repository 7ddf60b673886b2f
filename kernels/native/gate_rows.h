// The gates of LSTMs and GRUs over the vector type of float_lanes.h.
#pragma once

#include "float_lanes.h"
#include "float_loops.h"
#include "internal.h"
#include "unroll.h"

namespace {

// tanh(x) = x P(x²) / Q(x²), a fit whose error is less than 2e-8 before rounding; beyond 9.1 the tanh is 1 in
// float32. A NaN survives min and max because it is their second operand.
inline Lanes::F tanh_of(Lanes::F x) {
  using F = Lanes::F;
  const F limit = Lanes::set(9.1f);
  x = Lanes::max(Lanes::sub(Lanes::set(0), limit), Lanes::min(limit, x));
  const F t = Lanes::mul(x, x);
  F p = Lanes::set(1.31842109e-08f), q = Lanes::set(7.7026578e-07f);
  p = Lanes::fma(p, t, Lanes::set(2.04718199e-05f)), q = Lanes::fma(q, t, Lanes::set(0.000327138427f));
  p = Lanes::fma(p, t, Lanes::set(0.00348658119f)), q = Lanes::fma(q, t, Lanes::set(0.0258419764f));
  p = Lanes::fma(p, t, Lanes::set(0.133731971f)), q = Lanes::fma(q, t, Lanes::set(0.467064939f));
  p = Lanes::fma(p, t, Lanes::set(0.999999906f)), q = Lanes::fma(q, t, Lanes::set(1.0f));
  const F found = Lanes::ratio(Lanes::mul(x, p), q), one = Lanes::set(1);
  return Lanes::max(Lanes::set(-1), Lanes::min(one, found));
}

inline Lanes::F sigmoid_of(Lanes::F x) {
  const Lanes::F half = Lanes::set(0.5f);
  return Lanes::fma(tanh_of(Lanes::mul(x, half)), half, half);
}

// The next `count` units of a sequence, fewer than a vector at its end.
struct Units {
  int64_t count;
  XQ_INLINE Lanes::F load(const float* p) const { return count == Lanes::kLanes ? Lanes::load(p) : Lanes::load_some(p, count); }
  XQ_INLINE void store(float* p, Lanes::F v) const { count == Lanes::kLanes ? Lanes::store(p, v) : Lanes::store_some(p, v, count); }
  // The sum of both shares.
  XQ_INLINE Lanes::F sum(const float* own, const float* hidden) const { return Lanes::add(load(own), load(hidden)); }
};

inline Units units_at(int64_t u, int64_t units) { return {xq::min64(units - u, Lanes::kLanes)}; }

void lstm_gates(const xq_lstm_gates& op, int64_t begin, int64_t end) {
  const int64_t units = op.units;
  for (int64_t n = begin; n < end; ++n)
    for (int64_t u = 0; u < units; u += Lanes::kLanes) {
      const Units some = units_at(u, units);
      const float *own = op.own + n * op.own_stride + u, *hidden = op.hidden + n * op.hidden_stride + u;
      float* c = op.c + n * op.c_stride + u;
      const auto enters = sigmoid_of(some.sum(own, hidden)), stays = sigmoid_of(some.sum(own + units, hidden + units));
      const auto fresh = tanh_of(some.sum(own + 2 * units, hidden + 2 * units));
      const auto leaves = sigmoid_of(some.sum(own + 3 * units, hidden + 3 * units));
      const auto cell = Lanes::fma(stays, some.load(c), Lanes::mul(enters, fresh));
      some.store(c, cell);
      some.store(op.h + n * op.h_stride + u, Lanes::mul(leaves, tanh_of(cell)));
    }
}

void gru_gates(const xq_gru_gates& op, int64_t begin, int64_t end) {
  const int64_t units = op.units;
  for (int64_t n = begin; n < end; ++n)
    for (int64_t u = 0; u < units; u += Lanes::kLanes) {
      const Units some = units_at(u, units);
      const float *own = op.own + n * op.own_stride + u, *hidden = op.hidden + n * op.hidden_stride + u;
      const auto reset = sigmoid_of(some.sum(own, hidden)), update = sigmoid_of(some.sum(own + units, hidden + units));
      const auto fresh = tanh_of(Lanes::fma(reset, some.load(hidden + 2 * units), some.load(own + 2 * units)));
      const auto before = some.load(op.before + n * op.before_stride + u);
      some.store(op.h + n * op.h_stride + u, Lanes::fma(update, Lanes::sub(before, fresh), fresh));
    }
}

}  // namespace

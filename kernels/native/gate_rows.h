// The gates of LSTMs and GRUs over the vector type `Lanes` of the file that includes this.
#pragma once

#include "float_loops.h"
#include "internal.h"
#include "unroll.h"

namespace {

// tanh(x) = top / bottom = x P(x²) / Q(x²), a fit whose error is less than 2e-8 before rounding; beyond 9.1 the tanh is 1
// in float32. bottom is from 1 to 450. A NaN survives min and max because it is their second operand.
struct Ratio {
  Lanes::F top, bottom;
};

XQ_INLINE inline Ratio tanh_of(Lanes::F x) {
  using F = Lanes::F;
  const F limit = Lanes::setf(9.1f);
  x = Lanes::max(Lanes::sub(Lanes::setf(0), limit), Lanes::min(limit, x));
  const F t = Lanes::mul(x, x);
  F p = Lanes::setf(1.31842109e-08f), q = Lanes::setf(7.7026578e-07f);
  p = Lanes::fma(p, t, Lanes::setf(2.04718199e-05f)), q = Lanes::fma(q, t, Lanes::setf(0.000327138427f));
  p = Lanes::fma(p, t, Lanes::setf(0.00348658119f)), q = Lanes::fma(q, t, Lanes::setf(0.0258419764f));
  p = Lanes::fma(p, t, Lanes::setf(0.133731971f)), q = Lanes::fma(q, t, Lanes::setf(0.467064939f));
  p = Lanes::fma(p, t, Lanes::setf(0.999999906f)), q = Lanes::fma(q, t, Lanes::setf(1.0f));
  return {Lanes::mul(x, p), q};
}

// sigmoid(x) = (bottom + top) / (2 bottom) of tanh(x / 2).
XQ_INLINE inline Ratio half_tanh_of(Lanes::F x) { return tanh_of(Lanes::mul(x, Lanes::setf(0.5f))); }
XQ_INLINE inline Lanes::F up(Ratio r) { return Lanes::add(r.bottom, r.top); }
XQ_INLINE inline Lanes::F down(Ratio r) { return Lanes::sub(r.bottom, r.top); }
XQ_INLINE inline Lanes::F twice(Lanes::F x) { return Lanes::add(x, x); }

// The next `count` units of a sequence, fewer than a vector at its end.
struct Units {
  int64_t count;
  XQ_INLINE Lanes::F load(const float* p) const { return count == Lanes::kLanes ? Lanes::loadf(p) : Lanes::load_floats(p, count); }
  XQ_INLINE void store(float* p, Lanes::F v) const { count == Lanes::kLanes ? Lanes::storef(p, v) : Lanes::store_floats(p, v, count); }
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
      const Ratio enters = half_tanh_of(some.sum(own, hidden)), stays = half_tanh_of(some.sum(own + units, hidden + units));
      const Ratio fresh = tanh_of(some.sum(own + 2 * units, hidden + 2 * units));
      const Ratio leaves = half_tanh_of(some.sum(own + 3 * units, hidden + 3 * units));
      // One division for the cell and one for the state: they take longer than all else.
      const auto both = Lanes::mul(enters.bottom, fresh.bottom), added = Lanes::mul(up(enters), fresh.top);
      const auto kept = Lanes::mul(up(stays), some.load(c));
      const auto cell = Lanes::div(Lanes::fma(kept, both, Lanes::mul(added, stays.bottom)), twice(Lanes::mul(stays.bottom, both)));
      some.store(c, cell);
      const Ratio seen = tanh_of(cell);
      some.store(op.h + n * op.h_stride + u,
                 Lanes::div(Lanes::mul(up(leaves), seen.top), twice(Lanes::mul(leaves.bottom, seen.bottom))));
    }
}

void gru_gates(const xq_gru_gates& op, int64_t begin, int64_t end) {
  const int64_t units = op.units;
  for (int64_t n = begin; n < end; ++n)
    for (int64_t u = 0; u < units; u += Lanes::kLanes) {
      const Units some = units_at(u, units);
      const float *own = op.own + n * op.own_stride + u, *hidden = op.hidden + n * op.hidden_stride + u;
      const Ratio gate = half_tanh_of(some.sum(own, hidden)), update = half_tanh_of(some.sum(own + units, hidden + units));
      const auto reset = Lanes::div(up(gate), twice(gate.bottom));
      const Ratio fresh = tanh_of(Lanes::fma(reset, some.load(hidden + 2 * units), some.load(own + 2 * units)));
      const auto kept = Lanes::mul(up(update), some.load(op.before + n * op.before_stride + u));
      const auto sum = Lanes::fma(kept, fresh.bottom, Lanes::mul(down(update), fresh.top));
      some.store(op.h + n * op.h_stride + u, Lanes::div(sum, twice(Lanes::mul(update.bottom, fresh.bottom))));
    }
}

}  // namespace

// Random lookups, interactions and gates for fuzz.cpp, on heap blocks of exactly their size.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../../kernels/native/gates.h"
#include "../../../kernels/native/lookup.h"

namespace {

// Good calls must agree with the plain loops; bad indices and offsets must be found, whatever they are.
template <class Random>
bool lookup_agrees(Random& r, const std::vector<int>& isas) {
  xq_lookup op{};
  op.bits = r.one_in(4) ? 32 : 1 << r.upto(3), op.dim = r.upto(300), op.half = r.one_in(2);
  const bool floats = op.bits == 32;
  const int bytes = (op.dim * op.bits + 7) / 8, scale = floats ? 0 : op.half ? 4 : 8, gap = r.upto(3) - 1;
  const bool front = r.one_in(2);
  op.codes_at = front ? scale + gap : 0, op.scale_at = front ? 0 : bytes + gap;
  op.row_count = r.upto(30), op.row_stride = bytes + scale + gap;
  std::vector<uint8_t> rows = r.bytes(static_cast<size_t>(op.row_count * op.row_stride));
  if (floats)
    for (uint8_t& byte : rows) byte &= 0x3f;  // numbers, wherever a row starts
  for (int64_t i = 0; !floats && i < op.row_count; ++i) {  // scales that are numbers
    const float wide[2] = {static_cast<float>(r.byte()) / 64, static_cast<float>(r.byte() - 128)};
    const uint16_t narrow[2] = {static_cast<uint16_t>(r.byte() << 6), static_cast<uint16_t>(r.byte() % 248 << 7)};
    uint8_t* to = rows.data() + i * op.row_stride + op.scale_at;
    op.half ? std::memcpy(to, narrow, 4) : std::memcpy(to, wide, 8);
  }
  op.rows = rows.data();
  op.mode = r.upto(3) - 1, op.long_indices = r.one_in(2), op.padding = r.one_in(3) ? r.upto(30) - 1 : -1;
  op.bags = r.upto(600) - 1, op.last_offset = r.one_in(2);
  const bool with_offsets = op.bags > 0 && !r.one_in(3);
  std::vector<int64_t> offsets(1), indices;
  op.each = with_offsets ? 0 : r.upto(4) - 1;
  for (int64_t bag = 0; bag < op.bags; ++bag) offsets.push_back(offsets.back() + (with_offsets ? r.upto(4) - 1 : op.each));
  op.index_count = offsets.back();
  if (!op.last_offset) offsets.pop_back();
  const bool bad = r.one_in(3);
  for (int64_t i = 0; i < op.index_count; ++i) indices.push_back(r.upto(static_cast<int>(op.row_count)) - 1);
  if (bad) {
    const int64_t odd[5] = {-1, op.row_count, INT32_MAX, INT32_MIN, 1000};
    auto& spoiled = with_offsets && r.one_in(2) ? offsets : indices;
    if (!spoiled.empty()) spoiled[static_cast<size_t>(r.upto(static_cast<int>(spoiled.size())) - 1)] = odd[r.upto(5) - 1];
  }
  const std::vector<int32_t> short_indices(indices.begin(), indices.end()), short_offsets(offsets.begin(), offsets.end());
  op.indices = op.long_indices ? static_cast<const void*>(indices.data()) : short_indices.data();
  if (with_offsets) op.offsets = op.long_indices ? static_cast<const void*>(offsets.data()) : short_offsets.data();
  std::vector<float> weights(static_cast<size_t>(op.index_count));
  for (float& w : weights) w = static_cast<float>(r.byte() - 128) / 32;
  if (op.mode == XQ_POOL_SUM && r.one_in(2)) op.weights = weights.data();
  const auto run = [&](int isa, bool& good) {
    std::vector<float> out(static_cast<size_t>(op.bags) * static_cast<size_t>(op.dim));
    op.isa = isa, op.out = out.data(), op.out_stride = op.dim;
    if (xq_lookup_check(&op) != XQ_OK) std::abort();
    xq_lookup_fault fault;
    good = xq_lookup_run(&op, 0, op.bags, &fault) != 0;
    if (!good) out.clear();
    return out;
  };
  bool want_good, good;
  const std::vector<float> want = run(XQ_ISA_REFERENCE, want_good);
  if (!bad && !want_good) return std::printf("a good lookup is refused\n"), false;
  for (int isa : isas) {
    const std::vector<float> got = run(isa, good);
    const bool same = got.size() == want.size() && (got.empty() || std::memcmp(got.data(), want.data(), got.size() * 4) == 0);
    if (good != want_good || !same) return std::printf("isa %d differs: lookup of %d bits, %d wide\n", isa, op.bits, op.dim), false;
  }
  return true;
}

template <class Random>
std::vector<float> random_floats(Random& r, int64_t count) {
  std::vector<float> v(static_cast<size_t>(count));
  for (float& x : v) x = static_cast<float>(r.byte() - 128) / 32;
  return v;
}

inline bool nearly(const std::vector<float>& a, const std::vector<float>& b, float most) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!(std::fabs(a[i] - b[i]) <= most)) return false;
  return true;
}

template <class Random>
bool interaction_agrees(Random& r, const std::vector<int>& isas) {
  const int samples = r.upto(5), vectors = r.upto(30) - 1, dim = r.upto(90);
  const std::vector<float> first = random_floats(r, int64_t{samples} * dim), in = random_floats(r, int64_t{samples} * vectors * dim);
  const int squares = r.upto(2) - 1;
  const int64_t wide = dim + vectors * (vectors + 1) / 2 + squares * (vectors + 1);
  const auto run = [&](int isa) {
    std::vector<float> out(static_cast<size_t>(samples * wide));
    const xq_interaction op{first.data(), in.data(), out.data(), samples, dim, int64_t{vectors} * dim, wide, vectors, dim, isa, squares};
    if (xq_interaction_check(&op) != XQ_OK) std::abort();
    xq_interaction_run(&op, 0, samples);
    return out;
  };
  const std::vector<float> want = run(XQ_ISA_REFERENCE);
  for (int isa : isas)
    if (run(isa) != want) return std::printf("isa %d differs: interaction of %d by %d\n", isa, vectors, dim), false;
  return true;
}

template <class Random>
bool gates_agree(Random& r, const std::vector<int>& isas) {
  const int64_t rows = r.upto(4), units = r.upto(70);
  const std::vector<float> own = random_floats(r, rows * 4 * units), hidden = random_floats(r, rows * 4 * units);
  const std::vector<float> before = random_floats(r, rows * units);
  const auto run = [&](int isa, bool lstm) {
    std::vector<float> c = before, h(before.size());
    if (lstm) {
      const xq_lstm_gates op{own.data(), hidden.data(), 4 * units, 4 * units, c.data(), h.data(), units, units, units, isa};
      xq_lstm_gates_run(&op, 0, rows);
    } else {  // in place
      h = before;
      const xq_gru_gates op{own.data(), hidden.data(), 3 * units, 3 * units, h.data(), h.data(), units, units, units, isa};
      xq_gru_gates_run(&op, 0, rows);
    }
    h.insert(h.end(), c.begin(), c.end());
    return h;
  };
  for (bool lstm : {true, false}) {
    const std::vector<float> want = run(XQ_ISA_REFERENCE, lstm);
    for (int isa : isas)
      if (!nearly(run(isa, lstm), want, 1e-5f)) return std::printf("isa %d differs: gates of %d units\n", isa, static_cast<int>(units)), false;
  }
  return true;
}

}  // namespace

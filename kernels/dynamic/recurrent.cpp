#include "recurrent.h"

#include <algorithm>

#include "../native/gates.h"
#include "../runtime/errors.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"

namespace x86quant::dynamic {
namespace {

// Fewer units of state than these are not worth waking a thread for.
constexpr int64_t kUnitsEach = 8192;
// The input's product is of at least so many rows at a time, so that reading its weights again does not count.
constexpr int64_t kFewestInputRows = 32;

int64_t sum_of(const std::vector<int64_t>& sizes) {
  int64_t sum = 0;
  for (const int64_t size : sizes) sum += size;
  return sum;
}

}  // namespace

Recurrent::Recurrent(const std::string& kind, bool bidirectional, bool projected,
                     const std::vector<runtime::RowWeights>& weights)
    : lstm_(kind == "lstm"), directions_(bidirectional ? 2 : 1) {
  const size_t each = projected ? 3 : 2;
  require(kind == "lstm" || (kind == "gru" && !projected), "no recurrent layer \"", kind, "\"");
  require(!weights.empty() && weights.size() % (each * static_cast<size_t>(directions_)) == 0, "malformed recurrent layer");
  const auto product = [&](size_t i) { return NativeLinear(Description{weights[i], ""}); };
  for (size_t i = 0; i < weights.size(); i += each) {
    parts_.push_back({product(i), product(i + 1), std::nullopt});
    if (projected) parts_.back().projection.emplace(product(i + 2));
  }
  units_ = parts_[0].hidden.out_features() / gates();
  width_ = projected ? parts_[0].projection->out_features() : units_;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Direction& d = parts_[i];
    const bool first = i < static_cast<size_t>(directions_);
    const bool fits = d.input.out_features() == gates() * units_ && d.hidden.out_features() == gates() * units_ &&
                      d.hidden.in_features() == width_ &&
                      d.input.in_features() == (first ? parts_[0].input.in_features() : directions_ * width_) &&
                      (!d.projection || (d.projection->in_features() == units_ && d.projection->out_features() == width_));
    require(fits, "the products of a recurrent layer do not fit each other");
  }
}

void Recurrent::run(const float* x, const std::vector<int64_t>& sizes, float* h, float* c, float* out) const {
  const int64_t rows = sum_of(sizes), sequences = sizes[0];
  const runtime::Scratch own(static_cast<size_t>(most_input_rows(sizes) * gates() * units_) * sizeof(float));
  const runtime::Scratch work(static_cast<size_t>(sequences * (gates() + 1) * units_) * sizeof(float));
  runtime::Buffer in, next;
  const float* from = x;
  for (size_t i = 0; i < parts_.size();) {
    const bool last = i + static_cast<size_t>(directions_) == parts_.size();
    if (!last) next = runtime::Buffer(static_cast<size_t>(rows * out_features()) * sizeof(float));
    float* const to = last ? out : reinterpret_cast<float*>(next.data());
    for (int64_t d = 0; d < directions_; ++d, ++i) {
      float* const state = h + static_cast<int64_t>(i) * sequences * width_;
      float* const cell = lstm_ ? c + static_cast<int64_t>(i) * sequences * units_ : nullptr;
      const States states{state, cell, reinterpret_cast<float*>(own.data()), reinterpret_cast<float*>(work.data())};
      steps(parts_[i], d == 1, sizes, from, rows, states, to + d * width_);
    }
    in = std::move(next);
    from = to;
  }
}

int64_t Recurrent::bytes() const {
  int64_t sum = 0;
  for (const Direction& d : parts_)
    sum += d.input.bytes() + d.hidden.bytes() + (d.projection ? d.projection->bytes() : 0);
  return sum;
}

// How many rows have their input's product at a time, if a step has no more: their gates are still in L2 when the steps
// read them.
int64_t Recurrent::input_rows() const { return std::max(kFewestInputRows, rows_in_l2(gates() * units_)); }

// How many steps, from step `i` on in their order, have their input's product at a time.
int64_t Recurrent::steps_at_once(const std::vector<int64_t>& sizes, bool backward, int64_t i) const {
  const auto count = static_cast<int64_t>(sizes.size());
  int64_t last = i, rows = 0;
  while (last < count) {
    rows += sizes[static_cast<size_t>(backward ? count - 1 - last : last)];
    if (last > i && rows > input_rows()) break;
    ++last;
  }
  return last - i;
}

int64_t Recurrent::most_input_rows(const std::vector<int64_t>& sizes) const {
  return std::min(sum_of(sizes), std::max(input_rows(), sizes[0]));
}

// All steps of one direction. A sequence that is over, or going backward has not begun, keeps its state.
void Recurrent::steps(const Direction& d, bool backward, const std::vector<int64_t>& sizes, const float* in, int64_t all_rows,
           const States& states, float* out) const {
  const int64_t all = gates() * units_, stride = directions_ * width_, features = d.input.in_features();
  const auto count = static_cast<int64_t>(sizes.size());
  const auto size_of = [&](int64_t i) { return sizes[static_cast<size_t>(backward ? count - 1 - i : i)]; };
  int64_t row = backward ? all_rows : 0;
  for (int64_t i = 0; i < count;) {
    const int64_t end = i + steps_at_once(sizes, backward, i);
    int64_t rows = 0;
    for (int64_t t = i; t < end; ++t) rows += size_of(t);
    const int64_t first = backward ? row - rows : row;
    d.input.multiply(in + first * features, rows, features, states.own, all);
    for (; i < end; ++i) {
      const int64_t now = size_of(i);
      if (backward) row -= now;
      step(d, now, states.own + (row - first) * all, states.h, states.c, states.work, states.work + sizes[0] * all);
      for (int64_t n = 0; n < now; ++n) std::copy_n(states.h + n * width_, width_, out + (row + n) * stride);
      if (!backward) row += now;
    }
  }
}

void Recurrent::step(const Direction& d, int64_t sequences, const float* own, float* h, float* c, float* hidden,
          float* unprojected) const {
  const int64_t all = gates() * units_;
  if (sequences == 0) return;
  d.hidden.multiply(h, sequences, width_, hidden, all);
  float* to = d.projection ? unprojected : h;
  const int threads = runtime::useful_threads(sequences * units_ / kUnitsEach);
  runtime::split(sequences, threads, [&](int64_t begin, int64_t end) {
    if (lstm_) {
      const xq_lstm_gates op{own, hidden, all, all, c, to, units_, units_, units_, native_isa()};
      xq_lstm_gates_run(&op, begin, end);
    } else {
      const xq_gru_gates op{own, hidden, all, all, h, to, units_, units_, units_, native_isa()};
      xq_gru_gates_run(&op, begin, end);
    }
  });
  if (d.projection) d.projection->multiply(unprojected, sequences, units_, h, width_);
}

}  // namespace x86quant::dynamic

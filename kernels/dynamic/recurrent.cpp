// LSTMs and GRUs with int8 products: all layers, directions and steps in one call.
//
// The input's share of the gates is one product for many steps; the state's share is one product a step, of the state
// quantized row by row as it is then; the gates follow in float32.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../native/gates.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"
#include "native_linear.h"

namespace x86quant::dynamic {
namespace {

// Fewer units of state than these are not worth waking a thread for.
constexpr int64_t kUnitsEach = 8192;
// The input's product is of at least so many rows at a time, so that reading its weights again does not count.
constexpr int64_t kFewestInputRows = 32;

// One direction of one layer.
struct Direction {
  NativeLinear input, hidden;
  std::optional<NativeLinear> projection;
};

class Recurrent final : public torch::CustomClassHolder {
 public:
  // weights, scales and biases: the input's, the state's and, where states are projected, the projection's product,
  // direction by direction and layer by layer.
  Recurrent(const std::string& kind, bool bidirectional, bool projected, const std::vector<at::Tensor>& weights,
            const std::vector<at::Tensor>& scales, const std::vector<std::optional<at::Tensor>>& biases)
      : lstm_(kind == "lstm"), directions_(bidirectional ? 2 : 1) {
    const size_t each = projected ? 3 : 2;
    TORCH_CHECK_VALUE(kind == "lstm" || (kind == "gru" && !projected), "x86quant: no recurrent layer \"", kind, "\"");
    TORCH_CHECK_VALUE(!weights.empty() && weights.size() % (each * directions_) == 0 && scales.size() == weights.size() &&
                          biases.size() == weights.size(),
                      "x86quant: malformed recurrent layer");
    const auto product = [&](size_t i) {
      return NativeLinear(Description{Weights(weights[i], scales[i], biases[i]), ""});
    };
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
      TORCH_CHECK_VALUE(fits, "x86quant: the products of a recurrent layer do not fit each other");
    }
  }

  // x: [sum of sizes, features], the sequences of each step one after the other, `sizes` of them, never more than in
  // the step before. initial: h, and c of an LSTM, each [layers x directions, sizes[0], width]. Returns the states of
  // the last layer at all steps, and the last states.
  std::vector<at::Tensor> run(const at::Tensor& x, const std::vector<int64_t>& sizes,
                              const std::vector<at::Tensor>& initial) const {
    RECORD_FUNCTION(lstm_ ? "x86quant::lstm_dynamic" : "x86quant::gru_dynamic", c10::ArrayRef<const c10::IValue>{});
    check(x, sizes, initial);
    std::vector<at::Tensor> last;
    for (const at::Tensor& state : initial) last.push_back(state.contiguous().clone());
    at::Tensor in = x.contiguous();
    const int64_t rows = in.size(0), sequences = sizes[0];
    const runtime::Scratch own(static_cast<size_t>(most_input_rows(sizes) * gates() * units_) * sizeof(float));
    const runtime::Scratch work(static_cast<size_t>(sequences * (gates() + 1) * units_) * sizeof(float));
    for (size_t i = 0; i < parts_.size();) {
      at::Tensor out = at::empty({rows, directions_ * width_}, at::kFloat);
      for (int64_t d = 0; d < directions_; ++d, ++i) {
        float* h = last[0].mutable_data_ptr<float>() + static_cast<int64_t>(i) * sequences * width_;
        float* c = lstm_ ? last[1].mutable_data_ptr<float>() + static_cast<int64_t>(i) * sequences * units_ : nullptr;
        const States states{h, c, reinterpret_cast<float*>(own.data()), reinterpret_cast<float*>(work.data())};
        steps(parts_[i], d == 1, sizes, in, states, out.mutable_data_ptr<float>() + d * width_);
      }
      in = out;
    }
    last.insert(last.begin(), in);
    return last;
  }

  int64_t bytes() const {
    int64_t sum = 0;
    for (const Direction& d : parts_)
      sum += d.input.bytes() + d.hidden.bytes() + (d.projection ? d.projection->bytes() : 0);
    return sum;
  }

 private:
  int64_t gates() const { return lstm_ ? 4 : 3; }
  // How many rows have their input's product at a time, if a step has no more: their gates are still in L2 when the steps
  // read them.
  int64_t input_rows() const { return std::max(kFewestInputRows, rows_in_l2(gates() * units_)); }

  void check(const at::Tensor& x, const std::vector<int64_t>& sizes, const std::vector<at::Tensor>& initial) const {
    const int64_t features = parts_[0].input.in_features();
    TORCH_CHECK_VALUE(x.dim() == 2 && x.scalar_type() == at::kFloat && x.device().is_cpu() && x.size(1) == features,
                      "x86quant: expected float32 [rows, ", features, "] in the input, got ", x.scalar_type(), " ",
                      x.sizes());
    int64_t rows = 0;
    bool falling = !sizes.empty() && sizes[0] >= 0;
    for (size_t t = 0; t < sizes.size(); ++t) {
      falling = falling && sizes[t] >= 0 && sizes[t] <= sizes[t ? t - 1 : 0];
      rows += sizes[t];
    }
    TORCH_CHECK_VALUE(falling && rows == x.size(0), "x86quant: the numbers of sequences at each step must not grow, and ",
                      "make ", x.size(0), " together; got ", sizes);
    const auto count = static_cast<int64_t>(parts_.size());
    const std::vector<int64_t> h = {count, sizes[0], width_}, c = {count, sizes[0], units_};
    const bool fits = initial.size() == (lstm_ ? 2 : 1) && initial[0].sizes() == h && (!lstm_ || initial[1].sizes() == c);
    TORCH_CHECK_VALUE(fits && std::all_of(initial.begin(), initial.end(), [](const at::Tensor& state) {
                        return state.scalar_type() == at::kFloat && state.device().is_cpu();
                      }), "x86quant: expected initial states of float32 ", h, lstm_ ? c10::str(" and ", c) : "");
  }

  // Of one direction.
  struct States {
    float *h, *c;      // the initial ones, and in the end the last
    float *own, *work;  // the input's share of the gates of some steps; what one step needs
  };

  // How many steps, from step `i` on in their order, have their input's product at a time.
  int64_t steps_at_once(const std::vector<int64_t>& sizes, bool backward, int64_t i) const {
    const auto count = static_cast<int64_t>(sizes.size());
    int64_t last = i, rows = 0;
    while (last < count) {
      rows += sizes[static_cast<size_t>(backward ? count - 1 - last : last)];
      if (last > i && rows > input_rows()) break;
      ++last;
    }
    return last - i;
  }

  int64_t most_input_rows(const std::vector<int64_t>& sizes) const {
    int64_t rows = 0;
    for (const int64_t size : sizes) rows += size;
    return std::min(rows, std::max(input_rows(), sizes[0]));
  }

  // All steps of one direction. A sequence that is over, or going backward has not begun, keeps its state.
  void steps(const Direction& d, bool backward, const std::vector<int64_t>& sizes, const at::Tensor& in,
             const States& states, float* out) const {
    const int64_t all = gates() * units_, stride = directions_ * width_, features = in.size(1);
    const auto count = static_cast<int64_t>(sizes.size());
    const auto size_of = [&](int64_t i) { return sizes[static_cast<size_t>(backward ? count - 1 - i : i)]; };
    int64_t row = backward ? in.size(0) : 0;
    for (int64_t i = 0; i < count;) {
      const int64_t end = i + steps_at_once(sizes, backward, i);
      int64_t rows = 0;
      for (int64_t t = i; t < end; ++t) rows += size_of(t);
      const int64_t first = backward ? row - rows : row;
      d.input.multiply(in.const_data_ptr<float>() + first * features, rows, features, states.own, all);
      for (; i < end; ++i) {
        const int64_t now = size_of(i);
        if (backward) row -= now;
        step(d, now, states.own + (row - first) * all, states.h, states.c, states.work, states.work + sizes[0] * all);
        for (int64_t n = 0; n < now; ++n) std::copy_n(states.h + n * width_, width_, out + (row + n) * stride);
        if (!backward) row += now;
      }
    }
  }

  void step(const Direction& d, int64_t sequences, const float* own, float* h, float* c, float* hidden,
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

  bool lstm_;
  int64_t directions_, units_ = 0, width_ = 0;
  std::vector<Direction> parts_;
};

using RecurrentPtr = c10::intrusive_ptr<Recurrent>;

TORCH_LIBRARY_FRAGMENT(x86quant, m) {
  m.class_<Recurrent>("Recurrent")
      .def(torch::init<std::string, bool, bool, std::vector<at::Tensor>, std::vector<at::Tensor>,
                       std::vector<std::optional<at::Tensor>>>())
      .def("run", [](const RecurrentPtr& p, const at::Tensor& x, const std::vector<int64_t>& sizes,
                     const std::vector<at::Tensor>& initial) { return p->run(x, sizes, initial); })
      .def("bytes", [](const RecurrentPtr& p) { return p->bytes(); });
}

}  // namespace
}  // namespace x86quant::dynamic

// One layer of an LSTM or a GRU on static int8 codes, both directions: see x86quant/ops/recurrence.py.
//
// The input's share of the gates is one product for all steps; the state's share one product a step, of the codes that
// the layer's result holds already. Gates and states are float32.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../native/gates.h"
#include "../runtime/errors.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

// Fewer units of state than these are not worth waking a thread for.
constexpr int64_t kUnitsEach = 8192;
// More rows than any tensor has; sizes that are less multiply without overflow.
constexpr int64_t kMostOfASize = int64_t{1} << 20;

// Codes of rows that share one scale and zero point, as products of row codes want them.
class SharedScale {
 public:
  SharedScale() = default;
  SharedScale(float scale, int32_t zp, int64_t rows)
      : scale_(static_cast<size_t>(rows), scale), zp_(static_cast<size_t>(rows), zp) {}

  // Operands are only read.
  xq_codes of(const uint8_t* codes) const {
    return {const_cast<uint8_t*>(codes), const_cast<float*>(scale_.data()), const_cast<int32_t*>(zp_.data())};
  }

 private:
  std::vector<float> scale_;
  std::vector<int32_t> zp_;
};

struct Direction {
  RowPackPtr input, hidden;
};

class Recurrent final : public Step {
 public:
  explicit Recurrent(StepFields& fields)
      : lstm_(fields.flag("lstm")),
        batch_first_(fields.flag("batch_first")),
        steps_(size(fields, "steps")),
        sequences_(size(fields, "sequences")),
        features_(size(fields, "features")),
        units_(size(fields, "units")) {
    for (const char* const* names : {kForward, kBackward}) {
      if (!fields.has(names[0])) continue;
      directions_.push_back({fields.row_pack(names[0]), fields.row_pack(names[1])});
      const Direction& d = directions_.back();
      if (d.input->out_features() != gates() || d.hidden->out_features() != gates() || d.hidden->in_features() != units_ ||
          d.input->in_features() != features_)
        fields.refuse(names[0], "has weights of other sizes");
    }
    if (directions_.empty()) fields.refuse(kForward[0], "is missing");
    width_ = units_ * static_cast<int64_t>(directions_.size());
    const int64_t rows = steps_ * sequences_;
    x_ = fields.address("x", 1, {rows, features_}, {features_, 1});
    out_ = fields.address("out", 1, {rows, width_}, {width_, 1});
    x_scale_ = SharedScale(fields.real("x_scale"), zero_point(fields, "x_zp"), rows);
    h_zp_ = zero_point(fields, "h_zp");
    h_scale_ = SharedScale(fields.real("h_scale"), h_zp_, sequences_);
    quantize_.kind = XQ_OP_QUANTIZE, quantize_.isa = native_isa(), quantize_.hi = 255, quantize_.groups = 1;
    quantize_.a_stride_c = sizeof(float), quantize_.a_mult = fields.real("h_mult"), quantize_.out_zp = h_zp_;
    const xq_op one = rounding(reinterpret_cast<float*>(uintptr_t{64}), reinterpret_cast<uint8_t*>(uintptr_t{64}), 1);
    const int status = xq_op_check(&one);
    require(status == XQ_OK, "step \"recurrent\" of a plan: ", xq_status_text(status));
  }

  void run(const Bases& bases) const override {
    const int64_t rows = steps_ * sequences_;
    const auto floats = [](int64_t count) { return static_cast<size_t>(count) * sizeof(float); };
    const Scratch own(floats(rows * gates()));
    const Scratch work(floats(sequences_ * (gates() + 2 * units_)) + static_cast<size_t>(sequences_ * units_));
    Work w;
    w.own = reinterpret_cast<float*>(own.data()), w.hidden = reinterpret_cast<float*>(work.data());
    w.h = w.hidden + sequences_ * gates(), w.c = w.h + sequences_ * units_;
    w.codes = reinterpret_cast<uint8_t*>(w.c + sequences_ * units_);
    for (size_t d = 0; d < directions_.size(); ++d) {
      multiply(*directions_[d].input, x_scale_.of(x_.at<uint8_t>(bases)), rows, w.own);
      run_direction(directions_[d], d == 1, w, out_.at<uint8_t>(bases) + static_cast<int64_t>(d) * units_);
    }
  }

 private:
  static constexpr const char* kForward[2] = {"input0", "hidden0"};
  static constexpr const char* kBackward[2] = {"input1", "hidden1"};

  struct Work {
    float *own, *hidden, *h, *c;  // the gates' shares, all steps' and one step's; states
    uint8_t* codes;               // of the state, where the result's rows lie apart
  };

  static int64_t size(StepFields& fields, const char* name) {
    const int64_t found = fields.integer(name);
    if (found < 1 || found > kMostOfASize) fields.refuse(name, "is not a size");
    return found;
  }

  static int32_t zero_point(StepFields& fields, const char* name) {
    const int32_t found = fields.small(name);
    if (found < 0 || found > 255) fields.refuse(name, "is no code");
    return found;
  }

  int64_t gates() const { return (lstm_ ? 4 : 3) * units_; }

  static void multiply(const RowPack& pack, xq_codes in, int64_t rows, float* out) {
    xq_rows op = pack.call(rows);
    op.in = in, op.total = out;
    run_rows(op, pack.in_features());
  }

  // From states, one behind the other, to codes in rows that are `stride` apart.
  xq_op rounding(float* from, uint8_t* to, int64_t stride) const {
    const auto view = [&](uint8_t* data, int64_t apart) {
      xq_tensor t{};
      t.data = data, t.n = t.d = t.h = 1, t.w = sequences_, t.c = units_;
      t.stride_w = apart, t.stride_h = t.stride_d = t.stride_n = sequences_ * apart;
      return t;
    };
    xq_op op = quantize_;
    const auto row = units_ * static_cast<int64_t>(sizeof(float));
    op.a = view(reinterpret_cast<uint8_t*>(from), row), op.out = view(to, std::max(stride, units_));
    return op;
  }

  // All steps of one direction, whose part of the first row of the result is `out`.
  void run_direction(const Direction& d, bool backward, const Work& w, uint8_t* out) const {
    // Rows from one sequence to the next, and from one step to the next.
    const int64_t next = batch_first_ ? steps_ : 1, later = batch_first_ ? 1 : sequences_;
    const bool together = sequences_ == 1 || (next == 1 && width_ == units_);
    std::fill_n(w.h, sequences_ * units_, 0.0f), std::fill_n(w.c, sequences_ * units_, 0.0f);
    std::memset(w.codes, h_zp_, static_cast<size_t>(sequences_ * units_));
    const uint8_t* state = w.codes;
    for (int64_t i = 0; i < steps_; ++i) {
      const int64_t row = (backward ? steps_ - 1 - i : i) * later;
      multiply(*d.hidden, h_scale_.of(state), sequences_, w.hidden);
      run_gates(w, w.own + row * gates(), next * gates());
      uint8_t* to = out + row * width_;
      const xq_op round = rounding(w.h, to, next * width_);
      xq_op_run(&round, 0, xq_op_items(&round));
      if (together) {
        state = to;
        continue;
      }
      for (int64_t n = 0; n < sequences_; ++n)
        std::memcpy(w.codes + n * units_, to + n * next * width_, static_cast<size_t>(units_));
    }
  }

  void run_gates(const Work& w, const float* own, int64_t own_stride) const {
    const int threads = useful_threads(sequences_ * units_ / kUnitsEach);
    split(sequences_, threads, [&](int64_t begin, int64_t end) {
      if (lstm_) {
        const xq_lstm_gates op{own, w.hidden, own_stride, gates(), w.c, w.h, units_, units_, units_, native_isa()};
        xq_lstm_gates_run(&op, begin, end);
      } else {
        const xq_gru_gates op{own, w.hidden, own_stride, gates(), w.h, w.h, units_, units_, units_, native_isa()};
        xq_gru_gates_run(&op, begin, end);
      }
    });
  }

  bool lstm_, batch_first_;
  int64_t steps_, sequences_, features_, units_, width_ = 0;
  std::vector<Direction> directions_;
  int32_t h_zp_ = 0;
  SharedScale x_scale_, h_scale_;
  xq_op quantize_{};
  Address x_, out_;
};

const RegisterStep recurrent("recurrent", [](StepFields& fields) -> StepPtr { return std::make_unique<Recurrent>(fields); });

}  // namespace
}  // namespace x86quant::runtime

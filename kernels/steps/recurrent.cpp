// One layer of an LSTM or a GRU on static int8 codes, both directions: see x86quant/ops/recurrence.py.
//
// The input's share of the gates is one product for many steps; the state's share one product a step, of the codes that
// the layer's result holds already. Gates and states are float32. States that are given or projected are quantized row
// by row for the products that read them.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "../native/gates.h"
#include "../runtime/errors.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"
#include "row_rounding.h"

namespace x86quant::runtime {
namespace {

// Fewer units of state than these are not worth waking a thread for.
constexpr int64_t kUnitsEach = 8192;
// The input's product is of at least so many rows at a time, so that reading its weights again does not count.
constexpr int64_t kFewestInputRows = 32;
// More rows than any tensor has; sizes that are less multiply without overflow.
constexpr int64_t kMostOfASize = int64_t{1} << 20;
// A run takes memory for the units of each sequence, of which a plan has only what they are projected to. Nobody projects
// to so much less; fewer units than the second number, of all sequences, may be projected to anything.
constexpr int64_t kMostProjected = 64, kMostUnits = int64_t{1} << 24;

struct Direction {
  RowPackPtr input, hidden, projection;  // the last where states are projected
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
    for (const char* const* names : {kForward, kBackward})
      if (fields.has(names[0])) add_direction(fields, names);
    if (directions_.empty()) fields.refuse(kForward[0], "is missing");
    if (units_ / kMostProjected > width_ && sequences_ * units_ > kMostUnits)
      fields.refuse("units", "are more than a plan that has so little of each has memory for");
    const auto count = static_cast<int64_t>(directions_.size());
    const int64_t rows = steps_ * sequences_;
    x_ = fields.rows(Access::kRead, "x", 1, {rows, features_});
    out_ = fields.rows(Access::kWrite, "out", 1, {rows, count * width_});
    const auto floats = [&](Access access, const char* name, int64_t width) -> std::optional<Address> {
      if (!fields.has(name)) return std::nullopt;
      return fields.rows(access, name, sizeof(float), {count * sequences_, width});
    };
    h_ = floats(Access::kRead, "h", width_), c_ = floats(Access::kRead, "c", units_), last_ = floats(Access::kWrite, "last", units_);
    if (c_ && !lstm_) fields.refuse("c", "is an LSTM's");
    x_scale_ = fields.real("x_scale"), x_zp_ = fields.zero_point("x_zp");
    h_scale_ = fields.real("h_scale"), h_zp_ = fields.zero_point("h_zp");
    rounding_ = RowRounding(fields, "h_mult", h_zp_, width_);
  }

  void run(const Bases& bases) const override {
    const auto floats = [](int64_t count) { return static_cast<size_t>(count) * sizeof(float); };
    const Scratch own(floats(steps_at_once() * sequences_ * gates()));
    const Scratch work(floats(sequences_ * (gates() + 2 * units_ + width_ + 2)) +
                       static_cast<size_t>(sequences_ * (width_ + std::max(units_, width_))));
    Work w;
    w.own = reinterpret_cast<float*>(own.data()), w.hidden = reinterpret_cast<float*>(work.data());
    w.h = w.hidden + sequences_ * gates(), w.c = w.h + sequences_ * units_;
    w.projected = w.c + sequences_ * units_;
    w.row_scale = w.projected + sequences_ * width_;
    w.row_zp = reinterpret_cast<int32_t*>(w.row_scale + sequences_);
    w.codes = reinterpret_cast<uint8_t*>(w.row_zp + sequences_), w.row_codes = w.codes + sequences_ * width_;
    for (size_t d = 0; d < directions_.size(); ++d) {
      const auto at = static_cast<int64_t>(d);
      const auto part = [&](const std::optional<Address>& all, int64_t width) -> float* {
        return all ? all->at<float>(bases) + at * sequences_ * width : nullptr;
      };
      begin_states(w, part(h_, width_), part(c_, units_));
      run_direction(directions_[d], d == 1, w, x_.at<uint8_t>(bases), part(h_, width_),
                    out_.at<uint8_t>(bases) + at * width_);
      if (float* last = part(last_, units_)) std::copy_n(lstm_ ? w.c : w.h, sequences_ * units_, last);
    }
  }

 private:
  static constexpr const char* kForward[3] = {"input0", "hidden0", "projection0"};
  static constexpr const char* kBackward[3] = {"input1", "hidden1", "projection1"};

  struct Work {
    float *own, *hidden, *h, *c, *projected;  // the gates' shares, all steps' and one step's; states
    uint8_t* codes;                           // of the state, where the result's rows lie apart
    // Of states that are quantized row by row.
    float* row_scale;
    int32_t* row_zp;
    uint8_t* row_codes;
  };

  void add_direction(StepFields& fields, const char* const* names) {
    directions_.push_back({fields.row_pack(names[0]), fields.row_pack(names[1]), nullptr});
    Direction& d = directions_.back();
    if (fields.has(names[2])) d.projection = fields.row_pack(names[2]);
    const int64_t width = d.projection ? d.projection->out_features() : units_;
    if (directions_.size() == 1) width_ = width;
    if (d.input->out_features() != gates() || d.hidden->out_features() != gates() || d.hidden->in_features() != width ||
        d.input->in_features() != features_ || width != width_ || (d.projection && d.projection->in_features() != units_))
      fields.refuse(names[0], "has weights of other sizes");
    if (d.projection && !lstm_) fields.refuse(names[2], "is an LSTM's");
  }

  static int64_t size(StepFields& fields, const char* name) {
    const int64_t found = fields.integer(name);
    if (found < 1 || found > kMostOfASize) fields.refuse(name, "is not a size");
    return found;
  }

  int64_t gates() const { return (lstm_ ? 4 : 3) * units_; }

  int64_t steps_at_once() const {
    const bool together = !batch_first_ || sequences_ == 1;
    // As many as leave their gates in L2 until the steps read them.
    const int64_t rows = std::max(kFewestInputRows, rows_in_l2(gates()));
    return together ? std::clamp<int64_t>(rows / sequences_, 1, steps_) : steps_;
  }

  // Codes that are only read, all of one scale.
  static xq_codes codes_of(const SameScale& same, const uint8_t* codes) {
    xq_codes found{};
    found.codes = const_cast<uint8_t*>(codes);
    same.give(found);
    return found;
  }

  static void multiply(const RowPack& pack, xq_codes in, int64_t rows, float* out) {
    xq_rows op = pack.call(rows);
    op.in = in, op.total = out;
    run_rows(op, pack.in_features());
  }

  // A product of float rows, each of which is quantized for it.
  void multiply_rows(const RowPack& pack, const float* rows, const Work& w, float* out) const {
    const xq_codes codes{w.row_codes, w.row_scale, w.row_zp};
    xq_rows op{};
    op.isa = native_isa(), op.rows = sequences_, op.features = pack.in_features();
    op.x = rows, op.out = codes;
    run_rows(op, 0);
    multiply(pack, codes, sequences_, out);
  }

  void begin_states(const Work& w, const float* h, const float* c) const {
    const int64_t floats = sequences_ * units_;
    const auto begin = [&](const float* from, float* to) {
      from ? std::copy_n(from, floats, to) : std::fill_n(to, floats, 0.0f);
    };
    begin(c, w.c);
    if (!lstm_) begin(h, w.h);
    std::memset(w.codes, h_zp_, static_cast<size_t>(sequences_ * width_));
  }

  // All steps of one direction, whose part of the first row of the result is `out`. `before` are the states that are
  // given, or null; the work has them, too, and the cells.
  void run_direction(const Direction& d, bool backward, const Work& w, const uint8_t* x, const float* before,
                     uint8_t* out) const {
    const int64_t all = width_ * static_cast<int64_t>(directions_.size());
    // Rows from one sequence to the next, and from one step to the next.
    const int64_t next = batch_first_ ? steps_ : 1, later = batch_first_ ? 1 : sequences_;
    const bool together = sequences_ == 1 || (next == 1 && all == width_);
    const uint8_t* state = w.codes;
    const int64_t at_once = steps_at_once();
    const SameScale x_same(at_once * sequences_, x_scale_, x_zp_), h_same(sequences_, h_scale_, h_zp_);
    int64_t first = 0;  // of the steps whose gates' shares there are
    for (int64_t i = 0; i < steps_; ++i) {
      const int64_t step = backward ? steps_ - 1 - i : i, row = step * later;
      if (i % at_once == 0) {
        const int64_t count = std::min(at_once, steps_ - i);
        first = backward ? step - count + 1 : step;
        multiply(*d.input, codes_of(x_same, x + first * sequences_ * features_), count * sequences_, w.own);
      }
      if (i == 0 && before) {
        multiply_rows(*d.hidden, before, w, w.hidden);
      } else {
        multiply(*d.hidden, codes_of(h_same, state), sequences_, w.hidden);
      }
      run_gates(w, w.own + (row - first * later) * gates(), next * gates());
      if (d.projection) multiply_rows(*d.projection, w.h, w, w.projected);
      uint8_t* to = out + row * all;
      rounding_.run(d.projection ? w.projected : w.h, to, sequences_, std::max(next * all, width_));
      if (together) {
        state = to;
        continue;
      }
      for (int64_t n = 0; n < sequences_; ++n)
        std::memcpy(w.codes + n * width_, to + n * next * all, static_cast<size_t>(width_));
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
  int64_t steps_, sequences_, features_, units_, width_ = 0;  // the last of a direction's states
  std::vector<Direction> directions_;
  int32_t x_zp_ = 0, h_zp_ = 0;
  float x_scale_ = 1, h_scale_ = 1;
  RowRounding rounding_;
  Address x_, out_;
  std::optional<Address> h_, c_, last_;
};

const RegisterStep recurrent("recurrent", [](StepFields& fields) -> StepPtr { return std::make_unique<Recurrent>(fields); });

}  // namespace
}  // namespace x86quant::runtime

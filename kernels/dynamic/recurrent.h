// LSTMs and GRUs with int8 products: all layers, directions and steps in one call.
//
// The input's share of the gates is one product for many steps; the state's share is one product a step, of the state
// quantized row by row as it is then; the gates follow in float32.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "native_linear.h"

namespace x86quant::dynamic {

class Recurrent {
 public:
  // weights: the input's, the state's and, where states are projected, the projection's product, direction by direction
  // and layer by layer.
  Recurrent(const std::string& kind, bool bidirectional, bool projected, const std::vector<runtime::RowWeights>& weights);

  bool is_lstm() const { return lstm_; }
  int64_t features() const { return parts_[0].input.in_features(); }
  // Of all layers and directions.
  int64_t states() const { return static_cast<int64_t>(parts_.size()); }
  int64_t state_size() const { return width_; }
  int64_t cell_size() const { return units_; }
  // Of a row of the result.
  int64_t out_features() const { return directions_ * width_; }

  // x: [rows, features], the sequences of each step one after the other, `sizes` of them, never more than in the step
  // before, all together `rows`. h, and c of an LSTM: the initial states, each [states, sizes[0], width], which become the
  // last ones. out: [rows, out_features], the states of the last layer at all steps.
  void run(const float* x, const std::vector<int64_t>& sizes, float* h, float* c, float* out) const;

  int64_t bytes() const;

 private:
  // One direction of one layer.
  struct Direction {
    NativeLinear input, hidden;
    std::optional<NativeLinear> projection;
  };

  // Of one direction.
  struct States {
    float *h, *c;      // the initial ones, and in the end the last
    float *own, *work;  // the input's share of the gates of some steps; what one step needs
  };

  int64_t gates() const { return lstm_ ? 4 : 3; }
  int64_t input_rows() const;
  int64_t steps_at_once(const std::vector<int64_t>& sizes, bool backward, int64_t i) const;
  int64_t most_input_rows(const std::vector<int64_t>& sizes) const;
  void steps(const Direction& d, bool backward, const std::vector<int64_t>& sizes, const float* in, int64_t rows,
             const States& states, float* out) const;
  void step(const Direction& d, int64_t sequences, const float* own, float* h, float* c, float* hidden,
            float* unprojected) const;

  bool lstm_;
  int64_t directions_, units_ = 0, width_ = 0;
  std::vector<Direction> parts_;
};

}  // namespace x86quant::dynamic

// The sentences of a batch without its padding: where the rows of each begin, told by memory that a step wrote.
#pragma once

#include "errors.h"
#include "step.h"

namespace x86quant::runtime {

// The field "starts" of a step: a number for each sentence and one behind the last, each at most `tokens` from the next.
class Sentences {
 public:
  Sentences(StepFields& fields, int64_t batch, int64_t tokens) : batch_(batch), tokens_(tokens) {
    if (batch < 0 || batch == INT64_MAX) fields.refuse("batch", "is no number of sentences");
    starts_ = fields.rows(Access::kIndex, "starts", sizeof(int64_t), {batch + 1});
  }

  // Checked, since what is told says which memory is read and written.
  const int64_t* at(const Bases& bases) const {
    const auto* starts = starts_.at<const int64_t>(bases);
    bool fits = starts[0] == 0;
    // No further than to the first that does not fit: numbers from anywhere have differences beyond 64 bits.
    for (int64_t n = 0; fits && n < batch_; ++n) fits = starts[n + 1] >= starts[n] && starts[n + 1] - starts[n] <= tokens_;
    require(fits, "sentences of a batch do not lie one behind another");
    return starts;
  }

 private:
  int64_t batch_, tokens_;
  Address starts_;
};

}  // namespace x86quant::runtime

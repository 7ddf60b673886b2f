// Rows of tokens: batches without their padding (which tokens are present, and their rows side by side and back in
// their places), and those tokens of each sentence that are wanted.
#include <cstring>

#include "../runtime/parallel.h"
#include "../runtime/sentences.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

// Less work than this is not worth waking a thread for: some microseconds of it.
constexpr int64_t kFloatsEach = 30'000;

struct Batch {
  int64_t sentences, tokens;

  explicit Batch(StepFields& fields) : sentences(fields.integer("batch")), tokens(fields.integer("tokens")) {
    if (sentences < 0 || tokens < 0 || __builtin_mul_overflow(sentences, tokens, &rows)) fields.refuse("batch", "or \"tokens\" is no size");
  }
  int64_t rows = 0;
};

Address numbers(StepFields& fields, Access access, const char* name, int64_t count) {
  return fields.rows(access, name, sizeof(int64_t), {count});
}

class PresentTokens final : public Step {
 public:
  explicit PresentTokens(StepFields& fields) : batch_(fields), first_(fields.flag("first")) {
    mask_ = fields.rows(Access::kRead, "mask", 1, {batch_.rows});
    places_ = numbers(fields, Access::kWrite, "places", batch_.rows);
    starts_ = numbers(fields, Access::kWrite, "starts", batch_.sentences + 1);
    seen_ = fields.rows(Access::kWrite, "seen", 1, {batch_.rows});
  }

  void run(const Bases& bases) const override {
    const auto* mask = mask_.at<const uint8_t>(bases);
    auto* const places = places_.at<int64_t>(bases);
    auto* const starts = starts_.at<int64_t>(bases);
    auto* const seen = seen_.at<uint8_t>(bases);
    int64_t count = 0;
    const auto each = [&](bool wanted, const auto& behind_sentence) {
      for (int64_t n = 0, row = 0; n < batch_.sentences; ++n) {
        for (int64_t t = 0; t < batch_.tokens; ++t, ++row) {
          if ((mask[row] != 0 || (first_ && t == 0)) != wanted) continue;
          places[count] = row, seen[count] = mask[row] != 0;
          ++count;
        }
        behind_sentence(n);
      }
    };
    starts[0] = 0;
    each(true, [&](int64_t n) { starts[n + 1] = count; });
    each(false, [](int64_t) {});
  }

 private:
  Batch batch_;
  bool first_;
  Address mask_, places_, starts_, seen_;
};

// Rows of floats from their places in a batch to the gathered ones, or back.
class MovedTokens : public Step {
 public:
  // With `written`, what is done to the rows of the result.
  MovedTokens(StepFields& fields, Access written)
      : batch_(fields), features_(fields.integer("features")), sentences_(fields, batch_.sentences, batch_.tokens) {
    x_ = fields.rows(Access::kRead, "x", sizeof(float), {batch_.rows, features_});
    out_ = fields.rows(written, "out", sizeof(float), {batch_.rows, features_});
    places_ = numbers(fields, Access::kIndex, "places", batch_.rows);
  }

  void run(const Bases& bases) const override {
    const auto* x = x_.at<const float>(bases);
    const auto* places = places_.at<const int64_t>(bases);
    const auto* starts = sentences_.at(bases);
    auto* const out = out_.at<float>(bases);
    const int threads = useful_threads(batch_.rows * features_ / kFloatsEach);
    split(batch_.sentences, threads, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        int64_t at = n * batch_.tokens;  // the row of the batch that comes next
        const int64_t behind = at + batch_.tokens;
        for (int64_t i = starts[n]; i < starts[n + 1]; ++i) {
          require(places[i] >= at && places[i] < behind, "a token of a batch has no place in its sentence");
          move(x, i, at, places[i], out);
          at = places[i] + 1;
        }
        leave_out(at, behind, out);
      }
    });
  }

 protected:
  void copy(float* to, const float* from) const { std::memcpy(to, from, static_cast<size_t>(features_) * sizeof(float)); }

  int64_t features() const { return features_; }

 private:
  // Row `gathered` of one side and row `place` of the other; no token is present from `before` to `place`.
  virtual void move(const float* x, int64_t gathered, int64_t before, int64_t place, float* out) const = 0;
  // No token is present from row `begin` to row `end`.
  virtual void leave_out(int64_t begin, int64_t end, float* out) const = 0;

  Batch batch_;
  int64_t features_;
  Sentences sentences_;
  Address x_, out_, places_;
};

class GatherTokens final : public MovedTokens {
 public:
  explicit GatherTokens(StepFields& fields) : MovedTokens(fields, Access::kWriteSome) {}

 private:
  void move(const float* x, int64_t gathered, int64_t, int64_t place, float* out) const override {
    copy(out + gathered * features(), x + place * features());
  }
  void leave_out(int64_t, int64_t, float*) const override {}
};

class ScatterTokens final : public MovedTokens {
 public:
  explicit ScatterTokens(StepFields& fields) : MovedTokens(fields, Access::kWrite) {}

 private:
  void move(const float* x, int64_t gathered, int64_t before, int64_t place, float* out) const override {
    leave_out(before, place, out);
    copy(out + place * features(), x + gathered * features());
  }
  void leave_out(int64_t begin, int64_t end, float* out) const override {
    std::fill(out + begin * features(), out + end * features(), 0.0f);
  }
};

// The same tokens of each sentence; those below 0 count from behind.
class TakeTokens final : public Step {
 public:
  explicit TakeTokens(StepFields& fields) : batch_(fields), taken_(fields.integer("taken")), features_(fields.integer("features")) {
    x_ = fields.rows(Access::kRead, "x", sizeof(float), {batch_.sentences, batch_.tokens, features_});
    out_ = fields.rows(Access::kWrite, "out", sizeof(float), {batch_.sentences, taken_, features_});
    places_ = numbers(fields, Access::kIndex, "places", taken_);
  }

  void run(const Bases& bases) const override {
    const auto* x = x_.at<const float>(bases);
    const auto* places = places_.at<const int64_t>(bases);
    auto* out = out_.at<float>(bases);
    for (int64_t n = 0; n < batch_.sentences; ++n, x += batch_.tokens * features_)
      for (int64_t i = 0; i < taken_; ++i, out += features_) {
        const int64_t place = places[i] < 0 ? places[i] + batch_.tokens : places[i];
        require(place >= 0 && place < batch_.tokens, "of ", batch_.tokens, " tokens there is no number ", places[i]);
        std::memcpy(out, x + place * features_, static_cast<size_t>(features_) * sizeof(float));
      }
  }

 private:
  Batch batch_;
  int64_t taken_, features_;
  Address x_, out_, places_;
};

template <class Kind>
StepPtr make(StepFields& fields) {
  return std::make_unique<Kind>(fields);
}

const RegisterStep present("present_tokens", make<PresentTokens>);
const RegisterStep gather("gather_tokens", make<GatherTokens>);
const RegisterStep take("take_tokens", make<TakeTokens>);
const RegisterStep scatter("scatter_tokens", make<ScatterTokens>);

}  // namespace
}  // namespace x86quant::runtime

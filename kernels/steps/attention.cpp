// Attention on float32 heads.
#include "../runtime/errors.h"
#include "../runtime/native_cpu.h"
#include "../runtime/sentences.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

class Attention final : public Step {
 public:
  explicit Attention(StepFields& fields) {
    xq_attention& op = op_;
    op.isa = native_isa();
    op.batch = fields.integer("batch"), op.queries = fields.integer("queries"), op.keys = fields.integer("keys");
    op.heads = fields.integer("heads"), op.kv_heads = fields.integer("kv_heads"), op.size = fields.integer("size");
    q_ = heads(fields, "q", "q_strides", op.queries, op.heads, op.q_stride);
    k_ = heads(fields, "k", "k_strides", op.keys, op.kv_heads, op.k_stride);
    v_ = heads(fields, "v", "v_strides", op.keys, op.kv_heads, op.v_stride);
    const int64_t row = op.heads * op.size * kFloat;
    out_ = fields.address("out", kFloat, {op.batch, op.queries, op.heads * op.size}, {op.queries * row, row, kFloat});
    if (fields.has("mask")) {
      op.mask_is_bool = fields.flag("mask_is_bool");
      mask_ = strided(fields, "mask", "mask_strides", op.mask_is_bool ? 1 : kFloat,
                      {op.batch, op.heads, op.queries, op.keys}, op.mask_stride);
    }
    if (fields.has("starts")) read_starts(fields);
    op.causal = fields.flag("causal");
    op.scale = fields.real("scale");
    xq_attention trial = op;
    trial.threads = 1;
    trial.q = q_.any<const float>(), trial.k = k_.any<const float>(), trial.v = v_.any<const float>();
    trial.mask = mask_.any<const void>(), trial.out = out_.any<float>();
    const int status = xq_attention_check(&trial);
    require(status == XQ_OK, "step \"attention\" of a plan: ", xq_status_text(status));
  }

  void run(const Bases& bases) const override {
    xq_attention op = op_;
    op.q = q_.at<const float>(bases), op.k = k_.at<const float>(bases), op.v = v_.at<const float>(bases);
    op.mask = mask_.at<const void>(bases);
    op.out = out_.at<float>(bases);
    if (sentences_) op.starts = sentences_->at(bases);
    run_attention(op);
  }
  StepThreads threads() const override { return shared_if(shares_of_attention(op_) > 1); }

 private:
  static constexpr int64_t kFloat = sizeof(float);

  // Rows of all sentences lie one behind another: what tells the reach of each tensor must say the same.
  void read_starts(StepFields& fields) {
    const xq_attention& op = op_;
    bool rows = op.queries == op.keys && (!mask_ || op.mask_stride[0] == op.keys);
    for (const auto* stride : {op.q_stride, op.k_stride, op.v_stride}) rows &= stride[0] == op.keys * stride[1];
    if (!rows) fields.refuse("starts", "is for rows that lie one behind another");
    sentences_ = Sentences(fields, op.batch, op.keys);
  }

  Address heads(StepFields& fields, const char* name, const char* strides, int64_t tokens, int64_t count,
                int64_t (&to)[3]) {
    return strided(fields, name, strides, kFloat, {op_.batch, tokens, count, op_.size}, to);
  }

  // Elements of so many bytes whose last dimension is adjacent; the strides of the others are a field.
  static Address strided(StepFields& fields, const char* name, const char* strides, int64_t size, const Words& sizes,
                         int64_t (&to)[3]) {
    const Words given = fields.integers(strides, 3);
    std::copy(given.begin(), given.end(), to);
    Words bytes;
    for (int64_t stride : given) {
      if (__builtin_mul_overflow(stride, size, &stride)) fields.refuse(strides, "is too large");
      bytes.push_back(stride);
    }
    bytes.push_back(size);
    return fields.address(name, size, sizes, bytes);
  }

  xq_attention op_{};
  Address q_, k_, v_, mask_, out_;
  std::optional<Sentences> sentences_;
};

const RegisterStep attention("attention", [](StepFields& fields) -> StepPtr {
  return std::make_unique<Attention>(fields);
});

}  // namespace
}  // namespace x86quant::runtime

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
    q_ = fields.strided(Access::kRead, "q", "q_strides", kFloat, {op.batch, op.queries, op.heads, op.size}, op.q_stride);
    k_ = fields.strided(Access::kRead, "k", "k_strides", kFloat, {op.batch, op.keys, op.kv_heads, op.size}, op.k_stride);
    v_ = fields.strided(Access::kRead, "v", "v_strides", kFloat, {op.batch, op.keys, op.kv_heads, op.size}, op.v_stride);
    if (op.keys > kMostOfOneKey && (op.k_stride[1] == 0 || op.v_stride[1] == 0)) fields.refuse("keys", "are one and the same");
    out_ = fields.rows(fields.has("starts") ? Access::kWriteSome : Access::kWrite, "out", kFloat, {op.batch, op.queries, op.heads, op.size});
    if (fields.has("mask")) {
      op.mask_is_bool = fields.flag("mask_is_bool");
      mask_ = fields.strided(Access::kRead, "mask", "mask_strides", op.mask_is_bool ? 1 : kFloat,
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
  // What a run takes for its keys is memory that the plan has as well, unless all lie in one place.
  static constexpr int64_t kMostOfOneKey = int64_t{1} << 16;

  // Rows of all sentences lie one behind another: what tells the reach of each tensor must say the same.
  void read_starts(StepFields& fields) {
    const xq_attention& op = op_;
    bool rows = op.queries == op.keys && (!mask_ || op.mask_stride[0] == op.keys);
    for (const auto* stride : {op.q_stride, op.k_stride, op.v_stride}) rows = rows && stride[0] == op.keys * stride[1];
    if (!rows) fields.refuse("starts", "is for rows that lie one behind another");
    sentences_ = Sentences(fields, op.batch, op.keys);
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

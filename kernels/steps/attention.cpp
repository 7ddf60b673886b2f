// Attention on float32 heads.
#include "../dynamic/attention.h"
#include "../runtime/native_cpu.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

class Attention final : public Step {
 public:
  explicit Attention(StepFields& fields)
      : q_(fields.address("q")),
        k_(fields.address("k")),
        v_(fields.address("v")),
        mask_(fields.optional_address("mask")),
        out_(fields.address("out")) {
    op_.isa = native_isa();
    op_.batch = fields.integer("batch"), op_.queries = fields.integer("queries"), op_.keys = fields.integer("keys");
    op_.heads = fields.integer("heads"), op_.kv_heads = fields.integer("kv_heads"), op_.size = fields.integer("size");
    const auto strides = [&](const char* name, int64_t (&to)[3]) {
      const Words words = fields.integers(name, 3);
      std::copy(words.begin(), words.end(), to);
    };
    strides("q_strides", op_.q_stride), strides("k_strides", op_.k_stride), strides("v_strides", op_.v_stride);
    if (mask_) {
      op_.mask_is_bool = fields.flag("mask_is_bool");
      strides("mask_strides", op_.mask_stride);
    }
    op_.causal = fields.flag("causal");
    op_.scale = fields.real("scale");
    xq_attention op = op_;
    op.threads = 1;
    op.q = q_.any<const float>(), op.k = k_.any<const float>(), op.v = v_.any<const float>();
    op.mask = mask_.any<const void>(), op.out = out_.any<float>();
    const int status = xq_attention_check(&op);
    TORCH_CHECK_VALUE(status == XQ_OK, "x86quant: step \"attention\" of a plan: ", xq_status_text(status));
  }

  void run(const Bases& bases) const override {
    xq_attention op = op_;
    op.q = q_.at<const float>(bases), op.k = k_.at<const float>(bases), op.v = v_.at<const float>(bases);
    op.mask = mask_.at<const void>(bases);
    op.out = out_.at<float>(bases);
    dynamic::run_attention(op);
  }

 private:
  xq_attention op_{};
  Address q_, k_, v_, mask_, out_;
};

const RegisterStep attention("attention", [](StepFields& fields) -> StepPtr {
  return std::make_unique<Attention>(fields);
});

}  // namespace
}  // namespace x86quant::runtime

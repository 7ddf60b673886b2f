// Attention of a decoder's newest token: its keys and values join the cache, where all that came before lie.
#include <algorithm>
#include <cstring>

#include "../runtime/errors.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

// Less work than this is not worth waking a thread for: some microseconds of it.
constexpr int64_t kProductsEach = 200'000;

class CachedAttention final : public Step {
 public:
  explicit CachedAttention(StepFields& fields) {
    xq_one_query& op = op_;
    op.isa = native_isa();
    op.batch = fields.integer("batch"), op.heads = fields.integer("heads"), op.kv_heads = fields.integer("kv_heads");
    op.size = fields.integer("size"), op.scale = fields.real("scale");
    capacity_ = fields.integer("capacity");
    q_ = heads(fields, "q", "q_strides", op.heads, op.q_stride);
    k_ = heads(fields, "k", "k_strides", op.kv_heads, new_k_stride_);
    v_ = heads(fields, "v", "v_strides", op.kv_heads, new_v_stride_);
    keys_ = cache(fields, "keys", "keys_strides", op.k_stride);
    values_ = cache(fields, "values", "values_strides", op.v_stride);
    length_ = fields.address("length", sizeof(int64_t), {1}, {sizeof(int64_t)});
    out_ = fields.address("out", kFloat, {op.batch, op.heads * op.size}, {op.heads * op.size * kFloat, kFloat});
    xq_one_query trial = op;
    trial.keys = capacity_;
    trial.q = q_.any<const float>(), trial.k = keys_.any<const float>(), trial.v = values_.any<const float>();
    trial.out = out_.any<float>();
    const int status = xq_one_query_check(&trial);
    require(status == XQ_OK, "step \"cached_attention\" of a plan: ", xq_status_text(status));
  }

  void run(const Bases& bases) const override {
    const int64_t length = *length_.at<const int64_t>(bases);
    require(length >= 0 && length < capacity_, "a cache with room for ", capacity_, " tokens cannot take one behind ", length);
    xq_one_query op = op_;
    op.keys = length + 1;
    op.q = q_.at<const float>(bases);
    auto* const keys = keys_.at<float>(bases);
    auto* const values = values_.at<float>(bases);
    op.k = keys, op.v = values, op.out = out_.at<float>(bases);
    const auto *k = k_.at<const float>(bases), *v = v_.at<const float>(bases);
    const int64_t products = 2 * op.batch * op.heads * op.keys * op.size;
    split(xq_one_query_items(&op), useful_threads(products / kProductsEach), [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        append(k, new_k_stride_, keys, op.k_stride, item, length);
        append(v, new_v_stride_, values, op.v_stride, item, length);
      }
      const Scratch mine(xq_one_query_scratch(&op));
      xq_one_query_run(&op, begin, end, mine.data());
    });
  }

 private:
  static constexpr int64_t kFloat = sizeof(float);

  void append(const float* from, const int64_t (&from_stride)[2], float* to, const int64_t (&to_stride)[3], int64_t item,
              int64_t length) const {
    const int64_t n = item / op_.kv_heads, head = item % op_.kv_heads;
    std::memcpy(to + n * to_stride[0] + head * to_stride[1] + length * to_stride[2],
                from + n * from_stride[0] + head * from_stride[1], static_cast<size_t>(op_.size * kFloat));
  }

  // Heads of one token an element of the batch, the features of each adjacent.
  Address heads(StepFields& fields, const char* name, const char* strides, int64_t count, int64_t (&to)[2]) {
    const Words given = fields.integers(strides, 2);
    std::copy(given.begin(), given.end(), to);
    return fields.address(name, kFloat, {op_.batch, count, op_.size}, in_bytes(fields, strides, given));
  }

  Address cache(StepFields& fields, const char* name, const char* strides, int64_t (&to)[3]) {
    const Words given = fields.integers(strides, 3);
    std::copy(given.begin(), given.end(), to);
    return fields.address(name, kFloat, {op_.batch, op_.kv_heads, capacity_, op_.size}, in_bytes(fields, strides, given));
  }

  static Words in_bytes(StepFields& fields, const char* name, Words strides) {
    for (int64_t& stride : strides)
      if (__builtin_mul_overflow(stride, kFloat, &stride)) fields.refuse(name, "is too large");
    strides.push_back(kFloat);
    return strides;
  }

  xq_one_query op_{};
  int64_t capacity_ = 0;
  int64_t new_k_stride_[2] = {}, new_v_stride_[2] = {};
  Address q_, k_, v_, keys_, values_, length_, out_;
};

const RegisterStep cached_attention("cached_attention", [](StepFields& fields) -> StepPtr {
  return std::make_unique<CachedAttention>(fields);
});

}  // namespace
}  // namespace x86quant::runtime

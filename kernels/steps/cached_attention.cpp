// Attention of a decoder's newest tokens: their keys and values join the cache, where all that came before lie, as floats or
// as int8 codes with a scale for each token and head.
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
constexpr int64_t kProductsEach = 200'000, kFloatsEach = 60'000;

class CachedAttention final : public Step {
 public:
  explicit CachedAttention(StepFields& fields) {
    xq_attention& op = op_;
    op.isa = native_isa(), op.causal = 1;
    op.batch = fields.integer("batch"), op.queries = fields.integer("tokens");
    op.heads = fields.integer("heads"), op.kv_heads = fields.integer("kv_heads");
    op.size = fields.integer("size"), op.scale = fields.real("scale");
    capacity_ = fields.integer("capacity");
    // Batch, token and head, as attention has them; batch, head and token, as they lie in a cache.
    q_ = fields.strided(Access::kRead, "q", "q_strides", kFloat, {op.batch, op.queries, op.heads, op.size}, op.q_stride);
    const Words fresh = {op.batch, op.queries, op.kv_heads, op.size}, all = {op.batch, op.kv_heads, capacity_, op.size};
    k_ = fields.strided(Access::kRead, "k", "k_strides", kFloat, fresh, new_k_stride_);
    v_ = fields.strided(Access::kRead, "v", "v_strides", kFloat, fresh, new_v_stride_);
    codes_ = fields.has("key_scales");
    const int64_t held = codes_ ? 1 : kFloat;
    keys_ = fields.strided(Access::kUpdate, "keys", "keys_strides", held, all, op.k_stride);
    values_ = fields.strided(Access::kUpdate, "values", "values_strides", held, all, op.v_stride);
    if (codes_) {
      const Words scales = {op.batch, op.kv_heads, capacity_};
      key_scales_ = fields.strided(Access::kUpdate, "key_scales", "key_scales_strides", kFloat, scales, op.k_scale_stride);
      value_scales_ = fields.strided(Access::kUpdate, "value_scales", "value_scales_strides", kFloat, scales, op.v_scale_stride);
    }
    if (capacity_ > 1 && (op.k_stride[2] == 0 || op.v_stride[2] == 0)) fields.refuse("keys_strides", "lay a cache's tokens over each other");
    std::swap(op.k_stride[1], op.k_stride[2]), std::swap(op.v_stride[1], op.v_stride[2]);
    length_ = fields.address(Access::kIndex, "length", kWord, {1}, {kWord});
    hidden_ = fields.address(Access::kIndex, "hidden", kWord, {op.batch}, {kWord});
    out_ = fields.rows(Access::kWrite, "out", kFloat, {op.batch, op.queries, op.heads, op.size});
    xq_attention trial = op;
    trial.keys = capacity_, trial.threads = 1;
    trial.q = q_.any<const float>(), trial.out = out_.any<float>();
    if (codes_) {
      trial.k_codes = keys_.any<const int8_t>(), trial.v_codes = values_.any<const int8_t>();
      trial.k_scale = key_scales_.any<const float>(), trial.v_scale = value_scales_.any<const float>();
    } else {
      trial.k = keys_.any<const float>(), trial.v = values_.any<const float>();
    }
    const int status = xq_attention_check(&trial);
    require(status == XQ_OK, "step \"cached_attention\" of a plan: ", xq_status_text(status));
  }

  void run(const Bases& bases) const override {
    xq_attention op = op_;
    op.past = *length_.at<const int64_t>(bases);
    op.hidden = hidden_.at<const int64_t>(bases);
    require(op.past >= 0 && op.past <= capacity_ - op.queries, "a cache with room for ", capacity_, " tokens cannot take ",
            op.queries, " behind ", op.past);
    op.keys = op.past + op.queries;
    for (int64_t n = 0; n < op.batch; ++n)
      require(op.hidden[n] >= 0 && op.hidden[n] < op.keys, "of ", op.keys, " tokens the first ", op.hidden[n],
              " cannot be hidden");
    op.q = q_.at<const float>(bases), op.out = out_.at<float>(bases);
    const auto *k = k_.at<const float>(bases), *v = v_.at<const float>(bases);
    if (codes_) return run_codes(op, k, v, bases);
    auto* const keys = keys_.at<float>(bases);
    auto* const values = values_.at<float>(bases);
    op.k = keys, op.v = values;
    const auto append_all = [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        append(k, new_k_stride_, keys, op.k_stride, item, op.past);
        append(v, new_v_stride_, values, op.v_stride, item, op.past);
      }
    };
    if (op.queries == 1) return add_one(op, append_all);
    split(op.batch * op.kv_heads, useful_threads(floats_to_append() / kFloatsEach), append_all);
    run_attention(op);
  }
  // Of the new tokens alone, as what is held shows in a run.
  StepThreads threads() const override {
    xq_attention least = op_;
    least.keys = least.queries;
    return shared_if(least.queries > 1 && shares_of_attention(least) > 1);
  }

 private:
  static constexpr int64_t kFloat = sizeof(float), kWord = sizeof(int64_t);

  int64_t floats_to_append() const { return op_.batch * op_.kv_heads * op_.queries * op_.size; }

  void run_codes(xq_attention& op, const float* k, const float* v, const Bases& bases) const {
    auto* const keys = keys_.at<int8_t>(bases);
    auto* const values = values_.at<int8_t>(bases);
    auto* const key_scales = key_scales_.at<float>(bases);
    auto* const value_scales = value_scales_.at<float>(bases);
    op.k_codes = keys, op.v_codes = values, op.k_scale = key_scales, op.v_scale = value_scales;
    const auto append_all = [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        append_codes(k, new_k_stride_, keys, op.k_stride, key_scales, op.k_scale_stride, item, op.past);
        append_codes(v, new_v_stride_, values, op.v_stride, value_scales, op.v_scale_stride, item, op.past);
      }
    };
    if (op.queries > 1) {
      split(op.batch * op.kv_heads, useful_threads(floats_to_append() / kFloatsEach), append_all);
      return run_attention(op);
    }
    op.threads = 1;  // an item is a head of keys, as it is of what is appended
    const int64_t products = 2 * op.batch * op.heads * op.keys * op.size;
    split(op.batch * op.kv_heads, useful_threads(products / kProductsEach), [&](int64_t begin, int64_t end) {
      append_all(begin, end);
      const Scratch mine(xq_attention_scratch(&op));
      xq_attention_run(&op, begin, end, mine.data());
    });
  }

  // As append does, in codes.
  void append_codes(const float* from, const int64_t (&from_stride)[3], int8_t* to, const int64_t (&to_stride)[3], float* scale,
                    const int64_t (&scale_stride)[2], int64_t item, int64_t length) const {
    const int64_t n = item / op_.kv_heads, head = item % op_.kv_heads;
    from += n * from_stride[0] + head * from_stride[2], to += n * to_stride[0] + head * to_stride[2] + length * to_stride[1];
    scale += n * scale_stride[0] + head * scale_stride[1] + length;
    for (int64_t token = 0; token < op_.queries; ++token)
      xq_cache_codes(op_.isa, from + token * from_stride[1], op_.size, to + token * to_stride[1], scale + token);
  }

  template <class Append>
  static void add_one(const xq_attention& all, const Append& append_all) {
    xq_one_query op{};
    op.isa = all.isa, op.batch = all.batch, op.keys = all.keys, op.heads = all.heads, op.kv_heads = all.kv_heads;
    op.size = all.size, op.q = all.q, op.k = all.k, op.v = all.v, op.scale = all.scale, op.out = all.out, op.hidden = all.hidden;
    op.q_stride[0] = all.q_stride[0], op.q_stride[1] = all.q_stride[2];
    const auto by_head = [](const int64_t (&from)[3], int64_t (&to)[3]) { to[0] = from[0], to[1] = from[2], to[2] = from[1]; };
    by_head(all.k_stride, op.k_stride), by_head(all.v_stride, op.v_stride);
    const int64_t products = 2 * op.batch * op.heads * op.keys * op.size;
    split(xq_one_query_items(&op), useful_threads(products / kProductsEach), [&](int64_t begin, int64_t end) {
      append_all(begin, end);
      const Scratch mine(xq_one_query_scratch(&op));
      xq_one_query_run(&op, begin, end, mine.data());
    });
  }

  // One head of keys or values of one element of the batch.
  void append(const float* from, const int64_t (&from_stride)[3], float* to, const int64_t (&to_stride)[3], int64_t item,
              int64_t length) const {
    const int64_t n = item / op_.kv_heads, head = item % op_.kv_heads;
    from += n * from_stride[0] + head * from_stride[2], to += n * to_stride[0] + head * to_stride[2] + length * to_stride[1];
    for (int64_t token = 0; token < op_.queries; ++token)
      std::memcpy(to + token * to_stride[1], from + token * from_stride[1], static_cast<size_t>(op_.size * kFloat));
  }

  xq_attention op_{};
  int64_t capacity_ = 0;
  int64_t new_k_stride_[3] = {}, new_v_stride_[3] = {};
  bool codes_ = false;
  Address q_, k_, v_, keys_, values_, key_scales_, value_scales_, length_, hidden_, out_;
};

const RegisterStep cached_attention("cached_attention", [](StepFields& fields) -> StepPtr {
  return std::make_unique<CachedAttention>(fields);
});

}  // namespace
}  // namespace x86quant::runtime

// Row codes between the products of a transformer: products, residuals, norms and quantization in one step.
#include "../runtime/errors.h"
#include "../runtime/native_cpu.h"
#include "../runtime/step.h"

namespace x86quant::runtime {
namespace {

// Codes, scales and zero points of rows.
struct CodesAddress {
  Address codes, scale, zp;

  // With a prefix before the names of the fields.
  static CodesAddress of(StepFields& fields, Access access, const std::string& prefix, int64_t rows, int64_t features) {
    const auto address = [&](const char* name, int64_t size, int64_t each) {
      return fields.rows(access, (prefix + name).c_str(), size, {rows, each});
    };
    return {address("codes", 1, features), address("scale", sizeof(float), 1), address("zero_point", sizeof(int32_t), 1)};
  }
};

class Rows final : public Step {
 public:
  explicit Rows(StepFields& fields) {
    const int64_t rows = fields.integer("rows"), features = fields.integer("features");
    const auto floats = [&](Access access, const char* name) {
      return fields.has(name) ? fields.rows(access, name, sizeof(float), {rows, features}) : Address{};
    };
    if (fields.has("pack")) {
      pack_ = fields.row_pack("pack");
      op_ = pack_->call(rows);
      if (op_.features != features) fields.refuse("features", "is not the number of the packed weights");
      if (fields.has("scale_of_all")) {
        in_.codes = fields.rows(Access::kRead, "codes", 1, {rows, pack_->in_features()});
        of_all_ = {fields.real("scale_of_all"), fields.zero_point("zero_point_of_all")};
      } else {
        in_ = CodesAddress::of(fields, Access::kRead, "", rows, pack_->in_features());
      }
    } else {
      op_.isa = native_isa(), op_.rows = rows, op_.features = features;
      x_ = fields.rows(Access::kRead, "x", sizeof(float), {rows, features});
    }
    residual_ = floats(Access::kRead, "residual");
    const Access written = fields.has("count") ? Access::kWriteSome : Access::kWrite;
    total_ = floats(written, "total");
    normed_ = floats(written, "normed");
    if (fields.has("out_codes")) out_ = CodesAddress::of(fields, written, "out_", rows, features);
    if (fields.has("count")) count_ = fields.rows(Access::kIndex, "count", sizeof(int64_t), {1});
    read_norm(fields);
    xq_rows op = with_addresses([](const Address& a, auto* type) { return a.any<std::remove_pointer_t<decltype(type)>>(); });
    if (of_all_) op.in.scale = &of_all_->scale, op.in.zp = &of_all_->zp;  // which the check does not read
    op.threads = 1;
    const int status = xq_rows_check(&op);
    require(status == XQ_OK, "step \"rows\" of a plan: ", xq_status_text(status));
  }

  void run(const Bases& bases) const override {
    xq_rows op = with_addresses(
        [&](const Address& a, auto* type) { return a.at<std::remove_pointer_t<decltype(type)>>(bases); });
    if (count_) {
      const int64_t count = *count_.at<const int64_t>(bases);
      require(count >= 0 && count <= op.rows, "a step of ", op.rows, " rows cannot compute ", count);
      op.rows = count;
    }
    std::optional<SameScale> same;
    if (of_all_) same.emplace(op.rows, of_all_->scale, of_all_->zp).give(op.in);
    run_rows(op, pack_ ? pack_->in_features() : 0);
  }
  StepThreads threads() const override { return shared_if(shares_of_rows(op_, pack_ ? pack_->in_features() : 0) > 1); }

 private:
  void read_norm(StepFields& fields) {
    if (!fields.has("norm")) return;
    op_.norm = fields.small("norm");
    op_.eps = fields.real("eps");
    const auto table = [&](const char* name) -> const float* {
      if (!fields.has(name)) return nullptr;
      kept_.push_back(fields.table(name, Type::kFloat, op_.features));
      return kept_.back().as<float>();
    };
    op_.norm_weight = table("norm_weight");
    op_.norm_bias = table("norm_bias");
  }

  // The call with every address as `at(address, pointer of its type)` says.
  template <class At>
  xq_rows with_addresses(const At& at) const {
    xq_rows op = op_;
    const auto set = [&](auto*& pointer, const Address& address) { pointer = at(address, pointer); };
    const auto set_codes = [&](xq_codes& codes, const CodesAddress& from) {
      set(codes.codes, from.codes), set(codes.scale, from.scale), set(codes.zp, from.zp);
    };
    set_codes(op.in, in_), set_codes(op.out, out_);
    set(op.x, x_), set(op.residual, residual_), set(op.total, total_), set(op.normed, normed_);
    return op;
  }

  RowPackPtr pack_;
  std::vector<Table> kept_;  // what op_ points to
  xq_rows op_{};
  CodesAddress in_, out_;
  struct OfAll {
    float scale;
    int32_t zp;
  };
  std::optional<OfAll> of_all_;  // of rows whose codes all have one scale and zero point
  Address x_, residual_, total_, normed_;
  Address count_;  // of how many rows, the first ones, are computed; none: of all
};

const RegisterStep rows("rows", [](StepFields& fields) -> StepPtr { return std::make_unique<Rows>(fields); });

}  // namespace
}  // namespace x86quant::runtime

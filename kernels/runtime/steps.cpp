#include "steps.h"

#include <algorithm>
#include <map>
#include <set>
#include <type_traits>
#include <variant>

#include "native_cpu.h"
#include "parallel.h"

namespace x86quant::runtime {
namespace {

class ConvStep final : public Step {
 public:
  ConvStep(c10::intrusive_ptr<PackedConv> conv, const Place& in, const Place& out,
           const Place& residual)
      : conv_(std::move(conv)), in_(in), out_(out), residual_(residual) {
    conv_->check({in.view, out.view, residual.view});
  }
  void run(const Bases& bases) const override {
    conv_->run({in_.at(bases), out_.at(bases), residual_.at(bases)});
  }

 private:
  c10::intrusive_ptr<PackedConv> conv_;
  Place in_, out_, residual_;
};

class OpStep final : public Step {
 public:
  OpStep(const xq_op& op, const Place& a, const Place& b, const Place& out,
         std::vector<at::Tensor> tables)
      : op_(op), a_(a), b_(b), out_(out), tables_(std::move(tables)) {
    const xq_tensor& t = out.view;
    threads_worth_ = t.n * t.d * t.h * t.w * t.c * passes() / kBytesEach;
  }

  void run(const Bases& bases) const override {
    xq_op op = op_;
    op.a = a_.at(bases);
    op.b = b_.at(bases);
    op.out = out_.at(bases);
    split(xq_op_items(&op), useful_threads(threads_worth_),
          [&](int64_t begin, int64_t end) { xq_op_run(&op, begin, end); });
  }

 private:
  // Fewer bytes than these are not worth waking a thread for.
  static constexpr int64_t kBytesEach = 64 * 1024;

  // How often an output byte's worth of input is read, roughly.
  int64_t passes() const {
    const xq_tensor &a = a_.view, &out = out_.view;
    const int64_t pixels = std::max<int64_t>(out.d * out.h * out.w, 1);
    return std::max<int64_t>(1, a.d * a.h * a.w / pixels);
  }

  xq_op op_;
  Place a_, b_, out_;
  std::vector<at::Tensor> tables_;  // what op_ points to
  int64_t threads_worth_;
};

class CopyStep final : public Step {
 public:
  CopyStep(StridedCopy copy, int64_t from_base, int64_t from_offset, int64_t to_base,
           int64_t to_offset)
      : copy_(std::move(copy)),
        from_base_(from_base),
        from_offset_(from_offset),
        to_base_(to_base),
        to_offset_(to_offset) {}
  void run(const Bases& bases) const override {
    copy_.run(bases[from_base_] + from_offset_, bases[to_base_] + to_offset_);
  }

 private:
  StridedCopy copy_;
  int64_t from_base_, from_offset_, to_base_, to_offset_;
};

// What a plan may set of an op. A table is of 256 codes, or of one float a channel of the output.
using Field = std::variant<int32_t xq_op::*, int64_t xq_op::*, float xq_op::*, int32_t (xq_op::*)[3],
                           float (xq_op::*)[3], const uint8_t* xq_op::*, const float* xq_op::*>;

const std::map<std::string, Field>& fields() {
  static const std::map<std::string, Field> all = {
      {"a_zp", &xq_op::a_zp},
      {"b_zp", &xq_op::b_zp},
      {"out_zp", &xq_op::out_zp},
      {"lo", &xq_op::lo},
      {"hi", &xq_op::hi},
      {"groups", &xq_op::groups},
      {"count_include_pad", &xq_op::count_include_pad},
      {"align_corners", &xq_op::align_corners},
      {"a_stride_c", &xq_op::a_stride_c},
      {"out_stride_c", &xq_op::out_stride_c},
      {"a_mult", &xq_op::a_mult},
      {"b_mult", &xq_op::b_mult},
      {"eps", &xq_op::eps},
      {"kernel", &xq_op::kernel},
      {"stride", &xq_op::stride},
      {"padding", &xq_op::padding},
      {"dilation", &xq_op::dilation},
      {"scale", &xq_op::scale},
      {"lut", &xq_op::lut},
      {"scale_c", &xq_op::scale_c},
      {"shift_c", &xq_op::shift_c},
  };
  return all;
}

// A kind of op, and the fields that it reads: any other is a mistake in the plan.
struct Kind {
  xq_op_kind number;
  bool rounds;  // to codes: then it reads the fields of `rounding`, too
  std::set<std::string> fields;

  bool reads(const std::string& field) const {
    static const std::set<std::string> rounding = {"out_zp", "lo", "hi", "lut"};
    return fields.count(field) || (rounds && rounding.count(field));
  }
};

const Kind& kind_named(const std::string& name) {
  static const std::map<std::string, Kind> kinds = {
      {"copy", {XQ_OP_COPY, false, {}}},
      {"lut", {XQ_OP_LUT, false, {"lut"}}},
      {"requantize", {XQ_OP_REQUANT, true, {"a_zp", "a_mult"}}},
      {"add", {XQ_OP_ADD, true, {"a_zp", "b_zp", "a_mult", "b_mult"}}},
      {"mul", {XQ_OP_MUL, true, {"a_zp", "b_zp", "a_mult"}}},
      {"shuffle", {XQ_OP_SHUFFLE, false, {"groups"}}},
      {"max_pool", {XQ_OP_MAX_POOL, false, {"kernel", "stride", "padding", "dilation"}}},
      {"avg_pool",
       {XQ_OP_AVG_POOL,
        true,
        {"kernel", "stride", "padding", "dilation", "a_zp", "a_mult", "count_include_pad"}}},
      {"adaptive_avg_pool", {XQ_OP_ADAPTIVE_POOL, true, {"a_zp", "a_mult"}}},
      {"nearest", {XQ_OP_NEAREST, true, {"a_zp", "a_mult", "scale", "align_corners"}}},
      {"bilinear", {XQ_OP_BILINEAR, true, {"a_zp", "a_mult", "scale", "align_corners"}}},
      {"quantize", {XQ_OP_QUANTIZE, true, {"a_mult", "a_stride_c"}}},
      {"dequantize", {XQ_OP_DEQUANTIZE, false, {"a_zp", "a_mult", "out_stride_c"}}},
      {"affine", {XQ_OP_AFFINE, true, {"a_zp", "scale_c", "shift_c"}}},
      {"layer_norm", {XQ_OP_LAYER_NORM, true, {"a_zp", "a_mult", "eps", "scale_c", "shift_c"}}},
  };
  const auto found = kinds.find(name);
  TORCH_CHECK_VALUE(found != kinds.end(), "x86quant: a plan has no op \"", name, "\"");
  return found->second;
}

// Sets fields of an op by their names.
class Setter {
 public:
  Setter(xq_op& op, const std::string& name) : op_(op), name_(name), kind_(kind_named(name)) {
    op_.kind = kind_.number;
  }

  template <class Values>
  void set(const std::string& name, const Values& values) {
    const auto field = fields().find(name);
    TORCH_CHECK_VALUE(field != fields().end() && kind_.reads(name), "x86quant: the op ", name_,
                      " of a plan has no field \"", name, "\"");
    std::visit([&](auto member) { put(name, op_.*member, values); }, field->second);
  }

 private:
  static void check(const std::string& name, size_t got, size_t expected) {
    TORCH_CHECK_VALUE(got == expected, "x86quant: field \"", name, "\" of an op takes ", expected,
                      " values, got ", got);
  }

  template <class To, class From>
  void put(const std::string& name, To& to, const std::vector<From>& values) {
    if constexpr (std::is_pointer_v<To>) {
      TORCH_CHECK_VALUE(false, "x86quant: field \"", name, "\" of an op is a table");
    } else if constexpr (std::is_integral_v<std::remove_extent_t<To>> != std::is_integral_v<From>) {
      TORCH_CHECK_VALUE(false, "x86quant: field \"", name, "\" of an op mixes integers and reals");
    } else if constexpr (std::is_array_v<To>) {
      check(name, values.size(), 3);
      for (int i = 0; i < 3; ++i) to[i] = static_cast<std::remove_extent_t<To>>(values[i]);
    } else {
      check(name, values.size(), 1);
      to = static_cast<To>(values[0]);
    }
  }

  template <class To>
  void put(const std::string& name, To& to, const at::Tensor& table) {
    if constexpr (std::is_pointer_v<To>) {
      using Value = std::remove_const_t<std::remove_pointer_t<To>>;
      const bool codes = std::is_same_v<Value, uint8_t>;
      const int64_t wanted = codes ? 256 : op_.out.c;
      TORCH_CHECK_VALUE(table.scalar_type() == (codes ? at::kByte : at::kFloat) && table.numel() == wanted,
                        "x86quant: table \"", name, "\" of an op takes ", wanted,
                        codes ? " codes" : " floats", ", got ", table.numel(), " of type ",
                        table.scalar_type());
      to = table.const_data_ptr<Value>();
    } else {
      TORCH_CHECK_VALUE(false, "x86quant: field \"", name, "\" of an op is no table");
    }
  }

  xq_op& op_;
  const std::string& name_;
  const Kind& kind_;
};

}  // namespace

std::unique_ptr<Step> conv_step(c10::intrusive_ptr<PackedConv> conv, const Place& in,
                                const Place& out, const Place& residual) {
  return std::make_unique<ConvStep>(std::move(conv), in, out, residual);
}

std::unique_ptr<Step> op_step(const std::string& kind, const Place& a, const Place& b, const Place& out,
                              const c10::Dict<std::string, Words>& integers,
                              const c10::Dict<std::string, std::vector<double>>& reals,
                              const c10::Dict<std::string, at::Tensor>& tables) {
  xq_op op{};
  op.isa = native_isa();
  op.hi = 255;
  op.groups = 1;
  op.a = a.view;
  op.b = b.view;
  op.out = out.view;
  Setter setter(op, kind);
  for (const auto& item : integers) setter.set(item.key(), item.value());
  for (const auto& item : reals) setter.set(item.key(), item.value());
  std::vector<at::Tensor> kept;
  for (const auto& item : tables) {
    kept.push_back(item.value().contiguous());
    setter.set(item.key(), kept.back());
  }
  const int status = xq_op_check(&op);
  TORCH_CHECK(status == XQ_OK, "x86quant: the native op ", kind, " refused: ", xq_status_text(status));
  return std::make_unique<OpStep>(op, a, b, out, std::move(kept));
}

std::unique_ptr<Step> copy_step(StridedCopy copy, int64_t from_base, int64_t from_offset,
                                int64_t to_base, int64_t to_offset) {
  return std::make_unique<CopyStep>(std::move(copy), from_base, from_offset, to_base, to_offset);
}

}  // namespace x86quant::runtime

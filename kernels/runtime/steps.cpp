#include "steps.h"

#include <algorithm>

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

// Fills fields of an op by name and complains of names that are no fields.
class Fields {
 public:
  explicit Fields(xq_op& op) : op_(op) {}

  void set(const std::string& name, const Words& values) {
    auto* const three = triple(name);
    if (three) {
      check(name, values.size(), 3);
      for (int i = 0; i < 3; ++i) (*three)[i] = static_cast<int32_t>(values[i]);
      return;
    }
    check(name, values.size(), 1);
    if (name == "a_stride_c") op_.a_stride_c = values[0];
    else if (name == "out_stride_c") op_.out_stride_c = values[0];
    else integer(name) = static_cast<int32_t>(values[0]);
  }

  void set(const std::string& name, const std::vector<double>& values) {
    if (name == "scale") {
      check(name, values.size(), 3);
      for (int i = 0; i < 3; ++i) op_.scale[i] = static_cast<float>(values[i]);
      return;
    }
    check(name, values.size(), 1);
    real(name) = static_cast<float>(values[0]);
  }

  void set(const std::string& name, const at::Tensor& table) {
    const bool is_lut = name == "lut";
    const int64_t wanted = is_lut ? 256 : op_.out.c;
    TORCH_CHECK_VALUE(table.scalar_type() == (is_lut ? at::kByte : at::kFloat) && table.numel() == wanted,
                      "x86quant: table \"", name, "\" of an op takes ", wanted, is_lut ? " codes" : " floats",
                      ", got ", table.numel(), " of type ", table.scalar_type());
    if (is_lut) op_.lut = table.const_data_ptr<uint8_t>();
    else if (name == "scale_c") op_.scale_c = table.const_data_ptr<float>();
    else if (name == "shift_c") op_.shift_c = table.const_data_ptr<float>();
    else unknown(name);
  }

 private:
  [[noreturn]] static void unknown(const std::string& name) {
    TORCH_CHECK_VALUE(false, "x86quant: an op of a plan has no field \"", name, "\"");
  }
  static void check(const std::string& name, size_t got, size_t expected) {
    TORCH_CHECK_VALUE(got == expected, "x86quant: field \"", name, "\" of an op takes ", expected,
                      " values, got ", got);
  }

  int32_t (*triple(const std::string& name))[3] {
    if (name == "kernel") return &op_.kernel;
    if (name == "stride") return &op_.stride;
    if (name == "padding") return &op_.padding;
    if (name == "dilation") return &op_.dilation;
    return nullptr;
  }

  int32_t& integer(const std::string& name) {
    if (name == "a_zp") return op_.a_zp;
    if (name == "b_zp") return op_.b_zp;
    if (name == "out_zp") return op_.out_zp;
    if (name == "lo") return op_.lo;
    if (name == "hi") return op_.hi;
    if (name == "groups") return op_.groups;
    if (name == "count_include_pad") return op_.count_include_pad;
    if (name == "align_corners") return op_.align_corners;
    unknown(name);
  }

  float& real(const std::string& name) {
    if (name == "a_mult") return op_.a_mult;
    if (name == "b_mult") return op_.b_mult;
    if (name == "eps") return op_.eps;
    unknown(name);
  }

  xq_op& op_;
};

}  // namespace

std::unique_ptr<Step> conv_step(c10::intrusive_ptr<PackedConv> conv, const Place& in,
                                const Place& out, const Place& residual) {
  return std::make_unique<ConvStep>(std::move(conv), in, out, residual);
}

std::unique_ptr<Step> op_step(int kind, const Place& a, const Place& b, const Place& out,
                              const c10::Dict<std::string, Words>& integers,
                              const c10::Dict<std::string, std::vector<double>>& reals,
                              const c10::Dict<std::string, at::Tensor>& tables) {
  xq_op op{};
  op.kind = kind;
  op.isa = native_isa();
  op.hi = 255;
  op.groups = 1;
  op.a = a.view;
  op.b = b.view;
  op.out = out.view;
  Fields fields(op);
  for (const auto& item : integers) fields.set(item.key(), item.value());
  for (const auto& item : reals) fields.set(item.key(), item.value());
  std::vector<at::Tensor> kept;
  for (const auto& item : tables) {
    kept.push_back(item.value().contiguous());
    fields.set(item.key(), kept.back());
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

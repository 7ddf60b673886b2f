#include "native_op.h"

#include <algorithm>

#include "../runtime/errors.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"

namespace x86quant::runtime {
namespace {

class NativeOpStep final : public Step {
 public:
  NativeOpStep(const xq_op& op, const Place& a, const Place& b, const Place& out, std::vector<Table> kept)
      : op_(op), a_(a), b_(b), out_(out), kept_(std::move(kept)) {
    const xq_tensor& t = out.view;
    nanoseconds_ = static_cast<double>(t.n * t.d * t.h * t.w * t.c) * static_cast<double>(passes()) / kBytesANanosecond;
  }

  void run(const Bases& bases) const override {
    xq_op op = op_;
    op.a = a_.at(bases);
    op.b = b_.at(bases);
    op.out = out_.at(bases);
    split(xq_op_items(&op), threads_for(nanoseconds_),
          [&](int64_t begin, int64_t end) { xq_op_run(&op, begin, end); });
  }

  StepThreads threads() const override { return shared_if(shares_of(nanoseconds_, kTogether) > 1); }

 private:
  // Roughly: what one thread reads.
  static constexpr double kBytesANanosecond = 20;

  // How often an output byte's worth of input is read, roughly.
  int64_t passes() const {
    const xq_tensor &a = a_.view, &out = out_.view;
    const int64_t pixels = std::max<int64_t>(out.d * out.h * out.w, 1);
    return std::max<int64_t>(1, a.d * a.h * a.w / pixels);
  }

  xq_op op_;
  Place a_, b_, out_;
  std::vector<Table> kept_;
  double nanoseconds_;  // on one thread
};

}  // namespace

NativeOp::NativeOp(xq_op_kind kind, StepFields& given, Place from, Place to) : fields(given), a(from), out(to) {
  op.kind = kind;
  op.isa = native_isa();
  op.a = a.view;
  op.out = out.view;
  op.hi = 255;
  op.groups = 1;
}

void NativeOp::read_b() {
  b = fields.tensor(Access::kRead, "b");
  op.b = b.view;
}

void NativeOp::read_rounding() {
  op.out_zp = fields.zero_point("out_zp");
  if (fields.has("lo")) op.lo = fields.small("lo");
  if (fields.has("hi")) op.hi = fields.small("hi");
  if (fields.has("lut")) op.lut = codes("lut");
}

const uint8_t* NativeOp::codes(const char* name) {
  kept_.push_back(fields.table(name, Type::kByte, 256));
  return kept_.back().as<uint8_t>();
}

const float* NativeOp::reals(const char* name) {
  kept_.push_back(fields.table(name, Type::kFloat, 256));
  return kept_.back().as<float>();
}

const float* NativeOp::one_a_channel(const char* name) {
  kept_.push_back(fields.table(name, Type::kFloat, out.view.c));
  return kept_.back().as<float>();
}

StepPtr NativeOp::step() && {
  const int status = xq_op_check(&op);
  require(status == XQ_OK, "step \"", fields.kind(), "\" of a plan: ", xq_status_text(status));
  return std::make_unique<NativeOpStep>(op, a, b, out, std::move(kept_));
}

}  // namespace x86quant::runtime

// Products of row codes as torch sees them, and what needs no product: see x86quant/ops/rows.py.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <limits>
#include <tuple>
#include <vector>

#include "../runtime/activation.h"
#include "../runtime/native_cpu.h"
#include "../runtime/torch_tables.h"
#include "row_codes.h"
#include "row_linear.h"
#include "row_weights.h"

namespace x86quant::dynamic {
namespace {

using runtime::RowPack;
using runtime::run_rows;
using FiveTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Bits of `outputs`.
constexpr int64_t kTotal = 1, kNormed = 2, kCodes = 4;
const float* floats_of(const std::optional<at::Tensor>& t) { return t ? t->const_data_ptr<float>() : nullptr; }

xq_rows call_on(const RowPack& linear, const Operand& operand) {
  xq_rows op = linear.call(operand.rows());
  op.in = operand.view();
  return op;
}

// How a norm is asked for, with operands that live as long as this does.
struct Norm {
  std::optional<at::Tensor> residual, weight, bias;
  double eps;
  int32_t kind;
  int64_t outputs;

  Norm(const std::optional<at::Tensor>& r, const std::optional<at::Tensor>& w, const std::optional<at::Tensor>& b,
       double eps, const std::string& kind, int64_t outputs)
      : residual(contiguous_floats(r)), weight(contiguous_floats(w)), bias(contiguous_floats(b)), eps(eps),
        kind(kind == "layer" ? XQ_NORM_LAYER : XQ_NORM_RMS), outputs(outputs) {}

  FiveTensors run_on(xq_rows& op, at::IntArrayRef shape, int64_t in_features) const {
    const auto fits = [](const std::optional<at::Tensor>& t, int64_t numel) { return !t || t->numel() == numel; };
    TORCH_CHECK_VALUE(fits(residual, op.rows * op.features) && fits(weight, op.features) && fits(bias, op.features),
                      "x86quant: the operands of a norm do not fit each other");
    op.residual = floats_of(residual);
    op.norm_weight = floats_of(weight), op.norm_bias = floats_of(bias);
    op.norm = kind, op.eps = static_cast<float>(eps);
    const auto floats = [&](bool wanted) { return at::empty(wanted ? shape : at::IntArrayRef{0}, at::kFloat); };
    at::Tensor total = floats(outputs & kTotal), normed = floats(outputs & kNormed);
    RowCodes codes = outputs & kCodes ? new_row_codes(shape) : no_row_codes();
    if (op.rows * op.features > 0) {
      if (outputs & kTotal) op.total = total.mutable_data_ptr<float>();
      if (outputs & kNormed) op.normed = normed.mutable_data_ptr<float>();
      if (outputs & kCodes) op.out = written(codes);
      run_rows(op, in_features);
    }
    return {total, normed, std::get<0>(codes), std::get<1>(codes), std::get<2>(codes)};
  }

 private:
  static std::optional<at::Tensor> contiguous_floats(const std::optional<at::Tensor>& t) {
    if (!t) return std::nullopt;
    TORCH_CHECK_VALUE(t->device().is_cpu() && t->scalar_type() == at::kFloat,
                      "x86quant: the operands of a norm must be float32 on the CPU, got ", t->scalar_type());
    return t->contiguous();
  }
};

// The product of row codes, as float32 rows.
at::Tensor floats(const RowPack& linear, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zp) {
  RECORD_FUNCTION("x86quant::linear_rows", c10::ArrayRef<const c10::IValue>{});
  const Operand operand(codes, scale, zp, linear.in_features());
  at::Tensor out = at::empty(operand.shape_with(linear.out_features()), at::kFloat);
  if (out.numel() == 0) return out;
  xq_rows op = call_on(linear, operand);
  op.total = out.mutable_data_ptr<float>();
  run_rows(op, linear.in_features());
  return out;
}

// The same as row codes.
RowCodes row_codes(const RowPack& linear, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zp) {
  RECORD_FUNCTION("x86quant::linear_rows_rows", c10::ArrayRef<const c10::IValue>{});
  const Operand operand(codes, scale, zp, linear.in_features());
  RowCodes out = new_row_codes(operand.shape_with(linear.out_features()));
  if (operand.rows() == 0) return out;
  xq_rows op = call_on(linear, operand);
  op.out = written(out);
  run_rows(op, linear.in_features());
  return out;
}

FiveTensors normed(const RowPack& linear, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zp,
                   const Norm& norm) {
  RECORD_FUNCTION("x86quant::linear_rows_norm", c10::ArrayRef<const c10::IValue>{});
  const Operand operand(codes, scale, zp, linear.in_features());
  xq_rows op = call_on(linear, operand);
  return norm.run_on(op, operand.shape_with(linear.out_features()), linear.in_features());
}

using RowLinearPack = c10::intrusive_ptr<RowLinear>;

std::optional<runtime::Table> packed_before(const std::optional<at::Tensor>& known) {
  if (!known) return std::nullopt;
  TORCH_CHECK_VALUE(known->scalar_type() == at::kByte && known->is_cpu(), "x86quant: packed weights are bytes");
  return runtime::table_of(*known);
}

RowLinearPack pack_row_linear(const at::Tensor& weight, const at::Tensor& scale, const std::optional<at::Tensor>& bias,
                              const std::optional<std::string>& activation, const std::optional<at::Tensor>& known) {
  const Weights weights(weight, scale, bias);
  return c10::make_intrusive<RowLinear>(std::make_shared<RowPack>(
      weights.view(), runtime::activation_code(activation.value_or("")), packed_before(known)));
}

RowLinearPack pack_gated_rows(const at::Tensor& gate, const at::Tensor& gate_scale, const std::optional<at::Tensor>& gate_bias,
                     const at::Tensor& up, const at::Tensor& up_scale, const std::optional<at::Tensor>& up_bias,
                     const std::string& activation, const std::optional<at::Tensor>& known,
                     const std::optional<at::Tensor>& known_up) {
  const Weights first(gate, gate_scale, gate_bias), second(up, up_scale, up_bias);
  const auto pack =
      std::make_shared<RowPack>(first.view(), runtime::activation_code(activation), packed_before(known));
  pack->multiply_by(second.view(), packed_before(known_up));
  return c10::make_intrusive<RowLinear>(pack);
}

// Float32 rows, contiguous, at least one dimension.
at::Tensor rows_of(const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.device().is_cpu() && x.scalar_type() == at::kFloat && x.dim() > 0,
                    "x86quant: rows must be float32 on the CPU, got ", x.scalar_type(), " of shape ", x.sizes());
  return x.contiguous();
}

xq_rows call_on(const at::Tensor& x) {
  xq_rows op{};
  op.isa = native_isa(), op.features = x.size(-1);
  op.rows = x.numel() == 0 ? 0 : x.numel() / op.features;
  op.x = x.const_data_ptr<float>();
  return op;
}

RowCodes native_quantize_rows(const at::Tensor& x) {
  const at::Tensor in = rows_of(x);
  RowCodes out = new_row_codes(in.sizes());
  if (in.numel() == 0) {  // rows of no features have no range
    std::get<1>(out).fill_(std::numeric_limits<float>::min());
    std::get<2>(out).zero_();
    return out;
  }
  xq_rows op = call_on(in);
  op.out = written(out);
  run_rows(op, 0);
  return out;
}

FiveTensors native_norm_rows(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                             const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps,
                             std::string kind, int64_t outputs) {
  const at::Tensor in = rows_of(x);
  xq_rows op = call_on(in);
  return Norm(residual, weight, bias, eps, kind, outputs).run_on(op, in.sizes(), 0);
}

#define ROW_PACK "__torch__.torch.classes.x86quant.RowLinear"
#define CODES "(Tensor, Tensor, Tensor)"
#define FIVE "(Tensor, Tensor, Tensor, Tensor, Tensor)"

TORCH_LIBRARY_FRAGMENT(x86quant, m) {
  m.class_<RowLinear>("RowLinear")
      // Methods, not ops: torch takes 8 us to pass an object to an op.
      .def("floats", [](const RowLinearPack& p, const at::Tensor& codes, const at::Tensor& scale,
                        const at::Tensor& zp) { return floats(*p->pack, codes, scale, zp); })
      .def("codes", [](const RowLinearPack& p, const at::Tensor& codes, const at::Tensor& scale,
                       const at::Tensor& zp) { return row_codes(*p->pack, codes, scale, zp); })
      .def("normed", [](const RowLinearPack& p, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zp,
                        const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& weight,
                        const std::optional<at::Tensor>& bias, double eps, std::string kind, int64_t outputs) {
        return normed(*p->pack, codes, scale, zp, Norm(residual, weight, bias, eps, kind, outputs));
      })
      .def("bytes", [](const RowLinearPack& p) { return p->pack->bytes(); })
      .def("blobs", [](const RowLinearPack& p) {
        std::vector<at::Tensor> found;
        for (const runtime::Table& blob : p->pack->blobs()) found.push_back(runtime::tensor_of(blob, {blob.count}));
        return found;
      });
  m.def("pack_row_linear(Tensor weight, Tensor scale, Tensor? bias, str? activation, Tensor? known=None) -> " ROW_PACK,
        pack_row_linear);
  m.def("pack_gated_rows(Tensor gate, Tensor gate_scale, Tensor? gate_bias, Tensor up, Tensor up_scale, "
        "Tensor? up_bias, str activation, Tensor? known=None, Tensor? known_up=None) -> " ROW_PACK, pack_gated_rows);
  m.def("native_quantize_rows(Tensor x) -> " CODES, native_quantize_rows);
  m.def("native_norm_rows(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, str kind, "
        "int outputs) -> " FIVE, native_norm_rows);
}

}  // namespace
}  // namespace x86quant::dynamic

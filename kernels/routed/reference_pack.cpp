#include "reference_pack.h"

#include "packer.h"

#include <ATen/native/quantized/cpu/QuantUtils.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/quantized/Quantizer.h>

namespace x86quant {
namespace {

// Integer codes as doubles. Every product and sum below stays far under 2^53, so double
// arithmetic is exact integer arithmetic here.
at::Tensor codes(const at::Tensor& quantized) {
  return quantized.int_repr().to(at::kDouble);
}

at::Tensor centred_activation(const at::Tensor& qx) {
  return codes(qx) - static_cast<double>(qx.q_zero_point());
}

// Along which axis of the weight the output channels lie; per-tensor weights have none.
at::Tensor along(const at::Tensor& per_channel, int64_t axis, int64_t dim) {
  std::vector<int64_t> shape(dim, 1);
  shape[axis] = -1;
  return per_channel.to(at::kDouble).view(shape);
}

bool per_channel(const at::Tensor& weight) {
  return weight.qscheme() == at::kPerChannelAffine;
}

at::Tensor centred_weight(const at::Tensor& weight) {
  if (!per_channel(weight)) return codes(weight) - static_cast<double>(weight.q_zero_point());
  return codes(weight) -
         along(weight.q_per_channel_zero_points(), weight.q_per_channel_axis(), weight.dim());
}

// One scale an output channel, shaped to multiply an output whose channels lie along `axis`.
// Transposed convolutions hold the scales of one group, which every group shares.
at::Tensor weight_scale(const at::Tensor& weight, int64_t axis, const at::Tensor& output) {
  if (!per_channel(weight)) return at::scalar_tensor(weight.q_scale(), at::kDouble);
  const at::Tensor scales = weight.q_per_channel_scales();
  const int64_t groups = scales.numel() ? output.size(axis) / scales.numel() : 1;
  return along(scales.repeat({groups}), axis, output.dim());
}

at::Tensor real(const at::Tensor& accumulator, double x_scale, const at::Tensor& weight,
                const std::optional<at::Tensor>& bias, int64_t axis) {
  at::Tensor out = accumulator * (weight_scale(weight, axis, accumulator) * x_scale);
  if (bias.has_value() && bias->defined()) out = out + along(*bias, axis, out.dim());
  return out.to(at::kFloat);
}

at::Tensor requantize(const at::Tensor& real_values, double scale, int64_t zero_point,
                      bool relu) {
  return at::quantize_per_tensor(relu ? real_values.relu() : real_values, scale, zero_point,
                                 at::kQUInt8);
}

at::Tensor quantize_dynamically(const at::Tensor& x, bool reduce_range) {
  if (x.numel() == 0) return at::quantize_per_tensor(x, 1.0, 0, at::kQUInt8);
  const auto q = quant_utils::ChooseQuantizationParams(
      x.min().item<float>(), x.max().item<float>(), 0, 255, false, false, reduce_range);
  return at::quantize_per_tensor(x.contiguous(), q.scale, q.zero_point, at::kQUInt8);
}

struct ReferenceLinear final : LinearPackedParamsBase {
  ReferenceLinear(at::Tensor weight, std::optional<at::Tensor> bias)
      : weight_(std::move(weight)), bias_(std::move(bias)) {}

  at::Tensor apply(at::Tensor x, double scale, int64_t zero_point) override {
    return requantize(real_linear(x, weight_, bias_), scale, zero_point, false);
  }
  at::Tensor apply_relu(at::Tensor x, double scale, int64_t zero_point) override {
    return requantize(real_linear(x, weight_, bias_), scale, zero_point, true);
  }
  at::Tensor apply_dynamic(at::Tensor x, bool reduce_range) override {
    return real_linear(quantize_dynamically(x, reduce_range), weight_, bias_);
  }
  at::Tensor apply_dynamic_relu(at::Tensor x, bool reduce_range) override {
    return apply_dynamic(std::move(x), reduce_range).relu();
  }
  std::tuple<at::Tensor, std::optional<at::Tensor>> unpack() override { return {weight_, bias_}; }
  std::optional<at::Tensor> bias() override { return bias_; }
  void set_bias(std::optional<at::Tensor> bias) override { bias_ = std::move(bias); }

 private:
  at::Tensor weight_;
  std::optional<at::Tensor> bias_;
};

template <int N>
struct ReferenceConv final : GeometryOf<N> {
  using GeometryOf<N>::geometry_;

  ReferenceConv(at::Tensor weight, std::optional<at::Tensor> bias, ConvGeometry geometry)
      : GeometryOf<N>(std::move(geometry)), weight_(std::move(weight)), bias_(std::move(bias)) {}

  at::Tensor apply(const at::Tensor& x, double scale, int64_t zero_point) override {
    return requantize(run(x), scale, zero_point, false);
  }
  at::Tensor apply_relu(const at::Tensor& x, double scale, int64_t zero_point) override {
    return requantize(run(x), scale, zero_point, true);
  }
  at::Tensor apply_dynamic(const at::Tensor& x, bool reduce_range) override {
    return run(quantize_dynamically(x, reduce_range));
  }
  std::tuple<at::Tensor, std::optional<at::Tensor>> unpack() override { return {weight_, bias_}; }

 private:
  at::Tensor run(const at::Tensor& x) const { return real_conv<N>(x, weight_, bias_, geometry_); }

  at::Tensor weight_;
  std::optional<at::Tensor> bias_;
};

}  // namespace

at::Tensor real_linear(const at::Tensor& qx, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias) {
  const at::Tensor acc = at::linear(centred_activation(qx), centred_weight(weight));
  return real(acc, qx.q_scale(), weight, bias, acc.dim() - 1);
}

template <int N>
at::Tensor real_conv(const at::Tensor& qx, const at::Tensor& weight,
                     const std::optional<at::Tensor>& bias, const ConvGeometry& g) {
  const at::Tensor acc =
      at::convolution(centred_activation(qx).contiguous(), centred_weight(weight).contiguous(), {},
                      g.stride, g.padding, g.dilation, g.transposed,
                      g.transposed ? g.output_padding : std::vector<int64_t>(N, 0), g.groups);
  return real(acc, qx.q_scale(), weight, bias, 1);
}

LinearPack reference_linear(const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return c10::make_intrusive<ReferenceLinear>(weight, bias);
}

template <int N>
ConvPack<N> reference_conv(const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                           const ConvGeometry& geometry) {
  return c10::make_intrusive<ReferenceConv<N>>(weight, bias, geometry);
}

template at::Tensor real_conv<2>(const at::Tensor&, const at::Tensor&,
                                 const std::optional<at::Tensor>&, const ConvGeometry&);
template at::Tensor real_conv<3>(const at::Tensor&, const at::Tensor&,
                                 const std::optional<at::Tensor>&, const ConvGeometry&);
template ConvPack<2> reference_conv<2>(const at::Tensor&, const std::optional<at::Tensor>&,
                                       const ConvGeometry&);
template ConvPack<3> reference_conv<3>(const at::Tensor&, const std::optional<at::Tensor>&,
                                       const ConvGeometry&);

namespace {

const RegisterPacker reference("reference",
                               {reference_linear, reference_conv<2>, reference_conv<3>});

}  // namespace
}  // namespace x86quant

#include "routed_pack.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_make_per_tensor_quantized_tensor.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/quantized/Quantizer.h>

#include <cmath>
#include <limits>

#include "packer.h"
#include "reference_pack.h"

namespace x86quant {
namespace {

constexpr size_t kMostPacks = 16;

template <class Make>
const Make& able(const Make& make, const std::string& packer) {
  TORCH_CHECK_VALUE(make, "x86quant: \"", packer, "\" packs no weights of this kind");
  return make;
}

LinearPack make_linear(const std::string& name, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias) {
  return able(packer(name).linear, name)(weight, bias);
}

template <int N>
ConvPack<N> make_conv(const std::string& name, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, const ConvGeometry& geometry) {
  if constexpr (N == 2) return able(packer(name).conv2d, name)(weight, bias, geometry);
  else return able(packer(name).conv3d, name)(weight, bias, geometry);
}

bool is_dynamic(Variant variant) {
  return variant == Variant::kDynamic || variant == Variant::kDynamicRelu;
}

Call call_with(const at::Tensor& x, Variant variant, double bias_reach, int64_t activation_max) {
  Call call;
  call.dynamic = is_dynamic(variant);
  if (!x.is_quantized()) return call;
  call.wide_bias = bias_reach >= x.q_scale() * 2147483648.0;
  // Padding is filled with the zero point, so it must keep to the 7 bits promised, too.
  call.wide_zero_point = x.q_zero_point() > activation_max;
  return call;
}

// What of a run decides which pack serves it.
Slot slot_for(const std::string& name, Variant variant, const at::Tensor& x, double y_scale) {
  switch (packer(name).keyed_by) {
    case KeyedBy::kNothing:
      return {name};
    case KeyedBy::kQuantization:
      if (x.is_quantized()) return {name, variant, x.q_scale(), y_scale, x.q_zero_point()};
      [[fallthrough]];
    case KeyedBy::kVariant:
      return {name, variant};
  }
  return {name, variant};
}

// The pack in `slot`, made on first use from whatever pack exists already, so that only layers
// really used in several ways pay for several packs.
template <class Packs, class Make>
auto find_or_make(Packs& packs, at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  const Slot& slot, Make make) {
  auto found = packs.find(slot);
  if (found == packs.end()) {
    const at::Tensor source =
        weight.defined() ? weight : std::get<0>(packs.begin()->second->unpack());
    // A layer has one set of quantization parameters; if a caller varies them, do not hoard.
    if (packs.size() >= kMostPacks) packs.clear();
    found = packs.emplace(slot, make(slot.packer, source, bias)).first;
    weight = packer(slot.packer).unpacks ? at::Tensor() : source;
  }
  return found->second;
}

// With 7-bit activations the observers keep codes within 0..127, but values beyond what they
// saw are clamped at 255 by the stock quantize op: clamp them where 7 bits promised.
at::Tensor clamp_codes(const at::Tensor& qx, int64_t activation_max) {
  if (activation_max >= 255 || qx.numel() == 0) return qx;
  // Such an input was never promised to keep to 7 bits; what runs then is exact with all 8.
  if (qx.q_zero_point() > activation_max) return qx;
  const at::Tensor codes = qx.int_repr();
  if (codes.max().item<int64_t>() <= activation_max) return qx;
  return at::_make_per_tensor_quantized_tensor(codes.clamp_max(activation_max), qx.q_scale(),
                                               qx.q_zero_point());
}

void check_output(const Routing& routing, double scale, int64_t zero_point) {
  TORCH_CHECK_VALUE(std::isfinite(scale) && scale > 0, "x86quant: ", routing.label,
                    ": the output scale is ", scale,
                    "; it must be finite and positive. Calibrate the model again with data free "
                    "of NaN and infinity.");
  TORCH_CHECK_VALUE(zero_point >= 0 && zero_point <= 255, "x86quant: ", routing.label,
                    ": the output zero point is ", zero_point, "; it must lie in 0..255.");
}

void check_type(const Routing& routing, const at::Tensor& x, at::ScalarType expected) {
  TORCH_CHECK_TYPE(x.scalar_type() == expected, "x86quant: ", routing.label,
                   ": the input has dtype ", x.scalar_type(), ", expected ", expected,
                   expected == at::kFloat
                       ? ". Convert it with x.float()."
                       : ". Quantize it with torch.quantize_per_tensor(x, scale, zero_point, "
                         "torch.quint8), or let prepare_fx/convert_fx insert that.");
}

}  // namespace

double bias_reach(const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (!bias.has_value() || !bias->defined() || bias->numel() == 0) return 0;
  at::Tensor scales = weight.qscheme() == at::kPerChannelAffine
                          ? weight.q_per_channel_scales().to(at::kDouble)
                          : at::scalar_tensor(weight.q_scale(), at::kDouble).view(1);
  // Transposed convolutions hold the scales of one group, which every group shares.
  scales = scales.repeat({bias->numel() / scales.numel()});
  return (bias->to(at::kDouble).abs() / scales).max().item<double>();
}

bool Situation::holds(const Call& call) const {
  switch (kind) {
    case Kind::kWidth:
      return low <= call.width && (high < 0 || call.width <= high) &&
             (call.width % step == 0) != apart;
    case Kind::kBias:
      return call.wide_bias;
    case Kind::kZeroPoint:
      return call.wide_zero_point;
    case Kind::kDynamic:
      return call.dynamic;
  }
  return false;
}

const std::string& Routing::packer_for(const Call& call) const {
  size_t chosen = 0;
  while (call.rows > max_rows[chosen] && chosen + 1 < max_rows.size()) ++chosen;
  // A detour comes behind what it starts from, so one look at each is enough.
  for (size_t i = 0; i < detours.size(); ++i)
    if (detours[i].origin == chosen && detours[i].situation.holds(call))
      chosen = max_rows.size() + i;
  return packers[chosen];
}

// ---- linear ----

RoutedLinear::RoutedLinear(at::Tensor weight, std::optional<at::Tensor> bias, Routing r)
    : routing(std::move(r)),
      weight_(std::move(weight)),
      bias_(std::move(bias)),
      in_features_(weight_.size(1)),
      bias_reach_(bias_reach(weight_, bias_)) {
  // With one kernel for all rows, pack now, so that what is wrong with the weight is said here.
  if (routing.max_rows.size() == 1)
    find_or_make(packs_, weight_, bias_, Slot{routing.packers[0]}, make_linear);
}

void RoutedLinear::check(const at::Tensor& x, at::ScalarType expected) const {
  check_type(routing, x, expected);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == in_features_, "x86quant: ", routing.label,
                    ": the input has shape ", x.sizes(), "; its last dimension must be ",
                    in_features_, ".");
}

LinearPack RoutedLinear::pack_for(const at::Tensor& x, Variant variant, double y_scale) {
  Call call = call_with(x, variant, bias_reach_, routing.activation_max);
  call.rows = in_features_ ? x.numel() / in_features_ : 0;
  const Slot slot = slot_for(routing.packer_for(call), variant, x, y_scale);
  std::lock_guard<std::mutex> guard(lock_);
  return find_or_make(packs_, weight_, bias_, slot, make_linear);
}

at::Tensor RoutedLinear::apply(at::Tensor x, double scale, int64_t zero_point) {
  check(x, at::kQUInt8);
  check_output(routing, scale, zero_point);
  auto pack = pack_for(x, Variant::kPlain, scale);
  return pack->apply(clamp_codes(x, routing.activation_max), scale, zero_point);
}

at::Tensor RoutedLinear::apply_relu(at::Tensor x, double scale, int64_t zero_point) {
  check(x, at::kQUInt8);
  check_output(routing, scale, zero_point);
  auto pack = pack_for(x, Variant::kRelu, scale);
  return pack->apply_relu(clamp_codes(x, routing.activation_max), scale, zero_point);
}

at::Tensor& RoutedLinear::apply_out(const at::Tensor& x, double scale, int64_t zero_point,
                                    at::Tensor& out) {
  return out.copy_(apply(x, scale, zero_point));
}

at::Tensor& RoutedLinear::apply_relu_out(const at::Tensor& x, double scale, int64_t zero_point,
                                         at::Tensor& out) {
  return out.copy_(apply_relu(x, scale, zero_point));
}

at::Tensor RoutedLinear::apply_with_input_q_dq_qweight_dq_output_fp32(at::Tensor x, double scale,
                                                                      int64_t zero_point) {
  check(x, at::kFloat);
  const at::Tensor qx = clamp_codes(at::quantize_per_tensor(x, scale, zero_point, at::kQUInt8),
                                    routing.activation_max);
  auto [weight, bias] = unpack();
  return real_linear(qx, weight, bias);
}

at::Tensor RoutedLinear::apply_with_input_q_dq_qweight_dq_relu_output_fp32(at::Tensor x,
                                                                           double scale,
                                                                           int64_t zero_point) {
  return apply_with_input_q_dq_qweight_dq_output_fp32(std::move(x), scale, zero_point).relu_();
}

// Callers ask for 7 bits (`reduce_range`) on every CPU, because stock kernels may saturate.
// The router only lets a kernel through that is exact with `activation_max`, so 8 bits are used
// wherever that is 255.
at::Tensor RoutedLinear::apply_dynamic(at::Tensor x, bool /*reduce_range*/) {
  check(x, at::kFloat);
  return pack_for(x, Variant::kDynamic)->apply_dynamic(x, routing.activation_max < 255);
}

at::Tensor RoutedLinear::apply_dynamic_relu(at::Tensor x, bool /*reduce_range*/) {
  check(x, at::kFloat);
  return pack_for(x, Variant::kDynamicRelu)->apply_dynamic_relu(x, routing.activation_max < 255);
}

std::tuple<at::Tensor, std::optional<at::Tensor>> RoutedLinear::unpack() {
  std::lock_guard<std::mutex> guard(lock_);
  if (weight_.defined()) return {weight_, bias_};
  return {std::get<0>(packs_.begin()->second->unpack()), bias_};
}

std::optional<at::Tensor> RoutedLinear::bias() { return bias_; }

void RoutedLinear::set_bias(std::optional<at::Tensor> bias) {
  std::lock_guard<std::mutex> guard(lock_);
  // Kernels fold the bias in different ways, so it is simplest and safest to pack again.
  if (!weight_.defined()) weight_ = std::get<0>(packs_.begin()->second->unpack());
  packs_.clear();
  bias_ = std::move(bias);
  bias_reach_ = bias_reach(weight_, bias_);
}

// ---- convolution ----

template <int N>
RoutedConv<N>::RoutedConv(at::Tensor weight, std::optional<at::Tensor> bias, ConvGeometry geometry,
                          Routing r)
    : GeometryOf<N>(std::move(geometry)),
      routing(std::move(r)),
      weight_(std::move(weight)),
      bias_(std::move(bias)),
      in_channels_(geometry_.transposed ? weight_.size(0) : weight_.size(1) * geometry_.groups),
      kernel_size_(weight_.sizes().slice(2).vec()),
      bias_reach_(bias_reach(weight_, bias_)) {
  // Pack now, so that what is wrong with the weight is said here.
  if (routing.max_rows.size() == 1) pack(Slot{routing.packers[0]});
}

template <int N>
ConvPack<N> RoutedConv<N>::pack(const Slot& slot) {
  return find_or_make(packs_, weight_, bias_, slot,
                      [&](const std::string& name, const at::Tensor& w, const auto& b) {
                        return make_conv<N>(name, w, b, geometry_);
                      });
}

template <int N>
void RoutedConv<N>::check(const at::Tensor& x, at::ScalarType expected) const {
  check_type(routing, x, expected);
  // conv1d runs as conv2d with height 1; its op adds that dimension.
  TORCH_CHECK_VALUE(x.dim() == N + 2, "x86quant: ", routing.label, ": the input has shape ",
                    x.sizes(), "; it must have ", N + 2,
                    " dimensions (batch, channels, then space).");
  TORCH_CHECK_VALUE(x.size(1) == in_channels_, "x86quant: ", routing.label,
                    ": the input has shape ", x.sizes(), "; it must have ", in_channels_,
                    " channels.");
}

template <int N>
Call RoutedConv<N>::call_with(const at::Tensor& x, Variant variant) const {
  Call call = x86quant::call_with(x, variant, bias_reach_, routing.activation_max);
  call.rows = x.size(0);
  for (int i = 0; i < N; ++i) {
    const int64_t reach = geometry_.dilation[i] * (kernel_size_[i] - 1) + 1;
    const int64_t in = x.size(i + 2), pad = 2 * geometry_.padding[i], s = geometry_.stride[i];
    call.width = geometry_.transposed ? (in - 1) * s - pad + reach + geometry_.output_padding[i]
                                      : (in + pad - reach) / s + 1;
    call.rows *= call.width;
  }
  return call;
}

template <int N>
ConvPack<N> RoutedConv<N>::pack_for(const at::Tensor& x, Variant variant, double y_scale) {
  const Slot slot = slot_for(routing.packer_for(call_with(x, variant)), variant, x, y_scale);
  std::lock_guard<std::mutex> guard(lock_);
  return pack(slot);
}

template <int N>
at::Tensor RoutedConv<N>::apply(const at::Tensor& x, double scale, int64_t zero_point) {
  check(x, at::kQUInt8);
  check_output(routing, scale, zero_point);
  return pack_for(x, Variant::kPlain, scale)
      ->apply(clamp_codes(x, routing.activation_max), scale, zero_point);
}

template <int N>
at::Tensor RoutedConv<N>::apply_relu(const at::Tensor& x, double scale, int64_t zero_point) {
  check(x, at::kQUInt8);
  check_output(routing, scale, zero_point);
  return pack_for(x, Variant::kRelu, scale)
      ->apply_relu(clamp_codes(x, routing.activation_max), scale, zero_point);
}

template <int N>
at::Tensor RoutedConv<N>::apply_dynamic(const at::Tensor& x, bool /*reduce_range*/) {
  check(x, at::kFloat);
  return pack_for(x, Variant::kDynamic)->apply_dynamic(x, routing.activation_max < 255);
}

template <int N>
std::tuple<at::Tensor, std::optional<at::Tensor>> RoutedConv<N>::unpack() {
  std::lock_guard<std::mutex> guard(lock_);
  if (weight_.defined()) return {weight_, bias_};
  return {std::get<0>(packs_.begin()->second->unpack()), bias_};
}

template class RoutedConv<2>;
template class RoutedConv<3>;

}  // namespace x86quant

#include "routed_pack.h"

#include <ATen/quantized/Quantizer.h>

#include <cmath>
#include <limits>

#include "native_pack.h"
#include "reference_pack.h"

namespace x86quant {
namespace {

constexpr size_t kMostPacks = 16;

LinearPack make_linear(const std::string& kernel, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias) {
  if (kernel == "reference") return reference_linear(weight, bias);
  return stock_linear(engine_named(kernel), weight, bias);
}

template <int N>
ConvPack<N> make_conv(const std::string& kernel, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, const ConvGeometry& geometry) {
  if (kernel == "reference") return reference_conv<N>(weight, bias, geometry);
  if (kernel == "native") return native_conv<N>(weight, bias, geometry);
  return stock_conv<N>(engine_named(kernel), weight, bias, geometry);
}

// What of a run decides which pack serves it.
Slot slot_for(const std::string& kernel, Variant variant, const at::Tensor& x, double y_scale,
              double bias_reach, int64_t activation_max) {
  // Padding is filled with the zero point, so it must keep to the 7 bits promised, too.
  if (x.is_quantized() && x.q_zero_point() > activation_max) return {"reference"};
  // These depend on neither the op variant nor the input, or see to that themselves.
  if (kernel == "fbgemm" || kernel == "reference" || kernel == "native") return {kernel};
  if (kernel != "qnnpack" || !x.is_quantized()) return {kernel, variant};
  if (bias_reach >= x.q_scale() * 2147483648.0) return {"reference"};
  return {kernel, variant, x.q_scale(), y_scale, x.q_zero_point()};
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
    found = packs.emplace(slot, make(slot.kernel, source, bias)).first;
    // QNNPACK cannot unpack a conv3d.
    weight = slot.kernel == "qnnpack" ? source : at::Tensor();
  }
  return found->second;
}

// With 7-bit activations the observers keep codes within 0..127, but values beyond what they
// saw are clamped at 255 by the stock quantize op: clamp them where 7 bits promised.
at::Tensor clamp_codes(const at::Tensor& qx, int64_t activation_max) {
  if (activation_max >= 255 || qx.numel() == 0) return qx;
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

const std::string& Routing::kernel_for(int64_t rows) const {
  for (const Segment& segment : segments)
    if (rows <= segment.max_rows) return segment.kernel;
  return segments.back().kernel;
}

// ---- linear ----

RoutedLinear::RoutedLinear(at::Tensor weight, std::optional<at::Tensor> bias, Routing r)
    : routing(std::move(r)),
      weight_(std::move(weight)),
      bias_(std::move(bias)),
      in_features_(weight_.size(1)),
      bias_reach_(bias_reach(weight_, bias_)) {
  // With one kernel for all rows, pack now, so that what is wrong with the weight is said here.
  if (routing.segments.size() == 1)
    find_or_make(packs_, weight_, bias_, Slot{routing.segments[0].kernel},
                 make_linear);
}

void RoutedLinear::check(const at::Tensor& x, at::ScalarType expected) const {
  check_type(routing, x, expected);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == in_features_, "x86quant: ", routing.label,
                    ": the input has shape ", x.sizes(), "; its last dimension must be ",
                    in_features_, ".");
}

LinearPack RoutedLinear::pack_for(const at::Tensor& x, Variant variant, double y_scale) {
  const int64_t rows = in_features_ ? x.numel() / in_features_ : 0;
  const Slot slot = slot_for(routing.kernel_for(rows), variant, x, y_scale, bias_reach_,
                             routing.activation_max);
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
  if (routing.segments.size() == 1)
    pack(Slot{routing.segments[0].kernel});
}

template <int N>
ConvPack<N> RoutedConv<N>::pack(const Slot& slot) {
  return find_or_make(packs_, weight_, bias_, slot,
                      [&](const std::string& kernel, const at::Tensor& w, const auto& b) {
                        return make_conv<N>(kernel, w, b, geometry_);
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
const std::string& RoutedConv<N>::kernel_for(const at::Tensor& x) const {
  // What a transposed convolution multiplies follows from its input; it has one kernel.
  if (geometry_.transposed) return routing.segments.back().kernel;
  int64_t rows = x.size(0), last = 1;
  for (int i = 0; i < N; ++i) {
    last = (x.size(i + 2) + 2 * geometry_.padding[i] -
            geometry_.dilation[i] * (kernel_size_[i] - 1) - 1) / geometry_.stride[i] + 1;
    rows *= last;
  }
  const bool odd = last == 1 || (kernel_size_[N - 1] == 1 && last % 16 == 0);
  return odd && !routing.odd_width_kernel.empty() ? routing.odd_width_kernel
                                                  : routing.kernel_for(rows);
}

template <int N>
ConvPack<N> RoutedConv<N>::pack_for(const at::Tensor& x, Variant variant, double y_scale) {
  const Slot slot = slot_for(kernel_for(x), variant, x, y_scale, bias_reach_,
                             routing.activation_max);
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

// The operators through which Python makes and inspects routed packs.
#include <ATen/TensorOperators.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <c10/util/Type.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <map>

#include "reference_pack.h"
#include "routed_pack.h"

namespace x86quant {
namespace {

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

std::string user_engine_name() { return lower(at::toString(user_engine())); }

Situation::Kind kind_named(const std::string& name) {
  static const std::map<std::string, Situation::Kind> kinds = {
      {"width", Situation::Kind::kWidth},
      {"bias", Situation::Kind::kBias},
      {"zero_point", Situation::Kind::kZeroPoint},
      {"dynamic", Situation::Kind::kDynamic}};
  const auto found = kinds.find(name);
  TORCH_CHECK_VALUE(found != kinds.end(), "x86quant: unknown situation \"", name, "\"");
  return found->second;
}

// Numbers of a detour: its origin, and the low, high, step and apart of its situation.
constexpr size_t kDetourNumbers = 5;

Routing routing(at::IntArrayRef max_rows, const c10::List<std::string>& packers,
                const c10::List<std::string>& situations, at::IntArrayRef detours,
                std::string record, std::string label, int64_t activation_max) {
  TORCH_CHECK_VALUE(!max_rows.empty() && packers.size() == max_rows.size() + situations.size() &&
                        detours.size() == kDetourNumbers * situations.size(),
                    "x86quant: one packer is needed for each of the row bounds and detours");
  Routing r;
  for (const int64_t rows : max_rows)
    r.max_rows.push_back(rows < 0 ? std::numeric_limits<int64_t>::max() : rows);
  for (size_t i = 0; i < situations.size(); ++i) {
    const auto numbers = detours.slice(kDetourNumbers * i, kDetourNumbers);
    const int64_t origin = numbers[0], low = numbers[1], high = numbers[2], step = numbers[3];
    TORCH_CHECK_VALUE(origin >= 0 && origin < static_cast<int64_t>(max_rows.size() + i) && step > 0,
                      "x86quant: a detour starts from a range or from a detour before it");
    r.detours.push_back({static_cast<size_t>(origin),
                         {kind_named(situations.get(i)), low, high, step, numbers[4] != 0}});
  }
  for (size_t i = 0; i < packers.size(); ++i) r.packers.push_back(packers.get(i));
  r.record = std::move(record);
  r.label = std::move(label);
  r.activation_max = activation_max;
  return r;
}

LinearPack pack_linear(at::Tensor weight, std::optional<at::Tensor> bias, at::IntArrayRef max_rows,
                       c10::List<std::string> packers, c10::List<std::string> situations,
                       at::IntArrayRef detours, std::string record, std::string label,
                       int64_t activation_max) {
  return c10::make_intrusive<RoutedLinear>(
      std::move(weight), std::move(bias),
      routing(max_rows, packers, situations, detours, std::move(record), std::move(label),
              activation_max));
}

template <int N>
ConvPack<N> pack_conv(at::Tensor weight, std::optional<at::Tensor> bias, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef output_padding,
                      at::IntArrayRef dilation, int64_t groups, bool transposed,
                      at::IntArrayRef max_rows, c10::List<std::string> packers,
                      c10::List<std::string> situations, at::IntArrayRef detours,
                      std::string record, std::string label, int64_t activation_max) {
  ConvGeometry geometry{stride.vec(), padding.vec(), output_padding.vec(), dilation.vec(),
                        groups, transposed};
  return c10::make_intrusive<RoutedConv<N>>(
      std::move(weight), std::move(bias), std::move(geometry),
      routing(max_rows, packers, situations, detours, std::move(record), std::move(label),
              activation_max));
}

// The record of a routed pack; for a stock pack the name of its class behind "stock:".
template <class Routed, class Base>
std::string record_of(const c10::intrusive_ptr<Base>& pack) {
  if (auto* routed = dynamic_cast<Routed*>(pack.get())) return routed->routing.record;
  return std::string("stock:") + c10::demangle(typeid(*pack).name());
}

template <class Routed, class Base>
void set_label(const c10::intrusive_ptr<Base>& pack, std::string label) {
  if (auto* routed = dynamic_cast<Routed*>(pack.get())) routed->routing.label = std::move(label);
}

template <class Routed, class Base>
Routed& as_routed(const c10::intrusive_ptr<Base>& pack, const char* op) {
  auto* routed = dynamic_cast<Routed*>(pack.get());
  TORCH_CHECK_VALUE(routed, "x86quant: ", op, " got weights packed by the stock engine as ",
                    c10::demangle(typeid(*pack).name()),
                    ", which it would read as something else. Pack them again: "
                    "x86quant.reroute(model).");
  return *routed;
}

// Fused ops that the stock library only has for oneDNN packs, and crashes or refuses elsewhere.

at::Tensor conv2d_add(const at::Tensor& qx, const at::Tensor& accumulator, ConvPack<2> pack,
                      double scale, int64_t zero_point, bool relu) {
  auto& routed = as_routed<RoutedConv<2>>(pack, "conv2d_add");
  auto [weight, bias] = routed.unpack();
  at::Tensor sum = real_conv<2>(qx, weight, bias, routed.geometry()) + accumulator.dequantize();
  return at::quantize_per_tensor(relu ? sum.relu_() : sum, scale, zero_point, at::kQUInt8);
}

at::Tensor linear_activation(const at::Tensor& qx, LinearPack pack, double scale,
                             int64_t zero_point, std::string activation, double slope) {
  auto& routed = as_routed<RoutedLinear>(pack, "linear with a fused activation");
  auto [weight, bias] = routed.unpack();
  at::Tensor y = real_linear(qx, weight, bias);
  y = activation == "tanh" ? y.tanh() : at::leaky_relu(y, slope);
  return at::quantize_per_tensor(y, scale, zero_point, at::kQUInt8);
}

#define LINEAR "__torch__.torch.classes.quantized.LinearPackedParamsBase"
#define CONV2D "__torch__.torch.classes.quantized.Conv2dPackedParamsBase"
#define CONV3D "__torch__.torch.classes.quantized.Conv3dPackedParamsBase"
#define ROUTING                                                                                 \
  "int[] max_rows, str[] packers, str[] situations, int[] detours, str record, str label, int " \
  "activation_max"
#define CONV_ARGS                                                                             \
  "(Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] output_padding, int[] "   \
  "dilation, int groups, bool transposed, " ROUTING ") -> "

TORCH_LIBRARY_FRAGMENT(x86quant, m) {
  m.def("user_engine() -> str", user_engine_name);
  m.def("pack_linear(Tensor weight, Tensor? bias, " ROUTING ") -> " LINEAR, pack_linear);
  m.def("pack_conv2d" CONV_ARGS CONV2D, pack_conv<2>);
  m.def("pack_conv3d" CONV_ARGS CONV3D, pack_conv<3>);
  m.def("linear_record(" LINEAR " pack) -> str", record_of<RoutedLinear, LinearPackedParamsBase>);
  m.def("conv2d_record(" CONV2D " pack) -> str", record_of<RoutedConv<2>, ConvPackedParamsBase<2>>);
  m.def("conv3d_record(" CONV3D " pack) -> str", record_of<RoutedConv<3>, ConvPackedParamsBase<3>>);
  m.def("linear_set_label(" LINEAR " pack, str label) -> ()",
        set_label<RoutedLinear, LinearPackedParamsBase>);
  m.def("conv2d_set_label(" CONV2D " pack, str label) -> ()",
        set_label<RoutedConv<2>, ConvPackedParamsBase<2>>);
  m.def("conv3d_set_label(" CONV3D " pack, str label) -> ()",
        set_label<RoutedConv<3>, ConvPackedParamsBase<3>>);
  m.def("conv2d_add(Tensor qx, Tensor accumulator, " CONV2D " pack, float scale, int zero_point, "
        "bool relu) -> Tensor", conv2d_add);
  m.def("linear_activation(Tensor qx, " LINEAR " pack, float scale, int zero_point, str activation, "
        "float slope) -> Tensor", linear_activation);
}

}  // namespace
}  // namespace x86quant

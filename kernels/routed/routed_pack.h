// Packed weights that run on the kernels the router chose.
//
// A routed pack *is* a stock packed-params object, so every stock op, module, serializer and
// scripted graph takes it. Behind it stand one or more stock packs, one for each kernel and op
// variant that has been used.
#pragma once

#include "stock.h"

#include <map>
#include <mutex>
#include <tuple>

namespace x86quant {

// What one op does before and after the product.
enum class Variant { kPlain, kRelu, kDynamic, kDynamicRelu, kFloatInOut, kFloatInOutRelu };

// What a call shows that was not known when the weights were packed.
struct Call {
  int64_t rows = 0;   // of the matrix product; for a convolution output positions of the whole batch
  int64_t width = 0;  // of the output of a convolution
  bool wide_bias = false;
  bool wide_zero_point = false;
  bool dynamic = false;
};

// As x86quant.kernels.base.Situation: in which calls a detour is taken.
struct Situation {
  enum class Kind { kWidth, kBias, kZeroPoint, kDynamic } kind;
  int64_t low, high, step;  // high below 0: no bound
  bool apart;

  bool holds(const Call& call) const;
};

// As x86quant.routing.routes.Detour: `origin` counts the ranges of rows, then the detours.
struct Detour {
  size_t origin;
  Situation situation;
};

// As x86quant.routing.routes.Routes.
struct Routing {
  // The most rows for which each range is used, ascending; the last has no bound.
  std::vector<int64_t> max_rows;
  std::vector<Detour> detours;
  // What packs the weights (see Packer) of each range, then of each detour.
  std::vector<std::string> packers;
  // How the choice came about, as JSON; opaque here, read by explain().
  std::string record;
  // A short description for error messages: layer name when known, shape, kernel.
  std::string label;
  // 255, or 127 where the kernel is only exact with 7-bit activations.
  int64_t activation_max = 255;

  const std::string& packer_for(const Call& call) const;
};

// Which of a layer's stock packs serves an input. What its packer is not keyed by stays as it is
// here.
struct Slot {
  std::string packer;
  Variant variant = Variant::kPlain;
  double x_scale = 0, y_scale = 0;
  int64_t x_zero_point = 0;
  bool operator<(const Slot& other) const {
    return std::tie(packer, variant, x_scale, y_scale, x_zero_point) <
           std::tie(other.packer, other.variant, other.x_scale, other.y_scale, other.x_zero_point);
  }
};

// QNNPACK rounds the bias to int32 in units of x_scale * w_scale. This is the largest bias in
// units of w_scale; over x_scale it must stay below 2^31.
double bias_reach(const at::Tensor& weight, const std::optional<at::Tensor>& bias);

class RoutedLinear final : public LinearPackedParamsBase {
 public:
  RoutedLinear(at::Tensor weight, std::optional<at::Tensor> bias, Routing routing);

  at::Tensor apply(at::Tensor x, double scale, int64_t zero_point) override;
  at::Tensor apply_relu(at::Tensor x, double scale, int64_t zero_point) override;
  at::Tensor& apply_out(const at::Tensor& x, double scale, int64_t zero_point,
                        at::Tensor& out) override;
  at::Tensor& apply_relu_out(const at::Tensor& x, double scale, int64_t zero_point,
                             at::Tensor& out) override;
  at::Tensor apply_with_input_q_dq_qweight_dq_output_fp32(at::Tensor x, double scale,
                                                          int64_t zero_point) override;
  at::Tensor apply_with_input_q_dq_qweight_dq_relu_output_fp32(at::Tensor x, double scale,
                                                               int64_t zero_point) override;
  at::Tensor apply_dynamic(at::Tensor x, bool reduce_range) override;
  at::Tensor apply_dynamic_relu(at::Tensor x, bool reduce_range) override;
  std::tuple<at::Tensor, std::optional<at::Tensor>> unpack() override;
  std::optional<at::Tensor> bias() override;
  void set_bias(std::optional<at::Tensor> bias) override;

  Routing routing;

 private:
  LinearPack pack_for(const at::Tensor& x, Variant variant, double y_scale = 0);
  void check(const at::Tensor& x, at::ScalarType expected) const;

  std::mutex lock_;
  // The plain weight is kept only until a pack exists that can be unpacked again.
  at::Tensor weight_;
  std::optional<at::Tensor> bias_;
  int64_t in_features_;
  double bias_reach_;
  std::map<Slot, LinearPack> packs_;
};

template <int N>
class RoutedConv final : public GeometryOf<N> {
 public:
  RoutedConv(at::Tensor weight, std::optional<at::Tensor> bias, ConvGeometry geometry,
             Routing routing);

  at::Tensor apply(const at::Tensor& x, double scale, int64_t zero_point) override;
  at::Tensor apply_relu(const at::Tensor& x, double scale, int64_t zero_point) override;
  at::Tensor apply_dynamic(const at::Tensor& x, bool reduce_range) override;
  std::tuple<at::Tensor, std::optional<at::Tensor>> unpack() override;

  Routing routing;
  const ConvGeometry& geometry() const { return geometry_; }

 private:
  using GeometryOf<N>::geometry_;
  ConvPack<N> pack_for(const at::Tensor& x, Variant variant, double y_scale = 0);
  ConvPack<N> pack(const Slot& slot);
  void check(const at::Tensor& x, at::ScalarType expected) const;
  Call call_with(const at::Tensor& x, Variant variant) const;

  std::mutex lock_;
  at::Tensor weight_;
  std::optional<at::Tensor> bias_;
  int64_t in_channels_;
  std::vector<int64_t> kernel_size_;
  double bias_reach_;
  std::map<Slot, ConvPack<N>> packs_;
};

}  // namespace x86quant

// Packing with a given stock engine, whatever engine the user has set.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/native/quantized/PackedParams.h>
#include <c10/core/QEngine.h>

#include <optional>
#include <string>

namespace x86quant {

using LinearPack = c10::intrusive_ptr<LinearPackedParamsBase>;
template <int N>
using ConvPack = c10::intrusive_ptr<ConvPackedParamsBase<N>>;

// Everything about a convolution but its weights.
struct ConvGeometry {
  std::vector<int64_t> stride, padding, output_padding, dilation;
  int64_t groups = 1;
  bool transposed = false;
};

// What every packed convolution of ours says of its geometry.
template <int N>
struct GeometryOf : ConvPackedParamsBase<N> {
  explicit GeometryOf(ConvGeometry geometry) : geometry_(std::move(geometry)) {}

  torch::List<int64_t> stride() const override { return list(geometry_.stride); }
  torch::List<int64_t> padding() const override { return list(geometry_.padding); }
  torch::List<int64_t> output_padding() const override { return list(geometry_.output_padding); }
  torch::List<int64_t> dilation() const override { return list(geometry_.dilation); }
  int64_t groups() const override { return geometry_.groups; }
  bool transpose() const override { return geometry_.transposed; }

 protected:
  ConvGeometry geometry_;

 private:
  static torch::List<int64_t> list(const std::vector<int64_t>& values) {
    return torch::List<int64_t>(c10::ArrayRef<int64_t>(values));
  }
};

// The engine the user has set. Packing switches the process-wide engine for a moment; this
// waits until no pack is being made, so it never reports the switched one.
at::QEngine user_engine();

at::QEngine engine_named(const std::string& name);

// One of the engines this torch was built with, or an error that lists them.
LinearPack stock_linear(at::QEngine engine, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

template <int N>
ConvPack<N> stock_conv(at::QEngine engine, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       const ConvGeometry& geometry);

}  // namespace x86quant

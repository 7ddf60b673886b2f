// The kernel "native" in the stock operators: static convolutions; one scale for all output channels or one for
// each; symmetric weights.

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_empty_affine_quantized.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/quantized/Quantizer.h>

#include <array>
#include <map>
#include <mutex>
#include <tuple>

#include "../native/native.h"
#include "../runtime/memory.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"
#include "packer.h"

namespace x86quant {
namespace {

template <int N>
std::array<int32_t, 3> three(const std::vector<int64_t>& values, int32_t missing) {
  std::array<int32_t, 3> result = {missing, missing, missing};
  for (int i = 0; i < N; ++i) result[3 - N + i] = static_cast<int32_t>(values[i]);
  return result;
}

// (in, out / groups, ...) of a transposed convolution as (out, in / groups, ...).
at::Tensor output_channels_first(const at::Tensor& codes, int64_t groups) {
  const at::Tensor grouped = codes.unflatten(0, {groups, codes.size(0) / groups});
  return grouped.transpose(1, 2).flatten(0, 1).contiguous();
}

template <int N>
struct NativeConv final : GeometryOf<N> {
  using GeometryOf<N>::geometry_;

  NativeConv(at::Tensor weight, std::optional<at::Tensor> bias, ConvGeometry geometry)
      : GeometryOf<N>(std::move(geometry)), weight_(std::move(weight)), bias_(std::move(bias)) {
    const at::Tensor codes = weight_.int_repr().contiguous();
    codes_ = geometry_.transposed ? output_channels_first(codes, geometry_.groups) : codes;
    const int64_t out = codes_.size(0);
    // A depthwise convolution with several outputs a channel runs as one with a single output,
    // on an input whose channels are repeated.
    multiplier_ = !geometry_.transposed && codes_.size(1) == 1 ? out / geometry_.groups : 1;
    conv_.in_channels = static_cast<int32_t>(codes_.size(1) * geometry_.groups * multiplier_);
    conv_.out_channels = static_cast<int32_t>(out);
    conv_.groups = static_cast<int32_t>(geometry_.groups * multiplier_);
    const auto put = [](const std::array<int32_t, 3>& from, int32_t* to) {
      std::copy(from.begin(), from.end(), to);
    };
    put(three<N>(codes_.sizes().slice(2).vec(), 1), conv_.kernel);
    put(three<N>(geometry_.stride, 1), conv_.stride);
    put(three<N>(geometry_.padding, 0), conv_.padding);
    put(three<N>(geometry_.dilation, 1), conv_.dilation);
    conv_.transposed = geometry_.transposed;
    isa_ = native_isa();
  }

  at::Tensor apply(const at::Tensor& x, double scale, int64_t zero_point) override {
    return run(x, scale, zero_point, false);
  }
  at::Tensor apply_relu(const at::Tensor& x, double scale, int64_t zero_point) override {
    return run(x, scale, zero_point, true);
  }
  at::Tensor apply_dynamic(const at::Tensor&, bool) override {
    TORCH_CHECK(false, "x86quant: the native kernel has no dynamic convolution; the router chooses "
                       "another for it");
  }
  std::tuple<at::Tensor, std::optional<at::Tensor>> unpack() override { return {weight_, bias_}; }

 private:
  // Everything that is folded into a packed weight.
  using Key = std::tuple<double, int64_t, double, int64_t, bool>;
  using Packed = std::shared_ptr<runtime::Buffer>;

  Packed pack(const Key& key) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = packed_.find(key);
    if (found != packed_.end()) return found->second;
    const auto [x_scale, x_zero_point, y_scale, y_zero_point, relu] = key;
    const int64_t out = conv_.out_channels;
    at::Tensor scales = weight_.qscheme() == at::kPerChannelAffine
                            ? weight_.q_per_channel_scales().to(at::kDouble)
                            : at::scalar_tensor(weight_.q_scale(), at::kDouble).view(1);
    if (scales.numel()) scales = scales.repeat({out / scales.numel()});
    const at::Tensor mult = (scales * (x_scale / y_scale)).to(at::kFloat).contiguous();
    at::Tensor bias;
    if (bias_.has_value() && bias_->defined())
      bias = (bias_->to(at::kDouble) / y_scale).to(at::kFloat).contiguous();
    xq_requant requant{};
    requant.mult = mult.const_data_ptr<float>();
    requant.bias = bias.defined() ? bias.const_data_ptr<float>() : nullptr;
    requant.in_zp = static_cast<int32_t>(x_zero_point);
    requant.out_zp = static_cast<int32_t>(y_zero_point);
    requant.lo = relu ? requant.out_zp : 0;
    requant.hi = 255;
    const size_t size = xq_conv_packed_size(&conv_, isa_);
    TORCH_CHECK(size > 0, "x86quant: the native kernel refuses this convolution");
    auto packed = std::make_shared<runtime::Buffer>(size);
    succeed(xq_conv_pack(&conv_, isa_, codes_.const_data_ptr<int8_t>(), &requant, packed->data()));
    // A layer has one set of quantization parameters; if a caller varies them, do not hoard.
    if (packed_.size() >= 4) packed_.clear();
    packed_.emplace(key, packed);
    return packed;
  }

  static at::MemoryFormat layout() {
    return N == 2 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
  }

  std::vector<int64_t> output_size(const at::Tensor& x) const {
    std::vector<int64_t> size = {x.size(0), conv_.out_channels};
    for (int i = 0; i < N; ++i) {
      const int64_t reach = geometry_.dilation[i] * (codes_.size(i + 2) - 1) + 1;
      const int64_t in = x.size(i + 2), pad = 2 * geometry_.padding[i], s = geometry_.stride[i];
      size.push_back(geometry_.transposed
                         ? (in - 1) * s - pad + reach + geometry_.output_padding[i]
                         : (in + pad - reach) / s + 1);
      TORCH_CHECK_VALUE(size.back() > 0, "x86quant: the input, of shape ", x.sizes(),
                        ", is smaller than the kernel");
    }
    return size;
  }

  static xq_tensor view(uint8_t* data, at::IntArrayRef size) {
    xq_tensor t{};
    t.data = data;
    t.n = size[0];
    t.c = size[1];
    t.d = N == 3 ? size[2] : 1;
    t.h = size[N];
    t.w = size[N + 1];
    t.stride_w = t.c;
    t.stride_h = t.w * t.stride_w;
    t.stride_d = t.h * t.stride_h;
    t.stride_n = t.d * t.stride_d;
    return t;
  }

  at::Tensor run(const at::Tensor& x, double scale, int64_t zero_point, bool relu) {
    const Packed packed = pack({x.q_scale(), x.q_zero_point(), scale, zero_point, relu});
    const at::Tensor in = widened(x.contiguous(layout()));
    const std::vector<int64_t> size = output_size(x);
    at::Tensor y = at::_empty_affine_quantized(
        size, at::device(at::kCPU).dtype(at::kQUInt8), scale, zero_point, layout());
    std::vector<int64_t> in_size = x.sizes().vec();
    in_size[1] *= multiplier_;
    xq_conv_call call{};
    call.packed = packed->data();
    call.in = view(static_cast<uint8_t*>(in.data_ptr()), in_size);
    call.out = view(static_cast<uint8_t*>(y.data_ptr()), size);
    call.threads = runtime::useful_threads(at::get_num_threads());
    succeed(xq_conv_check(&call));
    const size_t scratch = xq_conv_scratch(&call);
    runtime::split(xq_conv_items(&call), call.threads, [&](int64_t begin, int64_t end) {
      xq_conv_run(&call, begin, end, runtime::Scratch(scratch).data());
    });
    return y;
  }

  // The input as the native convolution reads it: channels last, repeated where several outputs
  // come from one channel.
  at::Tensor widened(const at::Tensor& x) const {
    if (multiplier_ == 1) return x;
    const int64_t channels = x.size(1), pixels = x.numel() / std::max<int64_t>(channels, 1);
    at::Tensor wide = at::empty({pixels * channels * multiplier_}, at::kByte);
    const auto* from = static_cast<const uint8_t*>(x.data_ptr());
    auto* to = wide.mutable_data_ptr<uint8_t>();
    if (multiplier_ == 2) {  // written so that the compiler makes vector code of it
      for (int64_t i = 0; i < pixels * channels; ++i) to[2 * i] = to[2 * i + 1] = from[i];
    } else {
      for (int64_t i = 0; i < pixels * channels; ++i)
        std::fill_n(to + i * multiplier_, multiplier_, from[i]);
    }
    return wide;
  }

  at::Tensor weight_, codes_;
  std::optional<at::Tensor> bias_;
  int64_t multiplier_;
  xq_conv conv_{};
  int isa_;
  std::mutex lock_;
  std::map<Key, Packed> packed_;
};

template <int N>
ConvPack<N> native_conv(const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                        const ConvGeometry& geometry) {
  return c10::make_intrusive<NativeConv<N>>(weight, bias, geometry);
}

const RegisterPacker native("native", {nullptr, native_conv<2>, native_conv<3>});

}  // namespace
}  // namespace x86quant

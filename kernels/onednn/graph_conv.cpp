// Convolutions and linears by oneDNN's primitives, through the ops that torch's own compiler calls.
//
// Scales are folded into one multiplier, as everywhere in the runtime: input and output scales are 1.
// The ops allocate their results, which are then clamped and copied to where the plan wants them.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>

#include <string_view>

#include "../runtime/torch_tables.h"
#include "../runtime/whole_tensors.h"

namespace x86quant::runtime {
namespace {

using Axes = c10::List<int64_t>;
using Scalars = c10::List<std::optional<at::Scalar>>;
using MaybeTensor = std::optional<at::Tensor>;
using MaybeType = std::optional<at::ScalarType>;
using MaybeText = std::optional<std::string_view>;

using PackConvOp = at::Tensor(at::Tensor, at::Tensor, double, int64_t, Axes, Axes, Axes, int64_t,
                              std::optional<Axes>);
using ConvOp = at::Tensor(at::Tensor, double, int64_t, at::Tensor, at::Tensor, at::Tensor, MaybeTensor,
                          Axes, Axes, Axes, int64_t, double, int64_t, MaybeType, std::string_view,
                          Scalars, MaybeText);
using PackLinearOp = at::Tensor(at::Tensor, std::optional<Axes>);
using LinearOp = at::Tensor(at::Tensor, double, int64_t, at::Tensor, at::Tensor, at::Tensor, MaybeTensor,
                            double, int64_t, MaybeType, std::string_view, Scalars, std::string_view);

template <class Op>
c10::TypedOperatorHandle<Op> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Op>();
}

class OnednnConv : public PackedConv {
 public:
  explicit OnednnConv(ConvDescription d)
      : PackedConv(d), d_(std::move(d)),
        finish_(d_.requant),
        weight_(weight_of(d_)),
        mult_(tensor_of(d_.mult, {d_.conv.out_channels})),
        zero_points_(at::zeros({d_.conv.out_channels}, at::kInt)) {
    if (d_.bias) bias_ = tensor_of(*d_.bias, {d_.conv.out_channels});
  }

  void check(const ConvCall& call) const override { check_conv_shapes("onednn", d_.conv, call); }

  void run(const ConvCall& call) const override {
    const at::AutoDispatchBelowADInplaceOrView below;  // plain memory: nothing to differentiate
    const int threads = threads_for(nanoseconds(call.out));
    xq_tensor in = call.in;
    std::optional<Scratch> gathered;
    if (!dense(in)) {
      in.data = gathered.emplace(size(in)).data();
      gather(call.in, in.data, threads);
    }
    const at::Tensor out = result(in);
    finish_.run(out.const_data_ptr<uint8_t>(), call.out, threads);
  }

  bool has_own_threads() const override { return true; }
  int64_t bytes() const override { return d_.weight.count; }

 protected:
  // Of a dense input, dense.
  virtual at::Tensor result(const xq_tensor& in) const = 0;

  ConvDescription d_;
  Finish finish_;
  at::Tensor weight_, mult_;
  MaybeTensor bias_;
  at::Tensor zero_points_;  // of the weights
};

// A kernel of one pixel: a product of matrices.
class Pointwise final : public OnednnConv {
 public:
  explicit Pointwise(ConvDescription d) : OnednnConv(std::move(d)) {
    static const auto pack = find<PackLinearOp>("onednn::qlinear_prepack");
    packed_ = pack.call(weight_.flatten(1), std::nullopt);
  }

 private:
  at::Tensor result(const xq_tensor& in) const override {
    static const auto multiply = find<LinearOp>("onednn::qlinear_pointwise");
    const at::Tensor rows = at::from_blob(in.data, {lines(in) * in.w, in.c}, at::kByte);
    return multiply.call(rows, 1.0, d_.requant.in_zp, packed_, mult_, zero_points_, bias_, 1.0,
                         d_.requant.out_zp, at::kByte, "none", Scalars(), "");
  }

  at::Tensor packed_;
};

class Convolution final : public OnednnConv {
 public:
  explicit Convolution(ConvDescription d) : OnednnConv(std::move(d)) {
    const xq_conv& c = d_.conv;
    // Frames of a volume are images, if no weight reaches from one to the next.
    first_ = c.kernel[0] > 1 || c.stride[0] > 1 || c.padding[0] > 0 ? 0 : 1;
    if (first_ == 1) weight_ = weight_.squeeze(2);
    static const auto pack = find<PackConvOp>("onednn::qconv_prepack");
    packed_ = pack.call(weight_, mult_, 1.0, d_.requant.in_zp, axes(c.stride), axes(c.padding),
                        axes(c.dilation), c.groups, std::nullopt);
  }

 private:
  Axes axes(const int32_t (&values)[3]) const {
    Axes list;
    for (int axis = first_; axis < 3; ++axis) list.push_back(values[axis]);
    return list;
  }

  at::Tensor result(const xq_tensor& in) const override {
    static const auto convolve = find<ConvOp>("onednn::qconv_pointwise");
    const xq_conv& c = d_.conv;
    const int64_t line = in.w * in.c, image = in.h * line;
    const at::Tensor x =
        first_ == 1
            ? at::from_blob(in.data, {in.n * in.d, in.c, in.h, in.w}, {image, 1, line, in.c}, at::kByte)
            : at::from_blob(in.data, {in.n, in.c, in.d, in.h, in.w},
                            {in.d * image, 1, image, line, in.c}, at::kByte);
    const at::Tensor out = convolve.call(
        x, 1.0, d_.requant.in_zp, packed_, mult_, zero_points_, bias_, axes(c.stride),
        axes(c.padding), axes(c.dilation), c.groups, 1.0, d_.requant.out_zp, at::kByte, "none", Scalars(), "");
    return out.contiguous(first_ == 1 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d);
  }

  at::Tensor packed_;
  int first_;  // axis
};

PackedConvPtr pack_onednn(ConvDescription d) {
  const xq_conv& c = d.conv;
  require(!c.transposed && !d.requant.residual && !d.requant.slopes,
          "onednn: neither transposed convolutions nor residuals, nor slopes");
  bool pointwise = c.groups == 1;
  for (int axis = 0; axis < 3; ++axis)
    pointwise = pointwise && c.kernel[axis] == 1 && c.stride[axis] == 1 && c.padding[axis] == 0;
  if (pointwise) return std::make_shared<Pointwise>(std::move(d));
  return std::make_shared<Convolution>(std::move(d));
}

const RegisterConvKernel onednn_conv("onednn", pack_onednn);

}  // namespace
}  // namespace x86quant::runtime

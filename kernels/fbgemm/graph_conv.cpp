// Convolutions and linears by FBGEMM, through its C++ API on plain memory.
//
// Scales are folded into one multiplier, as everywhere in the runtime: input and output scales are 1.
// FBGEMM picks its path (depthwise, group-wise, pointwise, im2col) from the shape alone.
#include <ATen/core/Tensor.h>
#include <fbgemm/Fbgemm.h>

#include "../runtime/torch_tables.h"
#include "../runtime/whole_tensors.h"

namespace x86quant::runtime {
namespace {

// Times any sum far less than a step, and still no overflow for a bias divided by it.
constexpr double kLeastMultiplier = 1e-30;

// The last `Dims` of three axes.
template <int Dims>
std::array<int, Dims> last(const int32_t (&axes)[3]) {
  std::array<int, Dims> values;
  for (int i = 0; i < Dims; ++i) values[i] = axes[3 - Dims + i];
  return values;
}

template <int Dims>
class FbgemmConv final : public PackedConv {
 public:
  explicit FbgemmConv(ConvDescription d)
      : PackedConv(d), d_(std::move(d)), finish_(d_.requant), packed_(parameters(1, sizes(1, 28, 28)), krsc()),
        zero_points_(static_cast<size_t>(d_.conv.out_channels), 0) {
    // Sums of the weights: what the input's zero point adds to each channel.
    sums_ = weight_of(d_).flatten(1).sum(1, /*keepdim=*/false, at::kInt).contiguous();
    // FBGEMM divides the bias by the multiplier, which is 0 where a weight scale is.
    mult_ = tensor_of(d_.mult, {d_.conv.out_channels}).clamp_min(kLeastMultiplier);
  }

  void check(const ConvCall& call) const override {
    check_conv_shapes("fbgemm", d_.conv, call);
    require(Dims == 3 || (call.in.d == 1 && call.out.d == 1),
            "fbgemm: a convolution packed for images got a volume");
  }

  void run(const ConvCall& call) const override {
    const xq_conv& c = d_.conv;
    const int64_t results = size(call.out);
    const int threads = threads_for(nanoseconds(call.out));
    std::optional<Scratch> gathered, dense_out;
    const uint8_t* in = call.in.data;
    if (!dense(call.in)) {
      gathered.emplace(size(call.in));
      gather(call.in, gathered->data(), threads);
      in = gathered->data();
    }
    const bool in_place = dense(call.out);
    uint8_t* out = in_place ? call.out.data : dense_out.emplace(results).data();
    const Scratch sums_memory(results * sizeof(int32_t));
    auto* sums = reinterpret_cast<int32_t*>(sums_memory.data());

    fbgemm::DoNothing<> nothing;
    const auto* mult = mult_.template const_data_ptr<float>();
    using Output = fbgemm::ReQuantizeOutput<false, fbgemm::QuantizationGranularity::OUT_CHANNEL, float>;
    Output output(nothing, mult, d_.requant.out_zp, d_.requant.in_zp, zero_points_.data(),
                  /*row_offsets=*/nullptr, sums_.template const_data_ptr<int32_t>(),
                  d_.requant.bias,
                  static_cast<uint32_t>(c.out_channels), c.groups, mult);
    const auto shape = parameters(static_cast<int>(call.in.n), sizes(call.in.d, call.in.h, call.in.w));
    split(threads, threads, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread)
        fbgemm::fbgemmConv(shape, in, packed_, out, sums, output, static_cast<int>(thread), threads);
    });
    if (!in_place || finish_.needed()) finish_.run(out, call.out, threads);
  }

  int64_t bytes() const override { return d_.weight.count; }

 private:
  static std::array<int, Dims> sizes(int64_t d, int64_t h, int64_t w) {
    return last<Dims>({static_cast<int32_t>(d), static_cast<int32_t>(h), static_cast<int32_t>(w)});
  }

  fbgemm::conv_param_t<Dims> parameters(int batch, std::array<int, Dims> in) const {
    const xq_conv& c = d_.conv;
    std::array<int, 2 * Dims> padding;
    for (int i = 0; i < 2 * Dims; ++i) padding[i] = last<Dims>(c.padding)[i % Dims];
    return {batch, c.in_channels, c.out_channels, in, c.groups, last<Dims>(c.kernel),
            last<Dims>(c.stride), padding, last<Dims>(c.dilation)};
  }

  // The weight with channels last; FBGEMM copies what it needs.
  const int8_t* krsc() {
    weight_ = weight_of(d_).permute({0, 2, 3, 4, 1}).contiguous();
    return weight_.template const_data_ptr<int8_t>();
  }

  ConvDescription d_;
  Finish finish_;
  at::Tensor weight_, mult_;  // made before the pack
  mutable fbgemm::PackWeightsForConv<Dims> packed_;  // only read; the API lacks a const
  std::vector<int32_t> zero_points_;  // of the weights
  at::Tensor sums_;
};

PackedConvPtr pack_fbgemm(ConvDescription d) {
  const xq_conv& c = d.conv;
  require(!c.transposed && !d.requant.residual && !d.requant.slopes,
          "fbgemm: neither transposed convolutions nor residuals, nor slopes");
  const bool deep = c.kernel[0] > 1 || c.stride[0] > 1 || c.padding[0] > 0;
  if (deep) return std::make_shared<FbgemmConv<3>>(std::move(d));
  return std::make_shared<FbgemmConv<2>>(std::move(d));
}

const RegisterConvKernel fbgemm_conv("fbgemm", pack_fbgemm);

}  // namespace
}  // namespace x86quant::runtime

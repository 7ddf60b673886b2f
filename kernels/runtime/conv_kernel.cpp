#include "conv_kernel.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "errors.h"
#include "native_cpu.h"

namespace x86quant::runtime {
namespace {

std::map<std::string, PackConv>& registered() {
  static std::map<std::string, PackConv> kernels;
  return kernels;
}

bool finite(const Table& floats) {
  return std::all_of(floats.as<float>(), floats.as<float>() + floats.count, [](float x) { return std::isfinite(x); });
}

int32_t small(int64_t value, const char* what) {
  require(value >= 0 && value <= std::numeric_limits<int32_t>::max(), "a convolution's ", what, " is ", value);
  return static_cast<int32_t>(value);
}

}  // namespace

RegisterConvKernel::RegisterConvKernel(const std::string& name, PackConv pack) {
  registered().emplace(name, std::move(pack));
}

PackedConvPtr pack_conv(const std::string& kernel, ConvDescription description) {
  const auto found = registered().find(kernel);
  require(found != registered().end(), "kernel \"", kernel, "\" is not built into the runtime");
  return found->second(std::move(description));
}

ConvDescription describe_conv(ConvFields f) {
  require((f.geometry.size() == 14 || f.geometry.size() == 15) && f.codes.size() == 6, "malformed convolution");
  require(f.sizes.size() == 5 && f.weight.type == Type::kChar, "weights are int8 of rank 5");
  ConvDescription d;
  xq_conv& c = d.conv;
  int64_t elements = 1;
  for (const int64_t size : f.sizes) {
    require(size > 0 && !__builtin_mul_overflow(elements, size, &elements), "a convolution's weight is malformed");
  }
  require(elements == f.weight.count, "a convolution's weight has ", f.weight.count, " elements, not ", elements);
  for (int i = 0; i < 3; ++i) {
    const auto entry = [&](int first) { return f.geometry[static_cast<size_t>(first + i)]; };
    c.kernel[i] = small(entry(0), "kernel");
    c.stride[i] = small(entry(3), "stride");
    c.padding[i] = small(entry(6), "padding");
    c.dilation[i] = small(entry(9), "dilation");
    require(c.kernel[i] == f.sizes[static_cast<size_t>(2 + i)], "a convolution's kernel is not that of its weight");
  }
  c.groups = small(f.geometry[12], "number of groups");
  c.transposed = f.geometry[13] != 0;
  if (f.geometry.size() > 14) c.pixels = small(f.geometry[14], "number of pixels");
  c.out_channels = small(f.sizes[0], "number of channels");
  d.in_each = small(f.sizes[1], "number of channels");
  c.in_channels = small(f.sizes[1] * c.groups, "number of channels");
  c.algo = XQ_ALGO_AUTO;
  require(f.mult.type == Type::kFloat && f.mult.count == c.out_channels, "one float multiplier an output channel");
  require(!f.bias || (f.bias->type == Type::kFloat && f.bias->count == c.out_channels),
          "one float bias an output channel");
  require(!f.lut || (f.lut->type == Type::kByte && f.lut->count == 256), "a table is 256 codes");
  require(!f.slopes || (f.slopes->type == Type::kFloat && f.slopes->count == c.out_channels),
          "one float slope an output channel");
  require(!f.slopes || finite(*f.slopes), "a slope of a convolution is not finite");
  require(finite(f.mult) && (!f.bias || finite(*f.bias)) && std::isfinite(static_cast<float>(f.res_mult)),
          "a multiplier or a bias of a convolution is not finite; look for NaN, infinity or vanishing output scales "
          "in the layer's weights, bias and quantization parameters");
  d.weight = std::move(f.weight);
  d.mult = std::move(f.mult);
  d.bias = std::move(f.bias);
  d.lut = std::move(f.lut);
  d.slopes = std::move(f.slopes);
  xq_requant& r = d.requant;
  r.mult = d.mult.as<float>();
  r.bias = d.bias ? d.bias->as<float>() : nullptr;
  r.lut = d.lut ? d.lut->as<uint8_t>() : nullptr;
  r.slopes = d.slopes ? d.slopes->as<float>() : nullptr;
  const auto code = [&](size_t i, const char* what) { return small(f.codes[i], what); };
  r.in_zp = code(0, "input's zero point");
  r.out_zp = code(1, "output's zero point");
  r.lo = code(2, "lower bound");
  r.hi = code(3, "upper bound");
  r.residual = f.codes[4] != 0;
  r.res_zp = code(5, "residual's zero point");
  r.res_mult = static_cast<float>(f.res_mult);
  return d;
}

double PackedConv::nanoseconds(const xq_tensor& out) const {
  const auto outputs = static_cast<double>(out.n * out.d * out.h * out.w * out.c);
  return product_nanoseconds(outputs * static_cast<double>(products_), outputs);
}

}  // namespace x86quant::runtime

// The runtime as torch sees it: classes `Program` and `PackedConv`, and the op that runs a program.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "conv_kernel.h"
#include "program.h"

namespace x86quant::runtime {
namespace {

using PackedConvPtr = c10::intrusive_ptr<PackedConv>;
using ProgramPtr = c10::intrusive_ptr<Program>;

void put(const std::vector<int64_t>& from, int32_t (&to)[3], const char* what) {
  TORCH_CHECK_VALUE(from.size() == 3, "x86quant: ", what, " has one entry a dimension, got ", from);
  for (int i = 0; i < 3; ++i) to[i] = static_cast<int32_t>(from[i]);
}

bool finite(const at::Tensor& floats) {
  const float* values = floats.const_data_ptr<float>();
  return std::all_of(values, values + floats.numel(), [](float x) { return std::isfinite(x); });
}

// geometry: kernel, stride, padding and dilation, three entries each, then groups and transposed.
// codes: in_zp, out_zp, lo, hi, residual, res_zp.
PackedConvPtr pack(const std::string& kernel, at::Tensor weight, at::Tensor mult,
                   std::optional<at::Tensor> bias, std::optional<at::Tensor> lut,
                   const std::vector<int64_t>& geometry, const std::vector<int64_t>& codes,
                   double res_mult) {
  TORCH_CHECK_VALUE(geometry.size() == 14 && codes.size() == 6, "x86quant: malformed convolution");
  TORCH_CHECK_VALUE(weight.dim() == 5 && weight.scalar_type() == at::kChar,
                    "x86quant: weights are int8 of rank 5");
  ConvDescription d;
  d.weight = weight.contiguous();
  d.mult = mult.contiguous();
  TORCH_CHECK_VALUE(mult.scalar_type() == at::kFloat && mult.numel() == weight.size(0),
                    "x86quant: one float multiplier an output channel");
  if (bias.has_value()) {
    d.bias = bias->contiguous();
    TORCH_CHECK_VALUE(bias->scalar_type() == at::kFloat && bias->numel() == weight.size(0),
                      "x86quant: one float bias an output channel");
  }
  if (lut.has_value()) {
    d.lut = lut->contiguous();
    TORCH_CHECK_VALUE(lut->scalar_type() == at::kByte && lut->numel() == 256,
                      "x86quant: a table is 256 codes");
  }
  TORCH_CHECK_VALUE(finite(d.mult) && (!d.bias || finite(*d.bias)) && std::isfinite(static_cast<float>(res_mult)),
                    "x86quant: a multiplier or a bias of a convolution is not finite; look for NaN, infinity or "
                    "vanishing output scales in the layer's weights, bias and quantization parameters");
  xq_conv& c = d.conv;
  const auto dims = [&](size_t first) {
    return std::vector<int64_t>(geometry.begin() + first, geometry.begin() + first + 3);
  };
  put(dims(0), c.kernel, "kernel");
  put(dims(3), c.stride, "stride");
  put(dims(6), c.padding, "padding");
  put(dims(9), c.dilation, "dilation");
  c.groups = static_cast<int32_t>(geometry[12]);
  c.transposed = static_cast<int32_t>(geometry[13]);
  c.out_channels = static_cast<int32_t>(weight.size(0));
  c.in_channels = static_cast<int32_t>(weight.size(1)) * c.groups;
  c.algo = XQ_ALGO_AUTO;
  xq_requant& r = d.requant;
  r.mult = d.mult.const_data_ptr<float>();
  r.bias = d.bias ? d.bias->const_data_ptr<float>() : nullptr;
  r.lut = d.lut ? d.lut->const_data_ptr<uint8_t>() : nullptr;
  r.in_zp = static_cast<int32_t>(codes[0]);
  r.out_zp = static_cast<int32_t>(codes[1]);
  r.lo = static_cast<int32_t>(codes[2]);
  r.hi = static_cast<int32_t>(codes[3]);
  r.residual = static_cast<int32_t>(codes[4]);
  r.res_zp = static_cast<int32_t>(codes[5]);
  r.res_mult = static_cast<float>(res_mult);
  return pack_conv(kernel, std::move(d));
}

std::vector<at::Tensor> run_program(const ProgramPtr& program, const std::vector<at::Tensor>& inputs) {
  return program->run(inputs);
}

// The times come as a tensor: thousands of numbers in Python's form would take longer than a step.
std::tuple<std::vector<at::Tensor>, at::Tensor> run_program_timed(
    const ProgramPtr& program, const std::vector<at::Tensor>& inputs) {
  std::vector<double> microseconds;
  std::vector<at::Tensor> outputs = program->run_timed(inputs, microseconds);
  at::Tensor times = at::empty({static_cast<int64_t>(microseconds.size())}, at::kDouble);
  std::copy(microseconds.begin(), microseconds.end(), times.mutable_data_ptr<double>());
  return {std::move(outputs), std::move(times)};
}

#define PROGRAM "__torch__.torch.classes.x86quant.Program program"

TORCH_LIBRARY_FRAGMENT(x86quant, m) {
  m.class_<PackedConv>("PackedConv").def("bytes", &PackedConv::bytes);
  m.class_<Program>("Program")
      .def(torch::init<int64_t, int64_t>())
      .def("add_output", &Program::add_output)
      .def("expect", &Program::expect)
      .def("handle", [](const ProgramPtr& p) { return ProgramHandles::of(p); })
      .def("repeat", &Program::repeat)
      .def("of_parts", &Program::of_parts);
  m.def("step_kinds() -> str[]", [] { return step_kinds(); });
  m.def("pack_graph_conv(str kernel, Tensor weight, Tensor mult, Tensor? bias, Tensor? lut, int[] "
        "geometry, int[] codes, float res_mult) -> __torch__.torch.classes.x86quant.PackedConv",
        [](std::string kernel, at::Tensor weight, at::Tensor mult, std::optional<at::Tensor> bias,
           std::optional<at::Tensor> lut, at::IntArrayRef geometry, at::IntArrayRef codes,
           double res_mult) {
          return pack(kernel, weight, mult, bias, lut, geometry.vec(), codes.vec(), res_mult);
        });
  m.def("run_program(" PROGRAM ", Tensor[] inputs) -> Tensor[]",
        [](ProgramPtr p, std::vector<at::Tensor> inputs) { return run_program(p, inputs); });
  m.def("run_program_timed(" PROGRAM ", Tensor[] inputs) -> (Tensor[], Tensor)",
        [](ProgramPtr p, std::vector<at::Tensor> inputs) { return run_program_timed(p, inputs); });
}

}  // namespace
}  // namespace x86quant::runtime

// The runtime as torch sees it: classes `Program` and `PackedConv`, and the op that runs a program.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "arenas.h"
#include "native_cpu.h"
#include "packed_cache.h"
#include "torch_program.h"
#include "torch_tables.h"
#include "weight_extremes.h"

namespace x86quant::runtime {
namespace {

using PackPtr = c10::intrusive_ptr<TorchPack>;
using ProgramPtr = c10::intrusive_ptr<TorchProgram>;

// As ConvFields has them.
PackPtr pack(const std::string& kernel, const at::Tensor& weight, const at::Tensor& mult,
             const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& lut,
             std::vector<int64_t> geometry, std::vector<int64_t> codes, double res_mult,
             const std::optional<at::Tensor>& packed) {
  ConvFields fields;
  fields.weight = table_of(weight);
  fields.sizes = weight.sizes().vec();
  fields.mult = table_of(mult);
  if (bias.has_value()) fields.bias = table_of(*bias);
  if (lut.has_value()) fields.lut = table_of(*lut);
  fields.geometry = std::move(geometry);
  fields.codes = std::move(codes);
  fields.res_mult = res_mult;
  ConvDescription description = describe_conv(std::move(fields));
  if (packed.has_value()) description.packed = table_of(*packed);
  return c10::make_intrusive<TorchPack>(pack_conv(kernel, std::move(description)));
}

// Nothing where the packed weights are not one stretch of memory.
std::optional<at::Tensor> blob(const PackPtr& pack) {
  const Table found = pack->pack->blob();
  if (found.count == 0) return std::nullopt;
  return tensor_of(found, {found.count});
}

CacheKey key_of(std::string model) {
  NativeCpu cpu = native_cpu();
  return {std::move(cpu.level), cpu.l1, cpu.l2, std::move(model)};
}

std::tuple<std::vector<at::Tensor>, std::string> read_cache(const std::string& path, std::string model) {
  std::string why;
  const auto found = read_packed(path, key_of(std::move(model)), &why);
  std::vector<at::Tensor> tensors;
  if (found)
    for (const Table& one : *found) tensors.push_back(tensor_of(one, {one.count}));
  return {std::move(tensors), std::move(why)};
}

bool write_cache(const std::string& path, std::string model, const std::vector<at::Tensor>& packed) {
  std::vector<Table> tables;
  for (const at::Tensor& one : packed) tables.push_back(table_of(one));
  return write_packed(path, key_of(std::move(model)), tables);
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

std::vector<int64_t> extremes(const at::Tensor& rows) {
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.scalar_type() == at::kChar && rows.is_contiguous(),
                    "x86quant: extremes are those of rows of int8");
  const WeightExtremes found = weight_extremes(rows.const_data_ptr<int8_t>(), rows.size(0), rows.size(1));
  std::vector<int64_t> ends;
  for (const SumRange& range : {found.neighbours, found.any_two, found.rows})
    ends.insert(ends.end(), {range.low, range.high});
  return ends;
}

#define PROGRAM "__torch__.torch.classes.x86quant.Program program"

TORCH_LIBRARY_FRAGMENT(x86quant, m) {
  m.class_<TorchPack>("PackedConv")
      .def("bytes", [](const PackPtr& p) { return p->pack->bytes(); })
      .def("blob", [](const PackPtr& p) { return blob(p); });
  m.class_<TorchProgram>("Program")
      .def(torch::init<int64_t, int64_t>())
      .def("add_output", [](const ProgramPtr& p, Words sizes, Words strides, std::string type) {
        p->steps->add_output({std::move(sizes), std::move(strides), std::move(type)});
      })
      .def("expect", [](const ProgramPtr& p, Words sizes, Words strides, std::string type) {
        p->steps->add_input({std::move(sizes), std::move(strides), std::move(type)});
      })
      .def("expect_any_size", [](const ProgramPtr& p, std::string type) {
        p->steps->add_input({{-1}, {1}, std::move(type)});
      })
      .def("handle", [](const ProgramPtr& p) { return ProgramHandles::of(p); })
      .def("keep", [](const ProgramPtr& p, const Words& bytes) { with_value_errors([&] { p->steps->keep(bytes); }); })
      .def("repeat", [](const ProgramPtr& p, int64_t times, const Words& bytes) {
        with_value_errors([&] { p->steps->repeat(times, bytes); });
      })
      .def("of_parts", [](const ProgramPtr& p, int64_t times) {
        return with_value_errors([&] { return c10::make_intrusive<TorchProgram>(p->steps->of_parts(times)); });
      })
      .def("check_reach", [](const ProgramPtr& p) { with_value_errors([&] { p->check_reach(); }); });
  m.def("set_native_cpu(str isa, int l1, int l2) -> str",
        [](std::string isa, int64_t l1, int64_t l2) { return set_native_cpu(isa, l1, l2); });
  m.def("weight_extremes(Tensor rows) -> int[]", [](at::Tensor rows) { return extremes(rows); });
  m.def("idle_arena_bytes() -> int", [] { return static_cast<int64_t>(idle_arena_bytes()); });
  m.def("step_kinds() -> str[]", [] { return step_kinds(); });
  m.def("pack_graph_conv(str kernel, Tensor weight, Tensor mult, Tensor? bias, Tensor? lut, int[] "
        "geometry, int[] codes, float res_mult, Tensor? packed=None) -> __torch__.torch.classes.x86quant.PackedConv",
        [](std::string kernel, at::Tensor weight, at::Tensor mult, std::optional<at::Tensor> bias,
           std::optional<at::Tensor> lut, at::IntArrayRef geometry, at::IntArrayRef codes,
           double res_mult, std::optional<at::Tensor> packed) {
          return pack(kernel, weight, mult, bias, lut, geometry.vec(), codes.vec(), res_mult, packed);
        });
  m.def("read_packed_cache(str path, str model) -> (Tensor[], str)",
        [](std::string path, std::string model) { return read_cache(path, std::move(model)); });
  m.def("write_packed_cache(str path, str model, Tensor[] packed) -> bool",
        [](std::string path, std::string model, std::vector<at::Tensor> packed) {
          return write_cache(path, std::move(model), packed);
        });
  m.def("run_program(" PROGRAM ", Tensor[] inputs) -> Tensor[]",
        [](ProgramPtr p, std::vector<at::Tensor> inputs) { return with_value_errors([&] { return run_program(p, inputs); }); });
  m.def("run_program_timed(" PROGRAM ", Tensor[] inputs) -> (Tensor[], Tensor)",
        [](ProgramPtr p, std::vector<at::Tensor> inputs) { return with_value_errors([&] { return run_program_timed(p, inputs); }); });
}

}  // namespace
}  // namespace x86quant::runtime

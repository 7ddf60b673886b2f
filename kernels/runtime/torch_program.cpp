#include "torch_program.h"

#include <ATen/ops/empty_strided.h>

#include <mutex>
#include <unordered_map>

#include "fork_lock.h"

namespace x86quant::runtime {
namespace {

struct Handles {
  std::mutex& lock = fork_lock<Handles>();
  std::unordered_map<int64_t, c10::weak_intrusive_ptr<TorchProgram>> programs;
  int64_t last = 0;
};

Handles& handles() {
  static auto* const all = new Handles;  // programs may outlive static objects
  return *all;
}

at::ScalarType type_of(const Layout& layout) {
  static const std::unordered_map<std::string, at::ScalarType> types = {
      {"bool", at::kBool},    {"uint8", at::kByte},        {"int8", at::kChar}, {"int16", at::kShort},
      {"float16", at::kHalf}, {"bfloat16", at::kBFloat16}, {"int32", at::kInt}, {"float32", at::kFloat},
      {"int64", at::kLong},   {"float64", at::kDouble},
  };
  const auto found = types.find(layout.type);
  TORCH_CHECK_VALUE(found != types.end(), "x86quant: a program takes no tensors of type ", layout.type);
  return found->second;
}

}  // namespace

int64_t ProgramHandles::of(const c10::intrusive_ptr<TorchProgram>& program) {
  const std::lock_guard<std::mutex> guard(handles().lock);
  if (!program->handle_) {
    program->handle_ = ++handles().last;
    handles().programs.emplace(program->handle_, c10::weak_intrusive_ptr<TorchProgram>(program));
  }
  return program->handle_;
}

c10::intrusive_ptr<TorchProgram> ProgramHandles::find(int64_t handle) {
  const std::lock_guard<std::mutex> guard(handles().lock);
  const auto found = handles().programs.find(handle);
  return found == handles().programs.end() ? c10::intrusive_ptr<TorchProgram>() : found->second.lock();
}

void ProgramHandles::forget(int64_t handle) {
  const std::lock_guard<std::mutex> guard(handles().lock);
  handles().programs.erase(handle);
}

TorchProgram::TorchProgram(int64_t arena_bytes, int64_t inputs)
    : steps(std::make_unique<Program>(arena_bytes)), inputs_(static_cast<size_t>(inputs)) {
  TORCH_CHECK_VALUE(inputs >= 0, "x86quant: negative sizes in a plan");
}

void TorchProgram::release_resources() {
  if (handle_) ProgramHandles::forget(handle_);
}

TorchProgram::TorchProgram(std::unique_ptr<Program> made) : steps(std::move(made)), inputs_(steps->inputs().size()) {
  check_reach();
}

void TorchProgram::check_reach() {
  steps->check_reach(Program::Inputs::kMayBeUpdated);
  updated_.clear();
  for (size_t i = 0; i < inputs_; ++i) updated_.push_back(steps->updates(i));
}

bool TorchProgram::takes(const std::vector<at::Tensor>& inputs) const {
  const std::vector<Layout>& expected = steps->inputs();
  if (inputs.size() != inputs_ || inputs_ != expected.size()) return false;
  for (size_t i = 0; i < inputs_; ++i) {
    const at::Tensor& x = inputs[i];
    const Layout& wanted = expected[i];
    if (!x.is_cpu() || x.layout() != at::kStrided || x.scalar_type() != type_of(wanted) || x.is_neg()) return false;
    const bool fits = wanted.is_open() ? x.dim() == 1 && x.is_contiguous()
                                       : x.sizes() == wanted.sizes && x.strides() == wanted.strides;
    if (!fits) return false;
  }
  return true;
}

std::vector<at::Tensor> TorchProgram::new_outputs() const {
  std::vector<at::Tensor> outputs;
  outputs.reserve(steps->outputs().size());
  for (const Layout& output : steps->outputs())
    outputs.push_back(at::empty_strided(output.sizes, output.strides, type_of(output)));
  return outputs;
}

TorchProgram::Operands TorchProgram::operands(const std::vector<at::Tensor>& inputs,
                                              const std::vector<at::Tensor>& outputs) const {
  TORCH_CHECK_VALUE(takes(inputs), "x86quant: the plan is for other inputs");
  TORCH_CHECK_VALUE(updated_.size() == inputs.size(), "x86quant: a program runs once check_reach has found it right");
  Operands found;
  Bases& bases = found.bases;
  bases.reserve(2 + inputs.size() + outputs.size());
  bases.push_back(nullptr);  // the arena
  for (size_t i = 0; i < inputs.size(); ++i)  // no step writes to the others: see Program::check_reach
    bases.push_back(updated_[i] ? static_cast<uint8_t*>(inputs[i].mutable_data_ptr())
                                : static_cast<uint8_t*>(const_cast<void*>(inputs[i].const_data_ptr())));
  for (const at::Tensor& y : outputs) bases.push_back(static_cast<uint8_t*>(y.mutable_data_ptr()));
  for (size_t i = 0; i < inputs.size(); ++i)
    if (steps->inputs()[i].is_open()) found.sizes.push_back(inputs[i].numel());
  if (!found.sizes.empty()) bases.push_back(reinterpret_cast<uint8_t*>(found.sizes.data()));
  return found;
}

std::vector<at::Tensor> TorchProgram::run(const std::vector<at::Tensor>& inputs) const {
  std::vector<at::Tensor> outputs = new_outputs();
  steps->run(operands(inputs, outputs).bases);
  return outputs;
}

std::vector<at::Tensor> TorchProgram::run_timed(const std::vector<at::Tensor>& inputs,
                                                std::vector<double>& microseconds) const {
  std::vector<at::Tensor> outputs = new_outputs();
  steps->run_timed(operands(inputs, outputs).bases, microseconds);
  return outputs;
}

}  // namespace x86quant::runtime

#include "program.h"

#include <ATen/ops/empty_strided.h>

#include <chrono>

#include "steps.h"

namespace x86quant::runtime {

class Program::Lease {
 public:
  explicit Lease(const Program& program) : program_(program) {
    std::lock_guard<std::mutex> guard(program_.lock_);
    if (program_.idle_.empty()) {
      buffer_ = Buffer(program_.arena_bytes_);
    } else {
      buffer_ = std::move(program_.idle_.back());
      program_.idle_.pop_back();
    }
  }
  ~Lease() {
    std::lock_guard<std::mutex> guard(program_.lock_);
    program_.idle_.push_back(std::move(buffer_));
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  uint8_t* data() const { return buffer_.data(); }

 private:
  const Program& program_;
  Buffer buffer_;
};

Program::Program(int64_t arena_bytes, int64_t inputs)
    : arena_bytes_(static_cast<size_t>(arena_bytes)), inputs_(static_cast<size_t>(inputs)) {
  TORCH_CHECK_VALUE(arena_bytes >= 0 && inputs >= 0, "x86quant: negative sizes in a plan");
}

Place Program::place(const Words& words) const {
  if (words.empty()) return {};
  TORCH_CHECK_VALUE(words.size() == 11, "x86quant: a tensor of a plan has 11 words");
  Place place;
  place.base = static_cast<int32_t>(words[0]);
  place.offset = words[1];
  xq_tensor& t = place.view;
  t.n = words[2], t.d = words[3], t.h = words[4], t.w = words[5], t.c = words[6];
  t.stride_n = words[7], t.stride_d = words[8], t.stride_h = words[9], t.stride_w = words[10];
  // Stands for the address that a run will fill in: checks look whether there is one.
  t.data = reinterpret_cast<uint8_t*>(uintptr_t{64});
  return place;
}

void Program::add_conv(c10::intrusive_ptr<PackedConv> conv, const Words& in, const Words& out,
                       const Words& residual) {
  steps_.push_back(conv_step(std::move(conv), place(in), place(out), place(residual)));
}

void Program::add_op(int64_t kind, const c10::Dict<std::string, Words>& tensors,
                     const c10::Dict<std::string, Words>& integers,
                     const c10::Dict<std::string, std::vector<double>>& reals,
                     const c10::Dict<std::string, at::Tensor>& tables) {
  const auto tensor = [&](const char* name) {
    return tensors.contains(name) ? place(tensors.at(name)) : Place{};
  };
  steps_.push_back(op_step(static_cast<int>(kind), tensor("a"), tensor("b"), tensor("out"), integers,
                           reals, tables));
}

void Program::add_copy(const Words& sizes, const Words& from, const Words& from_strides,
                       const Words& to, const Words& to_strides) {
  TORCH_CHECK_VALUE(from.size() == 2 && to.size() == 2 && sizes.size() == from_strides.size() &&
                        sizes.size() == to_strides.size(),
                    "x86quant: a copy of a plan is malformed");
  steps_.push_back(copy_step(StridedCopy(sizes, from_strides, to_strides), from[0], from[1], to[0], to[1]));
}

void Program::add_output(const Words& sizes, const Words& strides, bool is_float) {
  outputs_.push_back({sizes, strides, is_float ? at::kFloat : at::kByte});
}

std::vector<at::Tensor> Program::new_outputs() const {
  std::vector<at::Tensor> outputs;
  outputs.reserve(outputs_.size());
  for (const Output& output : outputs_)
    outputs.push_back(at::empty_strided(output.sizes, output.strides, output.dtype));
  return outputs;
}

Bases Program::bases(const std::vector<at::Tensor>& inputs,
                     const std::vector<at::Tensor>& outputs) const {
  TORCH_CHECK_VALUE(inputs.size() == inputs_, "x86quant: the plan takes ", inputs_, " inputs, got ",
                    inputs.size());
  Bases bases;
  bases.reserve(1 + inputs.size() + outputs.size());
  bases.push_back(nullptr);  // the arena
  for (const at::Tensor& x : inputs) bases.push_back(static_cast<uint8_t*>(x.data_ptr()));
  for (const at::Tensor& y : outputs) bases.push_back(static_cast<uint8_t*>(y.data_ptr()));
  return bases;
}

std::vector<at::Tensor> Program::run(const std::vector<at::Tensor>& inputs) const {
  std::vector<at::Tensor> outputs = new_outputs();
  Bases where = bases(inputs, outputs);
  const Lease arena(*this);
  where[0] = arena.data();
  for (const auto& step : steps_) step->run(where);
  return outputs;
}

std::vector<at::Tensor> Program::run_timed(const std::vector<at::Tensor>& inputs,
                                           std::vector<double>& microseconds) const {
  using Clock = std::chrono::steady_clock;
  std::vector<at::Tensor> outputs = new_outputs();
  Bases where = bases(inputs, outputs);
  const Lease arena(*this);
  where[0] = arena.data();
  auto before = Clock::now();
  for (const auto& step : steps_) {
    step->run(where);
    const auto after = Clock::now();
    microseconds.push_back(std::chrono::duration<double, std::micro>(after - before).count());
    before = after;
  }
  return outputs;
}

}  // namespace x86quant::runtime

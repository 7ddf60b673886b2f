// A program as torch holds it: run on tensors, found by a number.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <vector>

#include "errors.h"
#include "program.h"

namespace x86quant::runtime {

class TorchProgram : public torch::CustomClassHolder {
 public:
  TorchProgram(int64_t arena_bytes, int64_t inputs);
  explicit TorchProgram(std::unique_ptr<Program> made);

  const std::unique_ptr<Program> steps;

  // Throws unless the program keeps to its memory.
  void check_reach();
  // Whether the program is for inputs like these.
  bool takes(const std::vector<at::Tensor>& inputs) const;
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const;
  std::vector<at::Tensor> run_timed(const std::vector<at::Tensor>& inputs, std::vector<double>& microseconds) const;

  void release_resources() override;  // once nobody holds the program any more

 private:
  friend class ProgramHandles;

  // What a run works on: addresses, and the sizes that one of them is of.
  struct Operands {
    Bases bases;
    Words sizes;
  };
  Operands operands(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs) const;
  std::vector<at::Tensor> new_outputs() const;

  size_t inputs_;
  std::vector<bool> updated_;  // of each input whether a step updates it
  int64_t handle_ = 0;
};

// Numbers that stand for programs where torch's own objects cannot be passed.
class ProgramHandles {
 public:
  static int64_t of(const c10::intrusive_ptr<TorchProgram>& program);
  // Null when the number stands for no program, or for one that is gone.
  static c10::intrusive_ptr<TorchProgram> find(int64_t handle);
  static void forget(int64_t handle);
};

// What `body` returns; of a Refused, Python gets a ValueError.
template <class Body>
auto with_value_errors(const Body& body) {
  try {
    return body();
  } catch (const Refused& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

// What Python holds of packed weights.
struct TorchPack : torch::CustomClassHolder {
  explicit TorchPack(PackedConvPtr made) : pack(std::move(made)) {}
  PackedConvPtr pack;
};

}  // namespace x86quant::runtime

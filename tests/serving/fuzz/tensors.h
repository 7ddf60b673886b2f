// The tensors of a run, with memory of their very sizes.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "x86quant/runtime.h"

namespace x86quant::fuzz {

using Bytes = std::vector<uint8_t>;

struct Tensors {
  std::vector<x86quant_tensor> inputs, outputs;
  std::vector<Bytes> in, out;

  int run(const x86quant_program* program) {
    return x86quant_run(program, inputs.data(), inputs.size(), outputs.data(), outputs.size());
  }
};

// Of a plan; inputs depend on its number. Integers are small, fit for indices too.
inline Tensors tensors_of(const x86quant_program* program, size_t plan) {
  std::mt19937 random(static_cast<uint32_t>(plan));
  Tensors t;
  t.inputs.resize(x86quant_inputs(program));
  t.outputs.resize(x86quant_outputs(program));
  for (size_t i = 0; i < t.inputs.size(); ++i) {
    x86quant_input(program, plan, i, &t.inputs[i]);
    Bytes& bytes = t.in.emplace_back(t.inputs[i].bytes);
    if (t.inputs[i].type == X86QUANT_FLOAT32) {
      for (size_t at = 0; at + sizeof(float) <= bytes.size(); at += sizeof(float)) {
        const float value = static_cast<float>(random() % 2001) / 1000 - 1;
        std::memcpy(&bytes[at], &value, sizeof(value));
      }
    } else if (t.inputs[i].type == X86QUANT_INT64) {
      for (size_t at = 0; at < bytes.size(); at += sizeof(int64_t)) bytes[at] = static_cast<uint8_t>(random() % 16);
    }
    t.inputs[i].data = bytes.data();
  }
  for (size_t i = 0; i < t.outputs.size(); ++i) {
    x86quant_output(program, plan, i, &t.outputs[i]);
    t.outputs[i].data = t.out.emplace_back(t.outputs[i].bytes).data();
  }
  return t;
}

}  // namespace x86quant::fuzz

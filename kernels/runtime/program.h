// A planned segment of a graph: steps on an arena, run in one call without Python.
#pragma once

#include <torch/custom_class.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory.h"
#include "step.h"

namespace x86quant::runtime {

// Built step by step, then run any number of times, from any number of threads at a time.
class Program : public torch::CustomClassHolder {
 public:
  Program(int64_t arena_bytes, int64_t inputs);

  // The next step; see step.h.
  void add(const std::string& kind, const StepFields::Values& fields);
  // An output of this shape and these strides, in elements; the type by torch's name, such as "float32".
  void add_output(const Words& sizes, const Words& strides, const std::string& dtype);

  // The next input is of this shape and these strides, in elements.
  void expect(const Words& sizes, const Words& strides, const std::string& dtype);
  // Whether the program is for inputs like these.
  bool takes(const std::vector<at::Tensor>& inputs) const;
  // As many as torch had when the plan was made.
  int threads() const { return threads_; }

  // The steps are for one part of a batch: run them for each of `times` parts, side by side. From
  // one part to the next, inputs and outputs move on by so many bytes. Outputs are of whole batches.
  void repeat(int64_t times, const Words& input_bytes, const Words& output_bytes);
  // The same steps for another number of parts, each as large as here: they are shared, not copied.
  c10::intrusive_ptr<Program> of_parts(int64_t times) const;

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const;
  // The same; `microseconds` receives the time of every step. Of parts that run side by side it is
  // the sum over all parts divided by the number of threads.
  std::vector<at::Tensor> run_timed(const std::vector<at::Tensor>& inputs,
                                    std::vector<double>& microseconds) const;

  void release_resources() override;  // once nobody holds the program any more

 private:
  friend class ProgramHandles;

  struct Layout {
    Words sizes, strides;
    at::ScalarType dtype;
  };

  // An arena lent to one run.
  class Lease;

  Bases bases(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs) const;
  // Calls body(bases) for every part, on this thread or on several.
  template <class Body>
  void for_each_part(const Bases& bases, const Body& body) const;
  void run_steps(const Bases& bases) const;
  void run_steps_timed(const Bases& bases, std::vector<double>& microseconds) const;
  std::vector<at::Tensor> new_outputs() const;

  size_t arena_bytes_;
  size_t inputs_;
  std::vector<Layout> expected_;
  int threads_;
  int64_t parts_ = 1;
  Words advance_;  // of every base but the arena, from part to part
  std::vector<Layout> outputs_;
  std::vector<std::shared_ptr<const Step>> steps_;
  mutable std::mutex lock_;
  mutable std::vector<Buffer> idle_;  // arenas no run is using, at most one for each thread
  int64_t handle_ = 0;
};

// Numbers that stand for programs where torch's own objects cannot be passed.
class ProgramHandles {
 public:
  static int64_t of(const c10::intrusive_ptr<Program>& program);
  // Null when the number stands for no program, or for one that is gone.
  static c10::intrusive_ptr<Program> find(int64_t handle);
  static void forget(int64_t handle);
};

}  // namespace x86quant::runtime

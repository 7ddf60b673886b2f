// A planned segment of a graph: steps on an arena, run in one call on plain memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "arenas.h"
#include "memory.h"
#include "step.h"

namespace x86quant::runtime {

// An input or an output: its shape and strides, in elements, and its type by torch's name, such as "float32".
struct Layout {
  Words sizes, strides;
  std::string type;
  // Of an input of one dimension whose size differs from call to call: the size is -1. Steps find it behind the
  // outputs, among the int64 of all inputs like this.
  bool is_open() const { return sizes == Words{-1}; }
  int64_t element_size() const;
  // From the first byte to behind the last one.
  int64_t bytes() const;
};

// Built step by step, then run any number of times, from any number of threads at a time.
class Program {
 public:
  explicit Program(int64_t arena_bytes);

  // The next step; see step.h.
  void add(const std::string& kind, const StepFields::Values& fields);
  void add_input(Layout layout) { inputs_.push_back(std::move(layout)); }
  void add_output(Layout layout) { outputs_.push_back(std::move(layout)); }

  // The steps are for one part of a batch: run them for each of `times` parts, side by side. From
  // one part to the next, inputs and outputs move on by so many bytes. Outputs are of whole batches.
  void repeat(int64_t times, const Words& input_bytes, const Words& output_bytes);

  // The same steps for another number of parts, each as large as here: they are shared, not copied.
  std::unique_ptr<Program> of_parts(int64_t times) const;

  // Throws a Refused unless all that the steps read and write lies within the arena, the inputs and the outputs.
  void check_reach() const;

  const std::vector<Layout>& inputs() const { return inputs_; }
  const std::vector<Layout>& outputs() const { return outputs_; }
  // How many inputs are open.
  int64_t open_inputs() const;
  // As many as there were when the plan was made.
  int threads() const { return threads_; }

  // On the addresses of the inputs, then of the outputs, with nothing for the arena before them, and behind them that
  // of the sizes of inputs that are open, if there are any.
  void run(const Bases& bases) const;
  // The same; `microseconds` receives the time of every step. Of parts that run side by side it is
  // the sum over all parts divided by the number of threads.
  void run_timed(const Bases& bases, std::vector<double>& microseconds) const;

 private:
  // Throws a Refused unless a step that reads all of an open input looks at the size of that very one.
  void require_own_count(const Reach::Open& open) const;
  // Calls body(bases) for every part, on this thread or on several.
  template <class Body>
  void for_each_part(const Bases& bases, const Body& body) const;
  // Calls body(), its loops shared by threads that stay together where there is more than one.
  template <class Body>
  void together(const Body& body) const;
  void run_steps(const Bases& bases) const;
  void run_steps_timed(const Bases& bases, std::vector<double>& microseconds) const;

  int threads_;
  ArenaClaim arena_;
  int64_t parts_ = 1;
  Words advance_;  // of every base but the arena, from part to part
  std::vector<Layout> inputs_, outputs_;
  std::vector<std::shared_ptr<const Step>> steps_;
  int64_t shared_steps_ = 0, steps_with_own_threads_ = 0;
  Reach reach_;
};

}  // namespace x86quant::runtime

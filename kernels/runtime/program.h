// A planned segment of a graph: steps on an arena, run in one call on plain memory.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arenas.h"
#include "fences.h"
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
  explicit Program(int64_t arena_bytes, Owner owner = Owner::kProcess);

  // The next step; see step.h.
  void add(const std::string& kind, const StepFields::Values& fields);
  void add_input(Layout layout) { inputs_.push_back(std::move(layout)); }
  void add_output(Layout layout) { outputs_.push_back(std::move(layout)); }

  // Memory of so many bytes each for what one stage leaves to another, of whole batches. Steps find it behind the
  // outputs. Before the first step.
  void keep(const Words& bytes);

  // The steps since the last such call are a stage. They are for one part of a batch: run them for each of `times`
  // parts, side by side, before the next stage begins. From one part to the next, inputs, outputs and what is kept
  // move on by so many bytes. Outputs are of whole batches.
  void repeat(int64_t times, const Words& bytes);

  // The same steps for a batch of another size, whose first stage has so many parts, each as large as here: they are
  // shared, not copied.
  std::unique_ptr<Program> of_parts(int64_t times) const;

  // Throws a Refused unless all that the steps read and write lies within the arena, the inputs and the outputs, no input
  // is written to, but by a step that updates it where that is allowed, and every output is written. A program runs once
  // it is checked.
  enum class Inputs { kRead, kMayBeUpdated };
  void check_reach(Inputs inputs);
  // Whether a step updates input `index`.
  bool updates(size_t index) const;

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
  // Steps that run one after another for each part of a batch.
  struct Stage {
    std::vector<std::shared_ptr<const Step>> steps;
    int64_t shared_steps = 0, steps_with_own_threads = 0;
    Reach reach;
    Fences fences;
    int64_t parts = 1;
    Words advance;  // of every base but the arena, from part to part; none of a stage that is for whole batches
  };

  Stage& open_stage();
  // Throws a Refused unless all that the steps of `stage` read and write is there.
  void check_reach(const Stage& stage, Inputs inputs) const;
  void require_written_outputs() const;
  // Outputs of which no stage is known to write every byte before one is read.
  std::vector<size_t> unsure_outputs() const;
  void clear_unsure_outputs(const Bases& bases) const;
  int64_t bytes_of(size_t tensor) const;
  // Throws a Refused unless a step that reads all of an open input looks at the size of that very one.
  void require_own_count(const Reach::Open& open) const;
  // Calls body(bases) with what is kept behind `bases`.
  template <class Body>
  void with_kept(const Bases& bases, const Body& body) const;
  // Calls body(bases) for every part, on this thread or on several.
  template <class Body>
  void for_each_part(const Stage& stage, const Bases& bases, const Body& body) const;
  // Calls body(), its loops shared by threads that stay together where there is more than one.
  template <class Body>
  static void together(const Stage& stage, const Body& body);
  void run_steps(const Stage& stage, const Bases& bases) const;
  void run_steps_timed(const Stage& stage, const Bases& bases, double* microseconds) const;

  int threads_;
  ArenaClaim arena_;
  std::vector<Layout> inputs_, outputs_;
  Words kept_;
  std::optional<ArenaClaim> kept_claim_;
  std::vector<Stage> stages_;
  std::optional<Inputs> checked_;  // as what they were found right
  std::vector<size_t> unsure_;     // cleared before each run: nobody gets what lay there before
};

}  // namespace x86quant::runtime

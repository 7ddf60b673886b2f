#include "program.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>

#include "errors.h"
#include "parallel.h"

namespace x86quant::runtime {

int64_t Layout::element_size() const {
  static const std::map<std::string, int64_t> sizes = {
      {"bool", 1},  {"uint8", 1},   {"int8", 1},    {"int16", 2}, {"float16", 2}, {"bfloat16", 2},
      {"int32", 4}, {"float32", 4}, {"int64", 8},   {"float64", 8},
  };
  const auto found = sizes.find(type);
  require(found != sizes.end(), "a program takes no tensors of type ", type);
  return found->second;
}

int64_t Layout::bytes() const {
  Reach reach;
  Words in_bytes = strides;
  for (int64_t& stride : in_bytes)
    require(!__builtin_mul_overflow(stride, element_size(), &stride) && stride >= 0, "a plan has an impossible tensor");
  reach.add(0, 0, element_size(), sizes, in_bytes);
  return reach.ranges().at(0).last;
}

int64_t Program::open_inputs() const {
  return std::count_if(inputs_.begin(), inputs_.end(), [](const Layout& input) { return input.is_open(); });
}

Program::Program(int64_t arena_bytes)
    : threads_(all_threads()), arena_(static_cast<size_t>(std::max<int64_t>(arena_bytes, 0)), threads_) {
  require(arena_bytes >= 0, "negative sizes in a plan");
}

void Program::add(const std::string& kind, const StepFields::Values& fields) {
  steps_.push_back(make_step(kind, fields, reach_));
  shared_steps_ += steps_.back()->threads() == StepThreads::kShared;
  steps_with_own_threads_ += steps_.back()->threads() == StepThreads::kOwn;
}

void Program::repeat(int64_t times, const Words& input_bytes, const Words& output_bytes) {
  require(times >= 1 && input_bytes.size() == inputs_.size() && output_bytes.size() == outputs_.size(),
          "the parts of a plan are malformed");
  parts_ = times;
  advance_ = input_bytes;
  advance_.insert(advance_.end(), output_bytes.begin(), output_bytes.end());
}

std::unique_ptr<Program> Program::of_parts(int64_t times) const {
  require(times >= 1 && !advance_.empty(), "the plan is not one of parts");
  auto other = std::make_unique<Program>(static_cast<int64_t>(arena_.bytes()));
  const auto resized = [&](std::vector<Layout> layouts) {
    for (Layout& layout : layouts) layout.sizes[0] = layout.sizes[0] / parts_ * times;
    return layouts;
  };
  other->threads_ = threads_;
  other->parts_ = times;
  other->advance_ = advance_;
  other->inputs_ = resized(inputs_);
  other->outputs_ = resized(outputs_);
  other->steps_ = steps_;
  other->shared_steps_ = shared_steps_;
  other->steps_with_own_threads_ = steps_with_own_threads_;
  other->reach_ = reach_;
  other->check_reach();
  return other;
}

void Program::check_reach() const {
  const auto tensors = static_cast<int64_t>(inputs_.size() + outputs_.size());
  require(open_inputs() == 0 || advance_.empty(), "the parts of a plan are malformed");
  for (const Reach::Open& open : reach_.open()) require_own_count(open);
  for (const auto& [base, range] : reach_.ranges()) {
    require(base >= 0 && base <= tensors, "a step of a plan has no base ", base);
    int64_t size = static_cast<int64_t>(arena_.bytes()), last = range.last;
    if (base > 0) {
      const auto index = static_cast<size_t>(base - 1);
      const Layout& tensor = index < inputs_.size() ? inputs_[index] : outputs_[index - inputs_.size()];
      size = tensor.is_open() ? 0 : tensor.bytes();  // of an open one no element is sure
      int64_t moved = 0;
      const int64_t advance = advance_.empty() ? 0 : advance_[index];
      require(advance >= 0 && !__builtin_mul_overflow(advance, parts_ - 1, &moved) &&
                  !__builtin_add_overflow(last, moved, &last),
              "the parts of a plan are malformed");
    }
    require(range.first >= 0 && last <= size, "a step of a plan reaches bytes ", range.first, " to ", last, " of ", size);
  }
}

void Program::require_own_count(const Reach::Open& open) const {
  const auto inputs = static_cast<int64_t>(inputs_.size()), tensors = inputs + static_cast<int64_t>(outputs_.size());
  require(open.base >= 1 && open.base <= inputs, "a step of a plan has no input of any size at base ", open.base);
  const auto input = inputs_.begin() + (open.base - 1);
  require(input->is_open() && input->element_size() == open.element_size, "a step of a plan reads elements of ",
          open.element_size, " bytes, any number of them, from an input that is not like this");
  const auto before = std::count_if(inputs_.begin(), input, [](const Layout& x) { return x.is_open(); });
  require(open.count_base == tensors + 1 && open.count_offset == before * static_cast<int64_t>(sizeof(int64_t)),
          "a step of a plan takes the size of another input");
}

template <class Body>
void Program::for_each_part(const Bases& bases, const Body& body) const {
  std::atomic<int64_t> next{0};
  const int threads = useful_threads(parts_);
  // Each thread takes the next part when it is done with one, so that a slow one delays nobody.
  split(threads, threads, [&](int64_t, int64_t) {
    const ArenaLease arena(arena_);
    for (int64_t part; (part = next.fetch_add(1)) < parts_;) {
      Bases where = bases;
      where[0] = arena.data();
      for (size_t i = 0; part > 0 && i < advance_.size(); ++i) where[i + 1] += part * advance_[i];
      body(where);
    }
  });
}

template <class Body>
void Program::together(const Body& body) const {
  if (shared_steps_ < 2 || steps_with_own_threads_ > 0) return body();
  with_team([&](int) { body(); });
}

void Program::run_steps(const Bases& bases) const {
  together([&] {
    for (const auto& step : steps_) step->run(bases);
  });
}

void Program::run_steps_timed(const Bases& bases, std::vector<double>& microseconds) const {
  using Clock = std::chrono::steady_clock;
  together([&] {
    auto before = Clock::now();
    for (size_t i = 0; i < steps_.size(); ++i) {
      steps_[i]->run(bases);
      const auto after = Clock::now();
      microseconds[i] = std::chrono::duration<double, std::micro>(after - before).count();
      before = after;
    }
  });
}

void Program::run(const Bases& bases) const {
  for_each_part(bases, [&](const Bases& where) { run_steps(where); });
}

void Program::run_timed(const Bases& bases, std::vector<double>& microseconds) const {
  microseconds.assign(steps_.size(), 0.0);
  std::mutex guard;
  for_each_part(bases, [&](const Bases& where) {
    std::vector<double> part(steps_.size());
    run_steps_timed(where, part);
    const std::lock_guard<std::mutex> lock(guard);
    for (size_t i = 0; i < part.size(); ++i) microseconds[i] += part[i];
  });
  for (double& time : microseconds) time /= useful_threads(parts_);
}

}  // namespace x86quant::runtime

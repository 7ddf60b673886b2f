#include "program.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>

#include "errors.h"
#include "parallel.h"

namespace x86quant::runtime {

namespace {

constexpr int64_t kLine = 64, kMostKept = INT64_MAX - kLine;

int64_t aligned(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

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
  Words in_bytes = strides;
  for (int64_t& stride : in_bytes)
    require(!__builtin_mul_overflow(stride, element_size(), &stride) && stride >= 0, "a plan has an impossible tensor");
  return Reach::range_of({Access::kRead, 0, 0, element_size(), sizes, in_bytes}).last;
}

int64_t Program::open_inputs() const {
  return std::count_if(inputs_.begin(), inputs_.end(), [](const Layout& input) { return input.is_open(); });
}

Program::Program(int64_t arena_bytes, Owner owner)
    : threads_(all_threads()), arena_(static_cast<size_t>(std::max<int64_t>(arena_bytes, 0)), threads_, owner) {
  require(arena_bytes >= 0, "negative sizes in a plan");
}

Program::Stage& Program::open_stage() {
  if (stages_.empty() || !stages_.back().advance.empty()) stages_.emplace_back();
  return stages_.back();
}

void Program::add(const std::string& kind, const StepFields::Values& fields) {
  checked_.reset();
  Stage& stage = open_stage();
  Reach reach;
  stage.steps.push_back(make_step(kind, fields, reach));
  stage.reach.add(reach);
  stage.fences.add(reach);
  stage.shared_steps += stage.steps.back()->threads() == StepThreads::kShared;
  stage.steps_with_own_threads += stage.steps.back()->threads() == StepThreads::kOwn;
}

void Program::keep(const Words& bytes) {
  require(kept_.empty() && stages_.empty(), "what a plan keeps comes before its steps");
  int64_t all = 0;
  for (const int64_t size : bytes)
    require(size >= 0 && size <= kMostKept && !__builtin_add_overflow(all, aligned(size), &all),
            "impossible sizes in a plan");
  kept_ = bytes;
  if (!bytes.empty()) kept_claim_.emplace(static_cast<size_t>(all), threads_ + 1, arena_.owner());  // beside an arena a thread
}

void Program::repeat(int64_t times, const Words& bytes) {
  require(times >= 1 && !bytes.empty() && bytes.size() == inputs_.size() + outputs_.size() + kept_.size(),
          "the parts of a plan are malformed");
  checked_.reset();
  Stage& stage = open_stage();
  stage.parts = times;
  stage.advance = bytes;
}

std::unique_ptr<Program> Program::of_parts(int64_t times) const {
  const auto is_whole = [](const Stage& stage) { return stage.advance.empty(); };
  require(times >= 1 && !stages_.empty() && std::none_of(stages_.begin(), stages_.end(), is_whole),
          "the plan is not one of parts");
  const int64_t before = stages_[0].parts;
  auto other = std::make_unique<Program>(static_cast<int64_t>(arena_.bytes()), arena_.owner());
  const auto resized = [&](int64_t size) {
    int64_t larger = 0;
    require(!__builtin_mul_overflow(size, times, &larger) && larger % before == 0, "a batch of ", times,
            " parts does not divide like one of ", before);
    return larger / before;
  };
  const auto of_batch = [&](std::vector<Layout> layouts) {
    for (Layout& layout : layouts) layout.sizes[0] = resized(layout.sizes[0]);
    return layouts;
  };
  other->threads_ = threads_;
  other->inputs_ = of_batch(inputs_);
  other->outputs_ = of_batch(outputs_);
  Words kept = kept_;
  for (int64_t& size : kept) size = resized(size);
  other->keep(kept);
  other->stages_ = stages_;
  for (Stage& stage : other->stages_) stage.parts = resized(stage.parts);
  other->check_reach(checked_.value_or(Inputs::kRead));
  return other;
}

int64_t Program::bytes_of(size_t tensor) const {
  const size_t tensors = inputs_.size() + outputs_.size();
  if (tensor >= tensors) return kept_[tensor - tensors];
  const Layout& layout = tensor < inputs_.size() ? inputs_[tensor] : outputs_[tensor - inputs_.size()];
  return layout.is_open() ? 0 : layout.bytes();  // of an open one no element is sure
}

void Program::check_reach(Inputs inputs) {
  require(open_inputs() == 0 || kept_.empty(), "the parts of a plan are malformed");  // both lie behind the outputs
  for (const Stage& stage : stages_) check_reach(stage, inputs);
  require_written_outputs();
  unsure_ = unsure_outputs();
  checked_ = inputs;
}

void Program::check_reach(const Stage& stage, Inputs inputs) const {
  const auto tensors = static_cast<int64_t>(inputs_.size() + outputs_.size() + kept_.size());
  require(open_inputs() == 0 || stage.advance.empty(), "the parts of a plan are malformed");
  for (const Reach::Open& open : stage.reach.open()) require_own_count(open);
  for (const auto& [base, touched] : stage.reach.touched()) {
    require(base >= 0 && base <= tensors, "a step of a plan has no base ", base);
    int64_t size = static_cast<int64_t>(arena_.bytes()), last = touched.all.last, moved = 0;
    if (base > 0) {
      const auto index = static_cast<size_t>(base - 1);
      size = bytes_of(index);
      const int64_t advance = stage.advance.empty() ? 0 : stage.advance[index];
      require(advance >= 0 && !__builtin_mul_overflow(advance, stage.parts - 1, &moved) &&
                  !__builtin_add_overflow(last, moved, &last),
              "the parts of a plan are malformed");
      const bool may_write = index >= inputs_.size() || (inputs == Inputs::kMayBeUpdated && touched.updated == touched.written);
      require(touched.written.is_empty() || may_write, "a step of a plan writes to input ", index);
    }
    require(touched.all.first >= 0 && last <= size, "a step of a plan reaches bytes ", touched.all.first, " to ", last, " of ", size);
    // Parts run side by side, and share all but the arena.
    const Reach::Range written{touched.written.first, touched.written.last + moved}, index{touched.index.first, touched.index.last + moved};
    require(base == 0 || stage.parts == 1 || touched.index.is_empty() || touched.written.is_empty() ||
                written.first >= index.last || index.first >= written.last,
            "a part of a plan writes over what says where another one reads");
  }
}

// What a run returns is memory that somebody else has used before.
void Program::require_written_outputs() const {
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const Layout& layout = outputs_[i];
    const auto base = static_cast<int64_t>(1 + inputs_.size() + i);
    __int128 written = 0, bytes = layout.element_size();
    for (const int64_t size : layout.sizes) bytes *= size;  // which Layout::bytes found possible
    for (const Stage& stage : stages_)
      if (const auto found = stage.reach.touched().find(base); found != stage.reach.touched().end())
        written += static_cast<__int128>(found->second.written_bytes) * stage.parts;
    require(written >= bytes, "no step of a plan writes all of output ", i);
  }
}

std::vector<size_t> Program::unsure_outputs() const {
  std::vector<size_t> unsure;
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const size_t tensor = inputs_.size() + i;
    const auto base = static_cast<int64_t>(1 + tensor);
    const auto is_sure = [&](const Stage& stage) {
      const int64_t advance = stage.advance.empty() ? 0 : stage.advance[tensor];
      return stage.reach.surely_writes(base, outputs_[i].bytes(), stage.parts, advance);
    };
    // The first stage that writes all of it, or reads any of it.
    const auto first = std::find_if(stages_.begin(), stages_.end(),
                                    [&](const Stage& stage) { return is_sure(stage) || stage.reach.reads(base); });
    if (first == stages_.end() || !is_sure(*first)) unsure.push_back(i);
  }
  return unsure;
}

void Program::clear_unsure_outputs(const Bases& bases) const {
  for (const size_t i : unsure_) std::memset(bases[1 + inputs_.size() + i], 0, static_cast<size_t>(outputs_[i].bytes()));
}

bool Program::updates(size_t index) const {
  return std::any_of(stages_.begin(), stages_.end(), [&](const Stage& stage) {
    const auto found = stage.reach.touched().find(static_cast<int64_t>(index + 1));
    return found != stage.reach.touched().end() && !found->second.updated.is_empty();
  });
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
void Program::with_kept(const Bases& bases, const Body& body) const {
  if (!kept_claim_) return body(bases);
  const ArenaLease kept(*kept_claim_);
  Bases all = bases;
  int64_t offset = 0;
  for (const int64_t size : kept_) {
    all.push_back(kept.data() + offset);
    offset += aligned(size);
  }
  body(all);
}

template <class Body>
void Program::for_each_part(const Stage& stage, const Bases& bases, const Body& body) const {
  std::atomic<int64_t> next{0};
  const int threads = useful_threads(stage.parts);
  // Each thread takes the next part when it is done with one, so that a slow one delays nobody.
  split(threads, threads, [&](int64_t, int64_t) {
    const ArenaLease arena(arena_);
    for (int64_t part; (part = next.fetch_add(1)) < stage.parts;) {
      Bases where = bases;
      where[0] = arena.data();
      for (size_t i = 0; part > 0 && i < stage.advance.size(); ++i) where[i + 1] += part * stage.advance[i];
      body(where);
    }
  });
}

template <class Body>
void Program::together(const Stage& stage, const Body& body) {
  if (stage.shared_steps < 2 || stage.steps_with_own_threads > 0) return body();
  with_team([&](int) { body(); });
}

void Program::run_steps(const Stage& stage, const Bases& bases) const {
  const Fences::Watch fences(stage.fences, bases[0], arena_.bytes());  // else the same either way
  together(stage, [&] {
    for (size_t i = 0; i < stage.steps.size(); ++i) {
      fences.before(i);
      stage.steps[i]->run(bases);
    }
  });
}

void Program::run_steps_timed(const Stage& stage, const Bases& bases, double* microseconds) const {
  using Clock = std::chrono::steady_clock;
  const Fences::Watch fences(stage.fences, bases[0], arena_.bytes());  // else the same either way
  together(stage, [&] {
    auto before = Clock::now();
    for (size_t i = 0; i < stage.steps.size(); ++i) {
      fences.before(i);
      stage.steps[i]->run(bases);
      const auto after = Clock::now();
      microseconds[i] = std::chrono::duration<double, std::micro>(after - before).count();
      before = after;
    }
  });
}

void Program::run(const Bases& bases) const {
  require(checked_.has_value(), "a program runs once check_reach has found it right");
  clear_unsure_outputs(bases);
  with_kept(bases, [&](const Bases& all) {
    for (const Stage& stage : stages_)
      for_each_part(stage, all, [&](const Bases& where) { run_steps(stage, where); });
  });
}

void Program::run_timed(const Bases& bases, std::vector<double>& microseconds) const {
  require(checked_.has_value(), "a program runs once check_reach has found it right");
  microseconds.clear();
  clear_unsure_outputs(bases);
  with_kept(bases, [&](const Bases& all) {
    for (const Stage& stage : stages_) {
      std::vector<double> sums(stage.steps.size());
      std::mutex guard;
      for_each_part(stage, all, [&](const Bases& where) {
        std::vector<double> part(stage.steps.size());
        run_steps_timed(stage, where, part.data());
        const std::lock_guard<std::mutex> lock(guard);
        for (size_t i = 0; i < part.size(); ++i) sums[i] += part[i];
      });
      for (const double time : sums) microseconds.push_back(time / useful_threads(stage.parts));
    }
  });
}

}  // namespace x86quant::runtime

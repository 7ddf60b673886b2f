#include "program.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>

#include <atomic>
#include <chrono>
#include <map>
#include <unordered_map>

#include "parallel.h"

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
    // More callers at a time than threads are rare: what they needed is not kept for the next time.
    if (program_.idle_.size() < static_cast<size_t>(program_.threads_))
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
    : arena_bytes_(static_cast<size_t>(arena_bytes)),
      inputs_(static_cast<size_t>(inputs)),
      threads_(at::get_num_threads()) {
  TORCH_CHECK_VALUE(arena_bytes >= 0 && inputs >= 0, "x86quant: negative sizes in a plan");
}

namespace {

struct Handles {
  std::mutex lock;
  std::unordered_map<int64_t, c10::weak_intrusive_ptr<Program>> programs;
  int64_t last = 0;
};

Handles& handles() {
  static auto* const all = new Handles;  // programs may outlive static objects
  return *all;
}

at::ScalarType type_named(const std::string& name) {
  static const std::map<std::string, at::ScalarType> types = {
      {"bool", at::kBool},   {"uint8", at::kByte}, {"int8", at::kChar},    {"int16", at::kShort},     {"int32", at::kInt},
      {"int64", at::kLong},  {"float16", at::kHalf}, {"bfloat16", at::kBFloat16}, {"float32", at::kFloat},
      {"float64", at::kDouble},
  };
  const auto found = types.find(name);
  TORCH_CHECK_VALUE(found != types.end(), "x86quant: a program takes no tensors of type ", name);
  return found->second;
}

}  // namespace

int64_t ProgramHandles::of(const c10::intrusive_ptr<Program>& program) {
  const std::lock_guard<std::mutex> guard(handles().lock);
  if (!program->handle_) {
    program->handle_ = ++handles().last;
    handles().programs.emplace(program->handle_, c10::weak_intrusive_ptr<Program>(program));
  }
  return program->handle_;
}

c10::intrusive_ptr<Program> ProgramHandles::find(int64_t handle) {
  const std::lock_guard<std::mutex> guard(handles().lock);
  const auto found = handles().programs.find(handle);
  return found == handles().programs.end() ? c10::intrusive_ptr<Program>() : found->second.lock();
}

void ProgramHandles::forget(int64_t handle) {
  const std::lock_guard<std::mutex> guard(handles().lock);
  handles().programs.erase(handle);
}

void Program::release_resources() {
  if (handle_) ProgramHandles::forget(handle_);
}

void Program::add(const std::string& kind, const StepFields::Values& fields) {
  steps_.push_back(make_step(kind, fields));
}

void Program::add_output(const Words& sizes, const Words& strides, const std::string& dtype) {
  outputs_.push_back({sizes, strides, type_named(dtype)});
}

void Program::expect(const Words& sizes, const Words& strides, const std::string& dtype) {
  expected_.push_back({sizes, strides, type_named(dtype)});
}

bool Program::takes(const std::vector<at::Tensor>& inputs) const {
  if (inputs.size() != inputs_ || inputs_ != expected_.size()) return false;
  for (size_t i = 0; i < inputs_; ++i) {
    const at::Tensor& x = inputs[i];
    const Layout& wanted = expected_[i];
    if (!x.is_cpu() || x.layout() != at::kStrided || x.scalar_type() != wanted.dtype ||
        x.sizes() != wanted.sizes || x.strides() != wanted.strides || x.is_neg())
      return false;
  }
  return true;
}

std::vector<at::Tensor> Program::new_outputs() const {
  std::vector<at::Tensor> outputs;
  outputs.reserve(outputs_.size());
  for (const Layout& output : outputs_)
    outputs.push_back(at::empty_strided(output.sizes, output.strides, output.dtype));
  return outputs;
}

Bases Program::bases(const std::vector<at::Tensor>& inputs,
                     const std::vector<at::Tensor>& outputs) const {
  TORCH_CHECK_VALUE(takes(inputs), "x86quant: the plan is for other inputs");
  Bases bases;
  bases.reserve(1 + inputs.size() + outputs.size());
  bases.push_back(nullptr);  // the arena
  for (const at::Tensor& x : inputs) bases.push_back(static_cast<uint8_t*>(x.data_ptr()));
  for (const at::Tensor& y : outputs) bases.push_back(static_cast<uint8_t*>(y.data_ptr()));
  return bases;
}

void Program::repeat(int64_t times, const Words& input_bytes, const Words& output_bytes) {
  TORCH_CHECK_VALUE(times >= 1 && input_bytes.size() == inputs_ && output_bytes.size() == outputs_.size(),
                    "x86quant: the parts of a plan are malformed");
  parts_ = times;
  advance_ = input_bytes;
  advance_.insert(advance_.end(), output_bytes.begin(), output_bytes.end());
}

c10::intrusive_ptr<Program> Program::of_parts(int64_t times) const {
  TORCH_CHECK_VALUE(times >= 1 && !advance_.empty(), "x86quant: the plan is not one of parts");
  auto other = c10::make_intrusive<Program>(static_cast<int64_t>(arena_bytes_), static_cast<int64_t>(inputs_));
  const auto resized = [&](std::vector<Layout> layouts) {
    for (Layout& layout : layouts) layout.sizes[0] = layout.sizes[0] / parts_ * times;
    return layouts;
  };
  other->threads_ = threads_;
  other->parts_ = times;
  other->advance_ = advance_;
  other->expected_ = resized(expected_);
  other->outputs_ = resized(outputs_);
  other->steps_ = steps_;
  return other;
}

template <class Body>
void Program::for_each_part(const Bases& bases, const Body& body) const {
  std::atomic<int64_t> next{0};
  const int threads = useful_threads(parts_);
  // Each thread takes the next part when it is done with one, so that a slow one delays nobody.
  split(threads, threads, [&](int64_t, int64_t) {
    const Lease arena(*this);
    for (int64_t part; (part = next.fetch_add(1)) < parts_;) {
      Bases where = bases;
      where[0] = arena.data();
      for (size_t i = 0; part > 0 && i < advance_.size(); ++i) where[i + 1] += part * advance_[i];
      body(where);
    }
  });
}

void Program::run_steps(const Bases& bases) const {
  for (const auto& step : steps_) step->run(bases);
}

void Program::run_steps_timed(const Bases& bases, std::vector<double>& microseconds) const {
  using Clock = std::chrono::steady_clock;
  auto before = Clock::now();
  for (size_t i = 0; i < steps_.size(); ++i) {
    steps_[i]->run(bases);
    const auto after = Clock::now();
    microseconds[i] = std::chrono::duration<double, std::micro>(after - before).count();
    before = after;
  }
}

std::vector<at::Tensor> Program::run(const std::vector<at::Tensor>& inputs) const {
  std::vector<at::Tensor> outputs = new_outputs();
  for_each_part(bases(inputs, outputs), [&](const Bases& where) { run_steps(where); });
  return outputs;
}

std::vector<at::Tensor> Program::run_timed(const std::vector<at::Tensor>& inputs,
                                           std::vector<double>& microseconds) const {
  std::vector<at::Tensor> outputs = new_outputs();
  microseconds.assign(steps_.size(), 0.0);
  std::mutex guard;
  for_each_part(bases(inputs, outputs), [&](const Bases& where) {
    std::vector<double> part(steps_.size());
    run_steps_timed(where, part);
    const std::lock_guard<std::mutex> lock(guard);
    for (size_t i = 0; i < part.size(); ++i) microseconds[i] += part[i];
  });
  for (double& time : microseconds) time /= useful_threads(parts_);
  return outputs;
}

}  // namespace x86quant::runtime

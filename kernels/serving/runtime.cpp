// The C interface.
#include "x86quant/runtime.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <optional>
#include <string>

#include "../runtime/scratch.h"
#include "../runtime/strided_copy.h"
#include "failure.h"
#include "loader.h"
#include "pool.h"
#include "this_cpu.h"
#include "types.h"

using x86quant::Refused;
using x86quant::runtime::Layout;
using x86quant::runtime::Words;
using x86quant::serving::Failure;

namespace {

constexpr int kMostThreads = 1024;

Words row_major(const Words& sizes) {
  Words strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= sizes[i]) strides[i] = step;
  return strides;
}

bool is_row_major(const Layout& layout) {
  if (layout.is_open()) return true;
  const Words plain = row_major(layout.sizes);
  for (size_t i = 0; i < plain.size(); ++i)
    if (layout.sizes[i] != 1 && layout.strides[i] != plain[i]) return false;
  return true;
}

Words in_bytes(Words strides, const Layout& layout) {
  for (int64_t& stride : strides) stride *= layout.element_size();
  return strides;
}

x86quant_tensor described(const Layout& layout) {
  x86quant_tensor found{};
  found.type = x86quant::serving::type_number(layout.type);
  found.rank = static_cast<int32_t>(layout.sizes.size());
  found.bytes = layout.is_open() ? 0 : static_cast<uint64_t>(layout.element_size());
  for (size_t i = 0; i < layout.sizes.size(); ++i) {
    found.sizes[i] = layout.sizes[i];
    found.bytes *= static_cast<uint64_t>(layout.sizes[i]);
  }
  return found;
}

// Whether a plan that takes `wanted` takes `given`.
bool takes(const x86quant_tensor& wanted, const x86quant_tensor& given) {
  const auto fits = [](int64_t size, int64_t own) { return size == own || (size == X86QUANT_ANY_SIZE && own >= 0); };
  return given.type == wanted.type && given.rank == wanted.rank &&
         std::equal(wanted.sizes, wanted.sizes + wanted.rank, given.sizes, fits);
}

// As in "float32 [1, 3], uint8 [4]".
std::string listed(const x86quant_tensor* tensors, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += i ? ", " : "";
    text += x86quant::serving::kTypeNames[tensors[i].type] + std::string(" [");
    for (int axis = 0; axis < tensors[i].rank; ++axis)
      text += (axis ? ", " : "") + (tensors[i].sizes[axis] == X86QUANT_ANY_SIZE ? "any" : std::to_string(tensors[i].sizes[axis]));
    text += "]";
  }
  return text;
}

// An output of a plan; the plan may write it in another order than row by row.
struct Output {
  explicit Output(const Layout& layout) : told(described(layout)) {
    if (is_row_major(layout)) return;
    planned_bytes = static_cast<size_t>(layout.bytes());
    reorder.emplace(layout.element_size(), layout.sizes, in_bytes(layout.strides, layout),
                    in_bytes(row_major(layout.sizes), layout));
  }
  x86quant_tensor told;
  size_t planned_bytes = 0;
  std::optional<x86quant::runtime::StridedCopy> reorder;
};

struct Plan {
  explicit Plan(std::unique_ptr<x86quant::runtime::Program> made) : program(std::move(made)) {
    for (const Layout& layout : program->inputs()) {
      x86quant::require(is_row_major(layout), "an input of a plan is not in row-major order");
      inputs.push_back(described(layout));
    }
    for (const Layout& layout : program->outputs()) outputs.emplace_back(layout);
  }
  std::unique_ptr<x86quant::runtime::Program> program;
  std::vector<x86quant_tensor> inputs;
  std::vector<Output> outputs;
};

// Plain characters: to keep a message takes no memory, and there is nothing to destroy at the end of a thread, which
// glibc would have to note with memory of its own and ends the process where it gets none.
thread_local char last_error[2048] = "";

void keep_error(const char* what, const char* more = "") {
  const int length = std::snprintf(last_error, sizeof last_error, "%s%s", what, more);
  if (length >= static_cast<int>(sizeof last_error)) std::strcpy(last_error + sizeof last_error - 4, "...");
}

// Every exception ends here: the caller may be C.
template <class Body>
int guarded(const Body& body) {
  try {
    body();
    return X86QUANT_OK;
  } catch (const Failure& failure) {
    keep_error(failure.what());
    return failure.status;
  } catch (const Refused& refused) {
    keep_error(refused.what(), ": the file's content is impossible");
    return X86QUANT_MALFORMED;
  } catch (const std::bad_alloc&) {
    keep_error("x86quant: there is not enough memory");
    return X86QUANT_NO_MEMORY;
  } catch (const std::exception& error) {
    keep_error(error.what());
    return X86QUANT_FAILED;
  } catch (...) {
    keep_error("x86quant: an unknown exception");
    return X86QUANT_FAILED;
  }
}

template <class... Parts>
void need(bool holds, int status, const Parts&... parts) {
  if (!holds) throw Failure(status, parts...);
}

}  // namespace

struct x86quant_program {
  mutable x86quant::serving::Pool pool;
  std::string isa;
  std::vector<Plan> plans;
  explicit x86quant_program(int threads) : pool(threads) {}

  size_t find(const x86quant_tensor* inputs, size_t count) const {
    const size_t wanted = plans[0].inputs.size();
    need(inputs != nullptr && count == wanted, X86QUANT_BAD_ARGUMENT, "the program takes ", wanted, " inputs, got ",
         inputs == nullptr ? 0 : count);
    for (size_t i = 0; i < count; ++i)
      need(inputs[i].rank >= 0 && inputs[i].rank <= X86QUANT_MAX_RANK &&
               x86quant::serving::is_type(inputs[i].type),
           X86QUANT_BAD_ARGUMENT, "input ", i, " has rank ", inputs[i].rank, " and type ", inputs[i].type);
    for (size_t plan = 0; plan < plans.size(); ++plan)
      if (std::equal(plans[plan].inputs.begin(), plans[plan].inputs.end(), inputs, takes)) return plan;
    std::string known;
    for (size_t plan = 0; plan < plans.size(); ++plan)
      known += (plan ? " and for " : "") + listed(plans[plan].inputs.data(), count);
    throw Failure(X86QUANT_WRONG_SHAPE, "the file has no plan for ", listed(inputs, count), "; it has plans for ", known,
                  "; export it with this shape as well");
  }

  // A plan is right for memory that nothing else shares: it checks indices before it uses them.
  static void require_apart(const x86quant_tensor* inputs, size_t input_count, const x86quant_tensor* outputs,
                            size_t output_count, const Plan& plan) {
    const auto first = [](const x86quant_tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data); };
    const auto meet = [&](const x86quant_tensor& a, uint64_t a_bytes, const x86quant_tensor& b, uint64_t b_bytes) {
      return first(a) < first(b) + b_bytes && first(b) < first(a) + a_bytes;
    };
    for (size_t i = 0; i < output_count; ++i) {
      const uint64_t bytes = plan.outputs[i].told.bytes;
      for (size_t j = 0; j < input_count; ++j)
        need(!meet(outputs[i], bytes, inputs[j], inputs[j].bytes), X86QUANT_BAD_ARGUMENT, "output ", i, " lies over input ", j);
      for (size_t j = 0; j < i; ++j)
        need(!meet(outputs[i], bytes, outputs[j], plan.outputs[j].told.bytes), X86QUANT_BAD_ARGUMENT, "output ", i,
             " lies over output ", j);
    }
  }

  void run(const x86quant_tensor* inputs, size_t input_count, x86quant_tensor* outputs, size_t output_count) const {
    const Plan& plan = plans[find(inputs, input_count)];
    need(outputs != nullptr && output_count == plan.outputs.size(), X86QUANT_BAD_ARGUMENT, "the program has ",
         plan.outputs.size(), " outputs, got ", outputs == nullptr ? 0 : output_count);
    x86quant::runtime::Bases bases = {nullptr};
    Words open_sizes;
    for (size_t i = 0; i < input_count; ++i) {
      const Layout& layout = plan.program->inputs()[i];
      uint64_t bytes = plan.inputs[i].bytes;
      if (layout.is_open()) {
        open_sizes.push_back(inputs[i].sizes[0]);
        need(!__builtin_mul_overflow(inputs[i].sizes[0], layout.element_size(), &bytes), X86QUANT_BAD_ARGUMENT, "input ", i,
             " has an impossible size: ", inputs[i].sizes[0]);
      }
      const uint64_t given = inputs[i].data == nullptr ? 0 : inputs[i].bytes;
      need(given == bytes, X86QUANT_BAD_ARGUMENT, "input ", i, " takes ", bytes, " bytes, got ", given);
      bases.push_back(static_cast<uint8_t*>(inputs[i].data));
    }
    std::vector<x86quant::runtime::Buffer> planned;
    for (size_t i = 0; i < output_count; ++i) {
      const Output& output = plan.outputs[i];
      need(outputs[i].data != nullptr && outputs[i].bytes >= output.told.bytes, X86QUANT_BAD_ARGUMENT, "output ", i,
           " takes ", output.told.bytes, " bytes, got ", outputs[i].data == nullptr ? 0 : outputs[i].bytes);
      if (output.reorder) planned.emplace_back(output.planned_bytes);
      bases.push_back(output.reorder ? planned.back().data() : static_cast<uint8_t*>(outputs[i].data));
    }
    require_apart(inputs, input_count, outputs, output_count, plan);
    if (!open_sizes.empty()) bases.push_back(reinterpret_cast<uint8_t*>(open_sizes.data()));
    plan.program->run(bases);
    for (size_t i = 0; i < output_count; ++i) {
      const Output& output = plan.outputs[i];
      if (output.reorder) output.reorder->run(bases[1 + input_count + i], static_cast<uint8_t*>(outputs[i].data));
      outputs[i].type = output.told.type;
      outputs[i].rank = output.told.rank;
      std::copy_n(output.told.sizes, X86QUANT_MAX_RANK, outputs[i].sizes);
    }
  }
};

const char* x86quant_error(void) { return last_error; }

int x86quant_load(const char* path, const x86quant_options* options, x86quant_program** program) {
  return guarded([&] {
    need(path != nullptr && program != nullptr, X86QUANT_BAD_ARGUMENT, "a path and a place for the program are needed");
    *program = nullptr;
    const x86quant_options wanted = options == nullptr ? x86quant_options{0, nullptr, nullptr} : *options;
    need(wanted.threads >= 0 && wanted.threads <= kMostThreads, X86QUANT_BAD_ARGUMENT, "threads is ", wanted.threads,
         ", and may be 0 to ", kMostThreads);
    auto made = std::make_unique<x86quant_program>(wanted.threads > 0 ? wanted.threads
                                                                      : x86quant::serving::allowed_cpus());
    const x86quant::serving::UsePool pool(made->pool);
    static std::mutex one_at_a_time;  // the level belongs to the whole library while a program is made
    const std::lock_guard<std::mutex> guard(one_at_a_time);
    made->isa = x86quant::serving::choose_level(wanted.isa == nullptr ? "" : wanted.isa);
    const std::string cache = wanted.cache == nullptr ? "" : wanted.cache;
    for (auto& plan : x86quant::serving::load_programs(path, made->isa, cache)) made->plans.emplace_back(std::move(plan));
    for (const Plan& plan : made->plans)
      x86quant::require(plan.inputs.size() == made->plans[0].inputs.size() &&
                            plan.outputs.size() == made->plans[0].outputs.size(),
                        "the plans have different numbers of inputs or outputs");
    *program = made.release();
  });
}

void x86quant_free(x86quant_program* program) { delete program; }

const char* x86quant_isa(const x86quant_program* program) { return program->isa.c_str(); }
int32_t x86quant_threads(const x86quant_program* program) { return program->pool.threads(); }
size_t x86quant_plans(const x86quant_program* program) { return program->plans.size(); }
size_t x86quant_inputs(const x86quant_program* program) { return program->plans[0].inputs.size(); }
size_t x86quant_outputs(const x86quant_program* program) { return program->plans[0].outputs.size(); }

int x86quant_input(const x86quant_program* program, size_t plan, size_t input, x86quant_tensor* found) {
  return guarded([&] {
    need(program != nullptr && found != nullptr && plan < program->plans.size() &&
             input < program->plans[plan].inputs.size(),
         X86QUANT_BAD_ARGUMENT, "there is no plan ", plan, " with an input ", input);
    *found = program->plans[plan].inputs[input];
  });
}

int x86quant_output(const x86quant_program* program, size_t plan, size_t output, x86quant_tensor* found) {
  return guarded([&] {
    need(program != nullptr && found != nullptr && plan < program->plans.size() &&
             output < program->plans[plan].outputs.size(),
         X86QUANT_BAD_ARGUMENT, "there is no plan ", plan, " with an output ", output);
    *found = program->plans[plan].outputs[output].told;
  });
}

int x86quant_find(const x86quant_program* program, const x86quant_tensor* inputs, size_t count, size_t* plan) {
  return guarded([&] {
    need(program != nullptr && plan != nullptr, X86QUANT_BAD_ARGUMENT, "a program and a place for the plan are needed");
    *plan = program->find(inputs, count);
  });
}

int x86quant_run(const x86quant_program* program, const x86quant_tensor* inputs, size_t input_count,
                 x86quant_tensor* outputs, size_t output_count) {
  return guarded([&] {
    need(program != nullptr, X86QUANT_BAD_ARGUMENT, "a program is needed");
    const x86quant::serving::UsePool pool(program->pool);
    try {
      program->run(inputs, input_count, outputs, output_count);
    } catch (const Refused& refused) {  // what an input holds, such as an index that no row has
      throw Failure(X86QUANT_BAD_ARGUMENT, refused);
    }
  });
}

// Runs program files of x86quant without Python and without torch: libx86quant_runtime.so.
//
//     x86quant::Program program("model.xq");
//     std::vector<float> image(1 * 3 * 224 * 224);
//     std::vector<float> answer = program.run(image, {1, 3, 224, 224});
//
// A program file is written by `x86quant export-program` or x86quant.export_program(). It holds a plan for each of
// the input shapes that were asked for, and runs on any CPU with AVX2: weights are ordered for the CPU at hand when
// the file is loaded. Answers are byte for byte those of the module in Python.
//
// The interface is C; C++ gets the small class x86quant::Program below. A program may be run by any number of
// threads at a time. Nothing in a file is executed or trusted: a file that is damaged, or that somebody made up, is
// refused when it is loaded.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define X86QUANT_API __attribute__((visibility("default")))

typedef enum x86quant_status {
  X86QUANT_OK = 0,
  X86QUANT_BAD_ARGUMENT = 1,   // a null pointer, a number of inputs, a size in bytes, an index that no row has
  X86QUANT_CANNOT_READ = 2,    // there is no such file, or it may not be read
  X86QUANT_DAMAGED = 3,        // truncated, a wrong checksum, or no program file
  X86QUANT_WRONG_VERSION = 4,  // written by another version of x86quant
  X86QUANT_MALFORMED = 5,      // the checksum is right and the content impossible
  X86QUANT_CPU = 6,            // the CPU lacks AVX2, or what was asked for
  X86QUANT_WRONG_SHAPE = 7,    // the file has no plan for inputs of these shapes
  X86QUANT_NO_MEMORY = 8,
  X86QUANT_FAILED = 9,         // anything else; see the message
} x86quant_status;

// What the last call in this thread that did not return X86QUANT_OK has to say. Valid until the next call.
X86QUANT_API const char* x86quant_error(void);

typedef enum x86quant_type {
  X86QUANT_FLOAT32 = 0,
  X86QUANT_UINT8 = 1,
  X86QUANT_INT32 = 2,  // indices into tables
  X86QUANT_INT64 = 3,
} x86quant_type;

#define X86QUANT_MAX_RANK 8
// Of an input that x86quant_input describes: it has one dimension, and may be of any size. Its bytes are 0 there.
#define X86QUANT_ANY_SIZE (-1)

// Elements in row-major order, the last dimension adjacent.
typedef struct x86quant_tensor {
  int32_t type;  // x86quant_type
  int32_t rank;
  int64_t sizes[X86QUANT_MAX_RANK];
  void* data;
  uint64_t bytes;  // the size of data
} x86quant_tensor;

typedef struct x86quant_options {
  int32_t threads;  // that share a run, the caller's among them; 0: one for each CPU this process may use
  const char* isa;  // "avx2", "avx_vnni", "avx512", "avx512_vnni" or "amx_int8"; null: X86QUANT_ISA, else the best
  const char* cache;  // a file that keeps the ordered weights for the next load, "model.xq.packed"; null: none
} x86quant_options;

typedef struct x86quant_program x86quant_program;

// `options` may be null. A cache is used if this library wrote it, for this file, level and kind of CPU, if nothing in
// it has changed, and if nobody but this user or root may write it; else it is written anew, where that is possible. On success *program must be given to x86quant_free at the end.
X86QUANT_API int x86quant_load(const char* path, const x86quant_options* options, x86quant_program** program);
X86QUANT_API void x86quant_free(x86quant_program* program);

// The instruction-set level in use, and the number of threads.
X86QUANT_API const char* x86quant_isa(const x86quant_program* program);
X86QUANT_API int32_t x86quant_threads(const x86quant_program* program);

// Sets of input shapes that the file has plans for, and the tensors of each plan.
X86QUANT_API size_t x86quant_plans(const x86quant_program* program);
X86QUANT_API size_t x86quant_inputs(const x86quant_program* program);
X86QUANT_API size_t x86quant_outputs(const x86quant_program* program);
// Type, rank, sizes and bytes of an input or an output; data becomes null.
X86QUANT_API int x86quant_input(const x86quant_program* program, size_t plan, size_t input, x86quant_tensor* found);
X86QUANT_API int x86quant_output(const x86quant_program* program, size_t plan, size_t output, x86quant_tensor* found);
// The plan for inputs like these, of which type, rank and sizes are read.
X86QUANT_API int x86quant_find(const x86quant_program* program, const x86quant_tensor* inputs, size_t count,
                               size_t* plan);

// Runs the plan for these inputs. Of outputs, data and bytes must be set, and suffice; type, rank and sizes are
// written. The memory of an output is neither an input's nor another output's.
X86QUANT_API int x86quant_run(const x86quant_program* program, const x86quant_tensor* inputs, size_t input_count,
                              x86quant_tensor* outputs, size_t output_count);

#ifdef __cplusplus
}  // extern "C"

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace x86quant {

struct Error : std::runtime_error {
  explicit Error(int code) : std::runtime_error(x86quant_error()), status(code) {}
  int status;  // x86quant_status
};

class Program {
 public:
  explicit Program(const std::string& path, int threads = 0, const char* isa = nullptr, const char* cache = nullptr) {
    const x86quant_options options{threads, isa, cache};
    check(x86quant_load(path.c_str(), &options, &program_));
  }
  ~Program() { x86quant_free(program_); }
  Program(Program&& other) noexcept : program_(std::exchange(other.program_, nullptr)) {}
  Program& operator=(Program&& other) noexcept {
    std::swap(program_, other.program_);
    return *this;
  }

  // For the calls above.
  const x86quant_program* get() const { return program_; }

  size_t plans() const { return x86quant_plans(program_); }
  x86quant_tensor input(size_t plan, size_t index = 0) const {
    x86quant_tensor found;
    check(x86quant_input(program_, plan, index, &found));
    return found;
  }
  x86quant_tensor output(size_t plan, size_t index = 0) const {
    x86quant_tensor found;
    check(x86quant_output(program_, plan, index, &found));
    return found;
  }

  // Of a model with one input and one output, both float32. `sizes` receives the answer's, where it is given.
  std::vector<float> run(const std::vector<float>& input, const std::vector<int64_t>& shape,
                         std::vector<int64_t>* sizes = nullptr) const {
    if (shape.size() > X86QUANT_MAX_RANK) throw std::invalid_argument("x86quant: the input has too many dimensions");
    x86quant_tensor in{};
    in.type = X86QUANT_FLOAT32;
    in.rank = static_cast<int32_t>(shape.size());
    for (size_t i = 0; i < shape.size(); ++i) in.sizes[i] = shape[i];
    in.data = const_cast<float*>(input.data());
    in.bytes = input.size() * sizeof(float);
    size_t plan = 0;
    check(x86quant_find(program_, &in, 1, &plan));
    x86quant_tensor out = output(plan);
    if (out.type != X86QUANT_FLOAT32) throw std::invalid_argument("x86quant: the output is not float32");
    std::vector<float> answer(out.bytes / sizeof(float));
    out.data = answer.data();
    check(x86quant_run(program_, &in, 1, &out, 1));
    if (sizes != nullptr) sizes->assign(out.sizes, out.sizes + out.rank);
    return answer;
  }

 private:
  static void check(int status) {
    if (status != X86QUANT_OK) throw Error(status);
  }

  x86quant_program* program_ = nullptr;
};

}  // namespace x86quant
#endif

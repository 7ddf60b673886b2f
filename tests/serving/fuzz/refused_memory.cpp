// Refuses memory at one allocation after the other: refused_memory FILE [ISA...].
//
// A load or a run then ends with a status, or does without; the next, to which nothing is refused, gives the answer
// that it gave before.
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "refusing_malloc.h"
#include "tensors.h"

namespace {

std::atomic<long> left{-1};  // allocations until one is refused; below 0: none is

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

static bool refuses(void*) {
  if (left.load(std::memory_order_relaxed) < 0) return false;
  if (left.fetch_sub(1) != 0) return false;
  errno = ENOMEM;
  return true;
}

extern "C" void* mmap(void* at, size_t size, int access, int flags, int file, off_t from) {
  if (refuses(nullptr)) return MAP_FAILED;
  static auto* const next = real<void*(void*, size_t, int, int, int, off_t)>("mmap");
  return next(at, size, access, flags, file, from);
}

namespace {

using x86quant::fuzz::Bytes;
using x86quant::fuzz::Tensors;
using x86quant::fuzz::tensors_of;

int run(const x86quant_program* program, Tensors& t) {
  for (Bytes& bytes : t.out) std::memset(bytes.data(), 1, bytes.size());
  return t.run(program);
}

[[noreturn]] void fail(const char* what, long at) {
  left = -1;
  std::fprintf(stderr, "%s, at allocation %ld: %s\n", what, at, x86quant_error());
  std::_Exit(1);
}

int load(const char* path, const char* isa, x86quant_program** program) {
  const x86quant_options options{2, isa, nullptr};
  *program = nullptr;
  return x86quant_load(path, &options, program);
}

// How often `act` was refused memory, and in how many of these it ended with a status.
template <class Act>
void refuse_each(const Act& act, long* tried, long* told) {
  for (long at = 0;; ++at) {
    left = at;
    const bool failed = act(at);
    const bool reached = left.exchange(-1) < 0;
    if (!reached) return;
    ++*tried;
    *told += failed;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  std::vector<const char*> isas(argv + 2, argv + argc);
  if (isas.empty()) isas.push_back(nullptr);
  long loads = 0, loads_told = 0, runs = 0, runs_told = 0;
  for (const char* isa : isas) {
    x86quant_program* program = nullptr;
    if (load(argv[1], isa, &program) != X86QUANT_OK) fail("the file is not loaded", -1);
    const size_t plans = x86quant_plans(program);
    std::vector<Tensors> tensors;
    std::vector<std::vector<Bytes>> want;
    for (size_t plan = 0; plan < plans; ++plan) {
      tensors.push_back(tensors_of(program, plan));
      if (run(program, tensors[plan]) != X86QUANT_OK) fail("a run", -1);
      want.push_back(tensors[plan].out);
    }
    x86quant_free(program);
    const auto right = [&](x86quant_program* one, size_t plan, long at) {
      if (run(one, tensors[plan]) != X86QUANT_OK) fail("the run after it", at);
      if (tensors[plan].out != want[plan]) fail("another answer", at);
    };
    refuse_each(
        [&](long at) {
          x86quant_program* one = nullptr;
          const bool failed = load(argv[1], isa, &one) != X86QUANT_OK;
          const long before = left.exchange(-1);
          if (failed && one != nullptr) fail("a load failed and gave a program", at);
          if (!failed) right(one, 0, at);
          x86quant_free(one);
          left = before;
          return failed;
        },
        &loads, &loads_told);
    for (size_t plan = 0; plan < plans; ++plan) {
      // Of a program that has not run, which takes its memory in the first run.
      refuse_each(
          [&](long at) {
            const long chosen = left.exchange(-1);
            x86quant_program* one = nullptr;
            if (load(argv[1], isa, &one) != X86QUANT_OK) fail("the load after it", at);
            left = chosen;
            const int status = run(one, tensors[plan]);
            const long before = left.exchange(-1);
            if (status == X86QUANT_OK && tensors[plan].out != want[plan]) fail("another answer", at);
            right(one, plan, at);
            x86quant_free(one);
            left = before;
            return status != X86QUANT_OK;
          },
          &runs, &runs_told);
    }
  }
  std::printf("memory refused %ld times in loads (%ld ended with a status), %ld in runs (%ld)\n", loads, loads_told, runs,
              runs_told);
  return loads > 0 && runs > 0 ? 0 : 1;
}

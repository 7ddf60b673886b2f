// Runs a program file on many threads at once, for ThreadSanitizer: race FILE ROUNDS [ISA...].
//
// Several callers share a program, whose runs are shared by threads in turn; others load it and let it go meanwhile.
// Every answer is, byte by byte, that of one thread alone.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "tensors.h"

namespace {

constexpr int kCallers = 4;
constexpr int32_t kThreads[] = {1, 2, 3, 8};

using x86quant::fuzz::Bytes;
using x86quant::fuzz::Tensors;
using x86quant::fuzz::tensors_of;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s: %s\n", what, x86quant_error());
  std::_Exit(1);
}

x86quant_program* loaded(const char* path, int32_t threads, const char* isa) {
  const x86quant_options options{threads, isa, nullptr};
  x86quant_program* program = nullptr;
  if (x86quant_load(path, &options, &program) != X86QUANT_OK) fail("the file is not loaded");
  return program;
}

// The outputs of a plan.
std::vector<Bytes> run(const x86quant_program* program, size_t plan) {
  Tensors tensors = tensors_of(program, plan);
  if (tensors.run(program) != X86QUANT_OK) fail("a run");
  return tensors.out;
}

void race(const char* path, const char* isa, int32_t threads, int rounds) {
  x86quant_program* alone = loaded(path, 1, isa);
  std::vector<std::vector<Bytes>> want;
  for (size_t plan = 0; plan < x86quant_plans(alone); ++plan) want.push_back(run(alone, plan));
  x86quant_free(alone);
  x86quant_program* shared = loaded(path, threads, isa);
  std::atomic<bool> differs{false};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < rounds; ++round) {
        const size_t plan = static_cast<size_t>(caller + round) % want.size();
        // One caller always has a program of its own, which ends while the others run.
        x86quant_program* program = caller == 0 ? loaded(path, threads, isa) : shared;
        if (run(program, plan) != want[plan]) differs = true;
        if (caller == 0) x86quant_free(program);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  x86quant_free(shared);
  if (differs) fail("an answer differs from that of one thread");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  std::vector<const char*> isas(argv + 3, argv + argc);
  if (isas.empty()) isas.push_back(nullptr);
  const int rounds = std::atoi(argv[2]);
  for (const char* isa : isas)
    for (const int32_t threads : kThreads) race(argv[1], isa, threads, rounds);
  std::printf("%zu levels, %zu numbers of threads, %d callers, %d runs each: one answer\n", isas.size(), std::size(kThreads),
              kCallers, rounds);
  return 0;
}

// Loads program files that libFuzzer chooses by the code that was run, and runs what is loaded: guided CORPUS -runs=N.
//
// Loads, where all is proved, are guided. A run is in a process of its own, which may take a second: a plan that somebody
// made up may be as long as its maker likes.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "changed_programs.h"

using namespace changed_programs;

namespace {

constexpr unsigned kSeconds = 1;
// One of so many should be read, and one of so many of them should run.
constexpr long kLeastRead = 2, kLeastRun = 100;
long counts[kOutcomes];

void tell() {
  const long read = counts[kRan] + counts[kRefused] + counts[kLong];
  std::printf("%ld guided files: %ld were read, of which %ld ran, %ld were refused and %ld took long\n", read + counts[kNotRead],
              read, counts[kRan], counts[kRefused], counts[kLong]);
  std::fflush(stdout);
  if (kLeastRead * read >= read + counts[kNotRead] && kLeastRun * counts[kRan] >= read) return;
  std::fprintf(stderr, "too few were read, or ran, for the others to tell anything\n");
  _exit(1);
}

size_t header_bytes(const uint8_t* data) {
  uint64_t length;
  std::memcpy(&length, data, sizeof(length));
  return static_cast<size_t>(length);
}

size_t given(const std::string& file, uint8_t* out, size_t most) {
  if (file.size() > most) return 0;
  std::memcpy(out, file.data(), file.size());
  return file.size();
}

Outcome run_apart(x86quant_program* program, uint64_t seed) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kSeconds);
    Random random(seed);
    _exit(run(program, &random));
  }
  int status = 0;
  waitpid(child, &status, 0);
  x86quant_free(program);
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) return kLong;
  if (!WIFEXITED(status) || WEXITSTATUS(status) > kNotRead) std::abort();  // what libFuzzer notes, with the file
  return static_cast<Outcome>(WEXITSTATUS(status));
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  std::atexit(tell);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;  // libFuzzer begins with that, whatever the corpus
  Outcome outcome;
  x86quant_program* program = loaded({reinterpret_cast<const char*>(data), size}, std::getenv("FUZZ_ISA"), outcome);
  if (program != nullptr) outcome = run_apart(program, size);
  ++counts[outcome];
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  if (size == 0) return 0;
  Random random(seed);
  return given(changed({reinterpret_cast<const char*>(data), size}, random), data, most);
}

// The plans of one with the weights of another.
extern "C" size_t LLVMFuzzerCustomCrossOver(const uint8_t* one, size_t one_size, const uint8_t* other, size_t other_size, uint8_t* out,
                                            size_t most, unsigned) {
  if (one_size == 0 || other_size == 0) return 0;
  const std::string header(reinterpret_cast<const char*>(one) + 8, header_bytes(one));
  const size_t before = 8 + header_bytes(other);
  return given(sealed(header, {reinterpret_cast<const char*>(other) + before, other_size - before}), out, most);
}

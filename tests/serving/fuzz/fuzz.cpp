// Loads and runs a program file with random changes behind a right checksum: fuzz FILE FIRST LAST [ISA...].
//
// Whatever is in the file, a load ends with a program or with a status, and a run keeps to its memory: the sanitizers
// tell. Each change is tried in a process of its own, which may take a few seconds: a plan that somebody made up may
// be as long as its maker likes.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "changed_programs.h"

using namespace changed_programs;

namespace {

constexpr unsigned kSeconds = 3;
// Of the changed files, at least so many of 100 should be read, and run: else this tests the first check alone.
constexpr long kLeastRead = 50, kLeastRun = 2;

// Counts of lines are written where a process ends in order.
[[noreturn]] void end(Outcome outcome) {
#ifdef XQ_COUNTS_LINES
  std::exit(outcome);
#else
  _exit(outcome);
#endif
}

Outcome attempt(const std::string& file, const char* isa, Random* random = nullptr) {
  Outcome outcome;
  x86quant_program* program = loaded(file, isa, outcome);
  return program == nullptr ? outcome : run(program, random);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  std::ifstream stream(argv[1], std::ios::binary);
  const std::string file((std::istreambuf_iterator<char>(stream)), {});
  std::vector<const char*> isas(argv + 4, argv + argc);
  if (isas.empty()) isas.push_back(nullptr);
  if (attempt(file, isas[0]) != kRan) {
    std::fprintf(stderr, "the file as it is does not run: %s\n", x86quant_error());
    return 1;
  }
  long counts[kOutcomes] = {};
  for (long seed = std::atol(argv[2]); seed < std::atol(argv[3]); ++seed) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      alarm(kSeconds);
      Random random(static_cast<uint64_t>(seed));
      const std::string other = changed(file, random);
      end(attempt(other, isas[static_cast<size_t>(seed) % isas.size()], &random));
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) {
      ++counts[kLong];
    } else if (WIFEXITED(status) && WEXITSTATUS(status) <= kNotRead) {
      ++counts[WEXITSTATUS(status)];
    } else {
      std::fprintf(stderr, "seed %ld ended with status %d\n", seed, status);
      return 1;
    }
  }
  const long read = counts[kRan] + counts[kRefused] + counts[kLong], all = read + counts[kNotRead];
  std::printf("%ld changed files: %ld were read, of which %ld ran, %ld were refused and %ld took long\n", all, read, counts[kRan],
              counts[kRefused], counts[kLong]);
  if (100 * read >= kLeastRead * all && 100 * counts[kRan] >= kLeastRun * all) return 0;
  std::fprintf(stderr, "too few were read, or ran, for the others to tell anything\n");
  return 1;
}

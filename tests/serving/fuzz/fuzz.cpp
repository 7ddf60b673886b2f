// Loads and runs a program file with random changes behind a right checksum: fuzz FILE FIRST LAST [ISA...].
//
// Whatever is in the file, a load ends with a program or with a status, and a run keeps to its memory: the sanitizers
// tell. Each change is tried in a process of its own, which may take a few seconds: a plan that somebody made up may
// be as long as its maker likes.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "../../../kernels/serving/crc32.h"
#include "../../../kernels/serving/program_file.h"
#include "x86quant/runtime.h"

namespace {

constexpr unsigned kSeconds = 3;
// Of the changed files, at least so many of 100 should be read, and run: else this tests the first check alone.
constexpr long kLeastRead = 50, kLeastRun = 2;

using Random = std::mt19937_64;

size_t below(Random& random, size_t limit) { return static_cast<size_t>(random() % limit); }

std::string number(Random& random, const std::string& before) {
  static const char* const kOdd[] = {"0", "1", "-1", "2", "3", "64", "255", "256", "65536", "1048576", "2147483647",
                                     "2147483648", "-2147483648", "1099511627776", "4611686018427387904",
                                     "9223372036854775807", "-9223372036854775808", "9223372036854775808", "1e300", "0.5"};
  const auto value = static_cast<unsigned long long>(std::strtoll(before.c_str(), nullptr, 10));  // which may wrap
  const auto signed_text = [](unsigned long long number) { return std::to_string(static_cast<long long>(number)); };
  switch (below(random, 5)) {
    case 4: return "";  // that of another number
    case 0: return signed_text(value + 1);
    case 1: return signed_text(value - 1);
    case 2: return signed_text(value * (2 + below(random, 30)));
    default: return kOdd[below(random, std::size(kOdd))];
  }
}

struct Place {
  size_t begin, length;
};

// Of some number of the text from `first` on; of length 0 where none was found.
Place number_in(Random& random, const std::string& text, size_t first) {
  size_t at = first + below(random, text.size() - first);
  while (at < text.size() && !std::isdigit(static_cast<unsigned char>(text[at]))) ++at;
  size_t begin = at, end = at;
  while (begin > first && (std::isdigit(static_cast<unsigned char>(text[begin - 1])) || text[begin - 1] == '-')) --begin;
  while (end < text.size() && std::isdigit(static_cast<unsigned char>(text[end]))) ++end;
  return {begin, end - begin};
}

// Some number of the text, from `first` on, replaced by another.
void change_number(Random& random, std::string& text, size_t first) {
  const Place place = number_in(random, text, first);
  if (place.length == 0) return;
  std::string other = number(random, text.substr(place.begin, place.length));
  if (other.empty()) {
    const Place from = number_in(random, text, first);
    other = from.length == 0 ? "0" : text.substr(from.begin, from.length);
  }
  text.replace(place.begin, place.length, other);
}

std::string changed(const std::string& file, Random& random) {
  uint64_t length;
  std::memcpy(&length, file.data(), sizeof(length));
  std::string header = file.substr(8, length), tensors = file.substr(8 + length);
  static const std::string magic = std::string(x86quant::serving::kMagic) + std::to_string(x86quant::serving::kVersion) + " ";
  const size_t digits = header.find(magic) + magic.size();
  for (size_t times = 1 + below(random, 3); times > 0; --times) {
    switch (below(random, 8)) {
      case 0: header[digits + 8 + below(random, header.size() - digits - 8)] = static_cast<char>(32 + below(random, 95)); break;
      case 1: if (!tensors.empty()) tensors[below(random, tensors.size())] = static_cast<char>(random()); break;
      default: change_number(random, header, digits + 8);
    }
  }
  std::memcpy(&header[digits], "00000000", 8);
  length = header.size();
  std::string all(reinterpret_cast<const char*>(&length), sizeof(length));
  all += header + tensors;
  char crc[9];
  std::snprintf(crc, sizeof(crc), "%08x", x86quant::serving::crc32(all.data(), all.size()));
  std::memcpy(&all[8 + digits], crc, 8);
  return all;
}

// What a process ends with, or was ended for.
enum Outcome { kRan, kRefused, kNotRead, kLong, kOutcomes };

// Counts of lines are written where a process ends in order.
[[noreturn]] void end(Outcome outcome) {
#ifdef XQ_COUNTS_LINES
  std::exit(outcome);
#else
  _exit(outcome);
#endif
}

// What the first part of an input of zeros holds: nothing, mostly, so that more runs get to their end; numbers of 64 bits
// that may be places and sizes; or anything.
void fill(Random& random, uint8_t* data, size_t bytes) {
  bytes = std::min<size_t>(bytes, 1 << 16);
  switch (below(random, 4)) {
    case 0: case 1: return;
    case 2:
      for (size_t at = 0; at < bytes; at += 8) data[at] = static_cast<uint8_t>(below(random, 5));
      return;
    default:
      for (size_t at = 0; at < bytes; ++at) data[at] = static_cast<uint8_t>(random());
  }
}

// On inputs of zeros, or filled by `random`.
Outcome attempt(const std::string& file, const char* isa, Random* random = nullptr) {
  const int memory = memfd_create("program", 0);
  if (write(memory, file.data(), file.size()) != static_cast<ssize_t>(file.size())) std::abort();
  const std::string path = "/proc/self/fd/" + std::to_string(memory);
  const x86quant_options options{1, isa, nullptr};
  x86quant_program* program = nullptr;
  const int status = x86quant_load(path.c_str(), &options, &program);
  if (status == X86QUANT_DAMAGED || status == X86QUANT_WRONG_VERSION) return kNotRead;
  if (status != X86QUANT_OK) return kRefused;
  bool refused = false;
  for (size_t plan = 0; plan < x86quant_plans(program); ++plan) {
    // Memory of the very size, so that the sanitizer sees the byte behind it.
    std::vector<x86quant_tensor> inputs(x86quant_inputs(program)), outputs(x86quant_outputs(program));
    for (size_t i = 0; i < inputs.size(); ++i) {
      x86quant_input(program, plan, i, &inputs[i]);
      inputs[i].data = std::calloc(1, inputs[i].bytes);
      if (random != nullptr && inputs[i].data != nullptr) fill(*random, static_cast<uint8_t*>(inputs[i].data), inputs[i].bytes);
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      x86quant_output(program, plan, i, &outputs[i]);
      outputs[i].data = std::malloc(outputs[i].bytes);
    }
    refused |= x86quant_run(program, inputs.data(), inputs.size(), outputs.data(), outputs.size()) != X86QUANT_OK;
    for (const auto& tensor : inputs) std::free(tensor.data);
    for (const auto& tensor : outputs) std::free(tensor.data);
  }
  x86quant_free(program);
  return refused ? kRefused : kRan;
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

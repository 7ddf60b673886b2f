// Program files with random changes behind a right checksum, and what comes of them.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../../kernels/serving/crc32.h"
#include "../../../kernels/serving/program_file.h"
#include "x86quant/runtime.h"

namespace changed_programs {

using Random = std::mt19937_64;

inline size_t below(Random& random, size_t limit) { return static_cast<size_t>(random() % limit); }

inline std::string number(Random& random, const std::string& before) {
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
inline Place number_in(Random& random, const std::string& text, size_t first) {
  size_t at = first + below(random, text.size() - first);
  while (at < text.size() && !std::isdigit(static_cast<unsigned char>(text[at]))) ++at;
  size_t begin = at, end = at;
  while (begin > first && (std::isdigit(static_cast<unsigned char>(text[begin - 1])) || text[begin - 1] == '-')) --begin;
  while (end < text.size() && std::isdigit(static_cast<unsigned char>(text[end]))) ++end;
  return {begin, end - begin};
}

// Some number of the text, from `first` on, replaced by another.
inline void change_number(Random& random, std::string& text, size_t first) {
  const Place place = number_in(random, text, first);
  if (place.length == 0) return;
  std::string other = number(random, text.substr(place.begin, place.length));
  if (other.empty()) {
    const Place from = number_in(random, text, first);
    other = from.length == 0 ? "0" : text.substr(from.begin, from.length);
  }
  text.replace(place.begin, place.length, other);
}

inline const std::string& magic() {
  static const std::string words = std::string(x86quant::serving::kMagic) + std::to_string(x86quant::serving::kVersion) + " ";
  return words;
}

// Header and tensors as a file with the checksum that belongs to them; its digits are somewhere in the header.
inline std::string sealed(std::string header, const std::string& tensors) {
  const size_t digits = header.find(magic()) + magic().size();
  std::memcpy(&header[digits], "00000000", 8);
  const uint64_t length = header.size();
  std::string all(reinterpret_cast<const char*>(&length), sizeof(length));
  all += header + tensors;
  char crc[9];
  std::snprintf(crc, sizeof(crc), "%08x", x86quant::serving::crc32(all.data(), all.size()));
  std::memcpy(&all[8 + digits], crc, 8);
  return all;
}

inline std::string changed(const std::string& file, Random& random) {
  uint64_t length;
  std::memcpy(&length, file.data(), sizeof(length));
  std::string header = file.substr(8, length), tensors = file.substr(8 + length);
  const size_t digits = header.find(magic()) + magic().size();
  for (size_t times = 1 + below(random, 3); times > 0; --times) {
    switch (below(random, 8)) {
      case 0: header[digits + 8 + below(random, header.size() - digits - 8)] = static_cast<char>(32 + below(random, 95)); break;
      case 1: if (!tensors.empty()) tensors[below(random, tensors.size())] = static_cast<char>(random()); break;
      default: change_number(random, header, digits + 8);
    }
  }
  return sealed(header, tensors);
}

// What a process ends with, or was ended for.
enum Outcome { kRan, kRefused, kNotRead, kLong, kOutcomes };

// What the first part of an input of zeros holds: nothing, mostly, so that more runs get to their end; numbers of 64 bits
// that may be places and sizes; or anything.
inline void fill(Random& random, uint8_t* data, size_t bytes) {
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

// The program in a file of these bytes, or why there is none.
inline x86quant_program* loaded(const std::string& file, const char* isa, Outcome& outcome) {
  const int memory = memfd_create("program", 0);
  if (write(memory, file.data(), file.size()) != static_cast<ssize_t>(file.size())) std::abort();
  const std::string path = "/proc/self/fd/" + std::to_string(memory);
  const x86quant_options options{1, isa, nullptr};
  x86quant_program* program = nullptr;
  const int status = x86quant_load(path.c_str(), &options, &program);
  close(memory);
  const bool unread = status == X86QUANT_DAMAGED || status == X86QUANT_WRONG_VERSION;
  outcome = unread ? kNotRead : status == X86QUANT_OK ? kRan : kRefused;
  return outcome == kRan ? program : nullptr;
}

// Runs all plans on inputs of zeros, or filled by `random`, and frees the program.
inline Outcome run(x86quant_program* program, Random* random) {
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

}  // namespace changed_programs

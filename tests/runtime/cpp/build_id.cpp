#include "runtime/build_id.h"

#include <elf.h>

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"

using x86quant::runtime::build_id;
using x86quant::runtime::build_id_of_notes;

namespace {

std::string padded(std::string text) {
  text.resize((text.size() + 3) / 4 * 4, '#');
  return text;
}

std::string note(uint32_t type, const std::string& name, const std::string& text) {
  const uint32_t head[] = {static_cast<uint32_t>(name.size()), static_cast<uint32_t>(text.size()), type};
  return std::string(reinterpret_cast<const char*>(head), sizeof(head)) + padded(name) + padded(text);
}

// In memory of just this size, so that AddressSanitizer and valgrind see a byte too many.
std::string found(const std::string& notes, size_t size) {
  const std::vector<char> exact(notes.begin(), notes.begin() + static_cast<ptrdiff_t>(size));
  return build_id_of_notes(exact.data(), exact.size());
}

}  // namespace

int main() {
  const std::string gnu("GNU", 4), id("seven..");
  const std::string mine = note(NT_GNU_BUILD_ID, gnu, id);
  CHECK(found(mine, mine.size()) == id);
  for (size_t size = 0; size < mine.size(); ++size) CHECK(found(mine, size).empty());  // what is cut has none
  const std::string others[] = {
      note(NT_GNU_BUILD_ID, std::string("GNV", 4), id),  // another's
      note(NT_GNU_BUILD_ID, std::string("GNU", 3), id),
      note(NT_GNU_BUILD_ID, std::string("GNU\0", 5), id),
      note(NT_GNU_BUILD_ID + 1, gnu, id),                // of another kind
      note(NT_GNU_BUILD_ID, "", ""),
      note(NT_GNU_ABI_TAG, "a longer name", "and text"),
  };
  std::string all;
  for (const std::string& other : others) {
    CHECK(found(other, other.size()).empty());
    CHECK(found(other + mine, other.size() + mine.size()) == id);  // behind it
    all += other;
  }
  CHECK(found(all, all.size()).empty());
  CHECK(found(all + mine, all.size() + mine.size()) == id);
  // Sizes beyond 32 bits once they are rounded up, and beyond what is there.
  for (const uint32_t size : {0xFFFFFFFFu, 0xFFFFFFFCu, 0x80000000u}) {
    for (const int place : {0, 4}) {
      std::string forged = mine;
      forged.replace(static_cast<size_t>(place), 4, reinterpret_cast<const char*>(&size), 4);
      CHECK(found(forged + mine, forged.size() + mine.size()).empty());
    }
  }
  // This program's own.
  const std::string own = build_id();
  CHECK(own.size() == 20 && own == build_id());
  for (const char byte : own) std::printf("%02x", static_cast<unsigned char>(byte));
  std::printf("\n");
}

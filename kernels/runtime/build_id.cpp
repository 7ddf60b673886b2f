#include "build_id.h"

#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstring>

namespace x86quant::runtime {

std::string build_id_of_notes(const char* at, size_t size) {
  const auto whole = [](uint32_t length) { return (size_t{length} + 3) / 4 * 4; };  // each part ends at a word
  for (ElfW(Nhdr) note; size >= sizeof(note);) {
    std::memcpy(&note, at, sizeof(note));
    at += sizeof(note), size -= sizeof(note);
    const char* name = at;
    const char* text = at + whole(note.n_namesz);
    const size_t rest = whole(note.n_namesz) + whole(note.n_descsz);
    if (rest > size) return {};
    const bool gnu = note.n_namesz == sizeof("GNU") && std::memcmp(name, "GNU", sizeof("GNU")) == 0;
    if (gnu && note.n_type == NT_GNU_BUILD_ID) return {text, note.n_descsz};
    at += rest, size -= rest;
  }
  return {};
}

std::string build_id() {
  std::string found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        const auto here = reinterpret_cast<uintptr_t>(&build_id);
        bool mine = false;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const ElfW(Phdr)& part = info->dlpi_phdr[i];
          mine |= part.p_type == PT_LOAD && here - info->dlpi_addr - part.p_vaddr < part.p_memsz;
        }
        auto& id = *static_cast<std::string*>(to);
        for (int i = 0; mine && i < info->dlpi_phnum && id.empty(); ++i) {
          const ElfW(Phdr)& part = info->dlpi_phdr[i];
          const auto* at = reinterpret_cast<const char*>(info->dlpi_addr + part.p_vaddr);
          if (part.p_type == PT_NOTE) id = build_id_of_notes(at, part.p_memsz);
        }
        return mine ? 1 : 0;
      },
      &found);
  return found;
}

}  // namespace x86quant::runtime

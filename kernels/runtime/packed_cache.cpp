#include "packed_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "build_id.h"
#include "whole_file.h"

namespace x86quant::runtime {
namespace {

constexpr uint64_t kAlign = 64;
constexpr char kMagic[8] = {'x', '8', '6', 'q', 'p', 'a', 'c', '3'};

// The file: this, the key, the sizes, then from a multiple of 64 on each the packed weights.
struct Head {
  char magic[8];
  uint32_t sum;  // of everything behind the head
  uint32_t key_bytes;
  uint64_t count;
};

uint64_t aligned(uint64_t size) { return (size + kAlign - 1) / kAlign * kAlign; }

// Of what lies on from `at`, by the instruction that CPUs have for it: at the rate of memory, where a table takes as
// long as ordering the weights. Four sums run side by side, since each step of one waits for the one before.
__attribute__((target("sse4.2"))) uint32_t checksum(const uint8_t* at, size_t size) {
  constexpr size_t kSums = 4, kWord = sizeof(uint64_t);
  uint64_t sums[kSums] = {0, 1, 2, 3};
  for (; size >= kSums * kWord; size -= kSums * kWord, at += kSums * kWord) {
    uint64_t words[kSums];
    std::memcpy(words, at, sizeof(words));
    for (size_t i = 0; i < kSums; ++i) sums[i] = __builtin_ia32_crc32di(sums[i], words[i]);
  }
  uint64_t all = 0;
  for (const uint64_t sum : sums) all = __builtin_ia32_crc32di(all, sum);
  for (; size > 0; --size, ++at) all = __builtin_ia32_crc32qi(static_cast<uint32_t>(all), *at);
  return static_cast<uint32_t>(all);
}

// Whether only this user, or root, can have written it.
bool is_ours(const FileFacts& facts) {
  return facts.is_regular && (facts.owner == geteuid() || facts.owner == 0) && (facts.mode & (S_IWGRP | S_IWOTH)) == 0;
}

}  // namespace

std::string CacheKey::text() const {
  std::string hex;
  for (const char byte : build_id()) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(byte));
    hex += digits;
  }
  return hex + " " + level + " " + std::to_string(l1) + " " + std::to_string(l2) + " " + model;
}

std::optional<std::vector<Table>> read_packed(const std::string& path, const CacheKey& key, std::string* why) {
  const auto refused = [&](const char* reason) -> std::optional<std::vector<Table>> {
    if (why != nullptr) *why = reason;
    return std::nullopt;
  };
  if (build_id().empty()) return refused("this build of the library has no id to know its own by");
  const auto file = std::make_shared<WholeFile>();
  errno = 0;
  if (!file->read(path, is_ours)) {
    if (errno == ENOENT) return refused("there is none yet");
    return refused(errno == EINVAL ? "it is no file that only this user or root may write to" : "it cannot be read");
  }
  if (file->size() < sizeof(Head)) return refused("it is damaged");
  const uint8_t* data = file->data();
  Head head;
  std::memcpy(&head, data, sizeof(head));
  const std::string wanted = key.text();
  const uint64_t room = file->size() - sizeof(head);
  if (std::memcmp(head.magic, kMagic, sizeof(kMagic)) != 0) return refused("it is another kind of file");
  if (head.key_bytes > room || head.count > (room - head.key_bytes) / sizeof(uint64_t) ||
      checksum(data + sizeof(head), room) != head.sum)
    return refused("it is damaged");
  if (head.key_bytes != wanted.size() || std::memcmp(data + sizeof(head), wanted.data(), wanted.size()) != 0)
    return refused("it is of another model, another build of x86quant or another CPU");
  std::vector<Table> found;
  const uint64_t sizes = sizeof(head) + wanted.size();
  uint64_t at = aligned(sizes + head.count * sizeof(uint64_t));
  for (uint64_t i = 0; i < head.count; ++i) {
    uint64_t size;
    std::memcpy(&size, data + sizes + i * sizeof(size), sizeof(size));
    if (at > file->size() || size > file->size() - at) return refused("it is damaged");
    found.push_back({data + at, Type::kByte, static_cast<int64_t>(size), file});
    at += aligned(size);
  }
  return found;
}

bool write_packed(const std::string& path, const CacheKey& key, const std::vector<Table>& packed) {
  if (build_id().empty()) return false;
  const std::string text = key.text();
  std::string all(sizeof(Head), '\0');
  all += text;
  for (const Table& blob : packed) {
    const auto size = static_cast<uint64_t>(blob.count);
    all.append(reinterpret_cast<const char*>(&size), sizeof(size));
  }
  for (const Table& blob : packed) {
    all.resize(aligned(all.size()));
    all.append(blob.as<char>(), static_cast<size_t>(blob.count));
  }
  Head head{};
  std::memcpy(head.magic, kMagic, sizeof(kMagic));
  head.key_bytes = static_cast<uint32_t>(text.size());
  head.count = packed.size();
  head.sum = checksum(reinterpret_cast<const uint8_t*>(all.data()) + sizeof(head), all.size() - sizeof(head));
  std::memcpy(&all[0], &head, sizeof(head));
  // Written aside and moved into place: no reader sees half of it.
  std::string aside = path + ".XXXXXX";
  const int file = mkstemp(&aside[0]);
  if (file < 0) return false;
  size_t done = 0;
  for (ssize_t count; done < all.size() && (count = write(file, all.data() + done, all.size() - done)) > 0;)
    done += static_cast<size_t>(count);
  const bool written = close(file) == 0 && done == all.size() && rename(aside.c_str(), path.c_str()) == 0;
  if (!written) unlink(aside.c_str());
  return written;
}

}  // namespace x86quant::runtime

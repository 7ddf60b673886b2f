#include "runtime/packed_cache.h"

#include <sys/stat.h>

#include <cstring>
#include <random>

#include "check.h"

using namespace x86quant::runtime;

namespace {

std::mt19937 random_bits(0);

size_t below(size_t end) { return std::uniform_int_distribution<size_t>(0, end - 1)(random_bits); }

std::vector<std::string> any_blobs() {
  std::vector<std::string> made(below(40));
  for (std::string& blob : made) {
    blob.resize(below(300));
    for (char& byte : blob) byte = static_cast<char>(below(256));
  }
  return made;
}

// What is written is what is read, wherever parts begin and end; each at a multiple of 64.
void round_trip(const std::string& path) {
  const CacheKey key{"level", static_cast<int64_t>(below(2000)), 1, std::string(below(130), 'm')};
  const std::vector<std::string> blobs = any_blobs();
  std::vector<Table> packed;
  for (const std::string& blob : blobs) packed.push_back({blob.data(), Type::kByte, static_cast<int64_t>(blob.size()), {}});
  CHECK(write_packed(path, key, packed));
  const auto found = read_packed(path, key);
  CHECK(found && found->size() == blobs.size());
  for (size_t i = 0; i < blobs.size(); ++i) {
    const Table& table = (*found)[i];
    CHECK(table.type == Type::kByte && table.count == static_cast<int64_t>(blobs[i].size()));
    CHECK(reinterpret_cast<uintptr_t>(table.data) % 64 == 0);
    CHECK(blobs[i].empty() || std::memcmp(table.data, blobs[i].data(), blobs[i].size()) == 0);
  }
}

void others_are_not_read(const std::string& path) {
  const CacheKey key{"level", 1, 2, "model"};
  const CacheKey others[] = {{"leveL", 1, 2, "model"}, {"level", 0, 2, "model"}, {"level", 1, 3, "model"},
                             {"level", 1, 2, "mode"},  {"level", 1, 2, "model2"}};
  CHECK(write_packed(path, key, {}) && read_packed(path, key));
  for (const CacheKey& other : others) {
    std::string why;
    CHECK(!read_packed(path, other, &why) && why.find("another model") != std::string::npos);
  }
  for (const mode_t mode : {0620u, 0602u, 0666u}) CHECK(chmod(path.c_str(), mode) == 0 && !read_packed(path, key));
  CHECK(chmod(path.c_str(), 0644) == 0 && read_packed(path, key));
}

}  // namespace

int main(int, char** arguments) {
  const std::string path = arguments[1];
  for (int i = 0; i < 300; ++i) round_trip(path);
  others_are_not_read(path);
  CHECK(!write_packed(path + "/below", {"level", 1, 2, "model"}, {}));
}

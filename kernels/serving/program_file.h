// A program file: a safetensors file whose one metadata entry is a checksum and a JSON manifest.
//
//     __metadata__ = {"x86quant": "x86quant-program <version> <crc32>\n<manifest>"}
//
// The checksum covers every byte of the file, its own 8 digits taken as zeros. It tells damage; it is no signature,
// so everything behind it is checked as if a stranger had written it.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "../runtime/table.h"
#include "../runtime/whole_file.h"
#include "json.h"
#include "sha256.h"

namespace x86quant::serving {

constexpr std::string_view kMagic = "x86quant-program ";
constexpr int kVersion = 5;
constexpr int kOldestRead = 4;       // what the first release wrote
constexpr int kFirstWithSlopes = 5;  // layers say their slopes

class ProgramFile {
 public:
  // Throws a Failure, or a Refused where the checksum is right and the content impossible.
  explicit ProgramFile(const std::string& path);

  int version() const { return version_; }
  const Json& manifest() const { return manifest_; }
  size_t bytes() const { return bytes_.size(); }
  // What no other file has, whoever made it.
  std::string digest() const { return sha256(bytes_.data(), bytes_.size()); }

  struct Tensor {
    runtime::Table table;
    std::vector<int64_t> sizes;
  };
  // Valid as long as this is.
  const Tensor& tensor(const std::string& name) const;

 private:
  void parse();
  Tensor described(const Json& entry, size_t first_byte) const;

  runtime::WholeFile bytes_;
  int version_ = 0;
  Json manifest_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace x86quant::serving

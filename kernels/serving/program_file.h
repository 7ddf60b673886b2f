// A program file: a safetensors file whose one metadata entry is a checksum and a JSON manifest.
//
//     __metadata__ = {"x86quant": "x86quant-program <version> <crc32>\n<manifest>"}
//
// The checksum covers every byte of the file, its own 8 digits taken as zeros. It tells damage; it is no signature,
// so everything behind it is checked as if a stranger had written it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "../runtime/table.h"
#include "../runtime/whole_file.h"
#include "json.h"

namespace x86quant::serving {

class ProgramFile {
 public:
  // Throws a Failure, or a Refused where the checksum is right and the content impossible.
  explicit ProgramFile(const std::string& path);

  const Json& manifest() const { return manifest_; }
  uint32_t checksum() const { return checksum_; }
  size_t size() const { return bytes_.size(); }

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
  uint32_t checksum_ = 0;
  Json manifest_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace x86quant::serving

#include "program_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "crc32.h"
#include "failure.h"
#include "x86quant/runtime.h"

namespace x86quant::serving {
namespace {

constexpr size_t kDigits = 8;
constexpr size_t kLengthBytes = 8;
constexpr size_t kMostHeader = size_t{64} << 20;

[[noreturn]] void damaged(const std::string& why) { throw Failure(X86QUANT_DAMAGED, why); }

runtime::Type type_of(const std::string& dtype) {
  if (dtype == "F32") return runtime::Type::kFloat;
  if (dtype == "F16") return runtime::Type::kHalf;
  if (dtype == "I8") return runtime::Type::kChar;
  if (dtype == "I32") return runtime::Type::kInt;
  require(dtype == "U8", "a tensor has dtype ", dtype);
  return runtime::Type::kByte;
}

}  // namespace

ProgramFile::ProgramFile(const std::string& path) {
  if (!bytes_.read(path, [](const runtime::FileFacts& facts) { return facts.is_regular; }))
    throw Failure(X86QUANT_CANNOT_READ, "cannot read ", path, ": ",
                  errno == EINVAL ? "it is no regular file" : std::strerror(errno));
  parse();
}

void ProgramFile::parse() {
  const size_t size = bytes_.size();
  uint64_t length = 0;
  if (size < kLengthBytes) damaged("the file is truncated, or is no program file");  // with as many: same either way
  std::memcpy(&length, bytes_.data(), kLengthBytes);
  if (length > kMostHeader || length > size - kLengthBytes) damaged("the file is truncated, or is no program file");
  const std::string_view whole(reinterpret_cast<const char*>(bytes_.data()), size);
  const std::string_view header = whole.substr(kLengthBytes, length);

  const size_t magic = header.find(kMagic);
  if (magic == std::string_view::npos) damaged("the file is no program file: x86quant export-program writes them");
  const size_t space = header.find(' ', magic + kMagic.size());
  if (space == std::string_view::npos || space + 1 + kDigits > header.size()) damaged("the file is damaged");
  const std::string version(header.substr(magic + kMagic.size(), space - magic - kMagic.size()));
  for (int known = kOldestRead; known <= kVersion; ++known)
    if (version == std::to_string(known)) version_ = known;
  if (version_ == 0)
    throw Failure(X86QUANT_WRONG_VERSION, "the file has format version ", version.substr(0, 16),
                  ", and this library reads versions ", kOldestRead, " to ", kVersion, ": export the program again");
  const size_t digits = kLengthBytes + space + 1;
  uint32_t crc = crc32(whole.data(), digits);
  crc = crc32("00000000", kDigits, crc);
  crc = crc32(whole.data() + digits + kDigits, size - digits - kDigits, crc);
  char expected[] = "00000000";
  std::snprintf(expected, sizeof(expected), "%08x", crc);
  if (whole.substr(digits, kDigits) != expected)
    damaged("the file's checksum is wrong: it is damaged; copy it, or export the program, again");

  const Json all = Json::parse(header);
  const size_t first_byte = kLengthBytes + length;
  size_t left = size - first_byte;
  for (const auto& [name, entry] : all.object("the header")) {
    if (name == "__metadata__") continue;
    const Tensor& tensor = tensors_.emplace(name, described(entry, first_byte)).first->second;
    const size_t bytes = static_cast<size_t>(tensor.table.count) * runtime::bytes_of(tensor.table.type);
    require(bytes <= left, "tensors of the file lie over each other");
    left -= bytes;
  }
  const std::string& text = all.at("__metadata__").at("x86quant").text("the manifest");
  const size_t line = text.find('\n');
  require(line != std::string::npos, "the manifest is missing");
  manifest_ = Json::parse(std::string_view(text).substr(line + 1));
}

ProgramFile::Tensor ProgramFile::described(const Json& entry, size_t first_byte) const {
  Tensor found;
  const runtime::Type type = type_of(entry.at("dtype").text("a dtype"));
  found.sizes = entry.at("shape").integers("a shape");
  int64_t count = 1;
  for (const int64_t size : found.sizes)
    require(size >= 0 && !__builtin_mul_overflow(count, size, &count), "a tensor of the file has an impossible shape");
  const std::vector<int64_t> offsets = entry.at("data_offsets").integers("an offset");
  const auto room = static_cast<int64_t>(bytes_.size() - first_byte);
  require(offsets.size() == 2 && offsets[0] >= 0 && offsets[0] <= offsets[1] && offsets[1] <= room,
          "a tensor of the file lies outside of it");
  require(count <= room && offsets[1] - offsets[0] == count * static_cast<int64_t>(runtime::bytes_of(type)),
          "a tensor of the file has not the size of its shape");
  found.table.data = bytes_.data() + first_byte + offsets[0];
  found.table.type = type;
  found.table.count = count;
  return found;
}

const ProgramFile::Tensor& ProgramFile::tensor(const std::string& name) const {
  const auto found = tensors_.find(name);
  require(found != tensors_.end(), "the file has no tensor ", name);
  return found->second;
}

}  // namespace x86quant::serving

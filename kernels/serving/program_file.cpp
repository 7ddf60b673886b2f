#include "program_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "crc32.h"
#include "failure.h"
#include "x86quant/runtime.h"

namespace x86quant::serving {
namespace {

constexpr int kVersion = 1;
constexpr std::string_view kMagic = "x86quant-program ";
constexpr size_t kDigits = 8;
constexpr size_t kLengthBytes = 8;
constexpr size_t kMostHeader = size_t{64} << 20;

struct Descriptor {
  explicit Descriptor(int opened) : number(opened) {}
  ~Descriptor() {
    if (number >= 0) close(number);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number;
};

[[noreturn]] void damaged(const std::string& why) { throw Failure(X86QUANT_DAMAGED, why); }

struct Kind {
  runtime::Type type;
  size_t bytes;
};

Kind kind_of(const std::string& dtype) {
  if (dtype == "F32") return {runtime::Type::kFloat, 4};
  if (dtype == "I8") return {runtime::Type::kChar, 1};
  require(dtype == "U8", "a tensor has dtype ", dtype);
  return {runtime::Type::kByte, 1};
}

}  // namespace

ProgramFile::ProgramFile(const std::string& path) {
  read(path);
  parse();
}

void ProgramFile::read(const std::string& path) {
  // Opened without waiting: a pipe that nobody writes to would hang.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat facts{};
  if (file.number < 0 || fstat(file.number, &facts) != 0)
    throw Failure(X86QUANT_CANNOT_READ, "cannot read ", path, ": ", std::strerror(errno));
  if (!S_ISREG(facts.st_mode)) throw Failure(X86QUANT_CANNOT_READ, "cannot read ", path, ": it is no regular file");
  size_ = static_cast<size_t>(facts.st_size);
  bytes_ = runtime::Buffer(size_);
  for (size_t done = 0; done < size_;) {
    const ssize_t count = ::read(file.number, bytes_.data() + done, size_ - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw Failure(X86QUANT_CANNOT_READ, "cannot read ", path, ": ", std::strerror(errno));
    if (count == 0) damaged(path + " became shorter while it was read");
    done += static_cast<size_t>(count);
  }
}

void ProgramFile::parse() {
  uint64_t length = 0;
  if (size_ < kLengthBytes) damaged("the file is truncated, or is no program file");
  std::memcpy(&length, bytes_.data(), kLengthBytes);
  if (length > kMostHeader || length > size_ - kLengthBytes) damaged("the file is truncated, or is no program file");
  const std::string_view whole(reinterpret_cast<const char*>(bytes_.data()), size_);
  const std::string_view header = whole.substr(kLengthBytes, length);

  const size_t magic = header.find(kMagic);
  if (magic == std::string_view::npos) damaged("the file is no program file: x86quant export-program writes them");
  const size_t space = header.find(' ', magic + kMagic.size());
  if (space == std::string_view::npos || space + 1 + kDigits > header.size()) damaged("the file is damaged");
  const std::string version(header.substr(magic + kMagic.size(), space - magic - kMagic.size()));
  if (version != std::to_string(kVersion))
    throw Failure(X86QUANT_WRONG_VERSION, "the file has format version ", version.substr(0, 16),
                  ", and this library reads version ", kVersion, ": export the program again");
  const size_t digits = kLengthBytes + space + 1;
  uint32_t crc = crc32(whole.data(), digits);
  crc = crc32("00000000", kDigits, crc);
  crc = crc32(whole.data() + digits + kDigits, size_ - digits - kDigits, crc);
  char expected[kDigits + 1];
  std::snprintf(expected, sizeof(expected), "%08x", crc);
  if (whole.substr(digits, kDigits) != expected)
    damaged("the file's checksum is wrong: it is damaged; copy it, or export the program, again");

  const Json all = Json::parse(header);
  const size_t first_byte = kLengthBytes + length;
  for (const auto& [name, entry] : all.object("the header"))
    if (name != "__metadata__") tensors_.emplace(name, described(entry, first_byte));
  const std::string& text = all.at("__metadata__").at("x86quant").text("the manifest");
  const size_t line = text.find('\n');
  require(line != std::string::npos, "the manifest is missing");
  manifest_ = Json::parse(std::string_view(text).substr(line + 1));
}

ProgramFile::Tensor ProgramFile::described(const Json& entry, size_t first_byte) const {
  Tensor found;
  const Kind kind = kind_of(entry.at("dtype").text("a dtype"));
  found.sizes = entry.at("shape").integers("a shape");
  int64_t count = 1;
  for (const int64_t size : found.sizes)
    require(size >= 0 && !__builtin_mul_overflow(count, size, &count), "a tensor of the file has an impossible shape");
  const std::vector<int64_t> offsets = entry.at("data_offsets").integers("an offset");
  const auto room = static_cast<int64_t>(size_ - first_byte);
  require(offsets.size() == 2 && offsets[0] >= 0 && offsets[0] <= offsets[1] && offsets[1] <= room,
          "a tensor of the file lies outside of it");
  require(count <= room && offsets[1] - offsets[0] == count * static_cast<int64_t>(kind.bytes),
          "a tensor of the file has not the size of its shape");
  found.table.data = bytes_.data() + first_byte + offsets[0];
  found.table.type = kind.type;
  found.table.count = count;
  return found;
}

const ProgramFile::Tensor& ProgramFile::tensor(const std::string& name) const {
  const auto found = tensors_.find(name);
  require(found != tensors_.end(), "the file has no tensor ", name);
  return found->second;
}

}  // namespace x86quant::serving

// What a provider of convolutions gives the runtime: packed weights that run on plain memory.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../native/native.h"
#include "exported.h"
#include "table.h"

namespace x86quant::runtime {

// A convolution or linear layer (a kernel of 1) in the terms of native.h, with what it owns.
struct ConvDescription {
  xq_conv conv{};
  xq_requant requant{};           // its pointers are those of the tables below
  int64_t in_each = 0;            // input channels that an output sees
  Table weight;                   // int8: (out, in / groups, kd, kh, kw)
  Table mult;                     // float, one an output channel
  std::optional<Table> bias, lut, slopes;
  std::optional<Table> packed;    // what `blob` of such a pack was, 64-byte aligned

  // Of one output.
  int64_t products() const { return in_each * conv.kernel[0] * conv.kernel[1] * conv.kernel[2]; }
};

// What a plan says of one, unchecked.
struct ConvFields {
  Table weight;                       // of `sizes`
  std::vector<int64_t> sizes;         // (out, in / groups, kd, kh, kw)
  Table mult;
  std::optional<Table> bias, lut;
  std::vector<int64_t> geometry;      // kernel, stride, padding and dilation, three entries each; groups, transposed; perhaps pixels
  std::vector<int64_t> codes;         // in_zp, out_zp, lo, hi, residual, res_zp
  double res_mult = 0;
  std::optional<Table> slopes;
};

// Throws a Refused unless everything fits.
ConvDescription describe_conv(ConvFields fields);

struct ConvCall {
  xq_tensor in, out, residual;  // residual.data is null when there is none
};

// Thread safe once constructed: `run` may be called from several threads at a time.
class PackedConv {
 public:
  explicit PackedConv(const ConvDescription& d) : products_(d.products()) {}
  virtual ~PackedConv() = default;
  // Throws when it cannot run a call of these shapes. Data pointers are not looked at beyond null.
  virtual void check(const ConvCall& call) const = 0;
  // Runs on the pool of threads unless already inside it.
  virtual void run(const ConvCall& call) const = 0;
  // Nanoseconds of a call with such an output on one thread, roughly.
  X86QUANT_EXPORTED double nanoseconds(const xq_tensor& out) const;
  // Whether `run` gathers threads in its own way, which the runtime's must not be in.
  virtual bool has_own_threads() const { return false; }
  virtual int64_t bytes() const = 0;
  // The packed weights as one stretch of memory, where they are that; kept as long as the table is.
  virtual Table blob() const { return {}; }

 private:
  int64_t products_;  // of one output
};

using PackedConvPtr = std::shared_ptr<const PackedConv>;
using PackConv = std::function<PackedConvPtr(ConvDescription)>;

// Declared once, by a static object in the provider's folder.
struct X86QUANT_EXPORTED RegisterConvKernel {
  RegisterConvKernel(const std::string& name, PackConv pack);
};

PackedConvPtr pack_conv(const std::string& kernel, ConvDescription description);

}  // namespace x86quant::runtime

// Packed weights of products of row codes, and running what the native kernels do to rows and heads.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../native/native_rows.h"
#include "memory.h"
#include "scratch.h"
#include "table.h"

namespace x86quant::runtime {

// A linear: codes, scales and perhaps a bias for each output. Without groups int8 (out, in) and a float32 scale an output;
// else as kernels/native/groups.h says.
struct RowWeights {
  const void* weight;
  const void* scale;
  const float* bias;  // or null
  int64_t in_features, out_features;
  int32_t groups = 0, bits = 8;
  bool half = false, offsets = false;
  int32_t unpack_from = 0, unpack_to = 0;  // see kernels/native/groups.h
};

// Bytes of these weights, packed for the level in use; 0 where the native kernels refuse them.
size_t packed_size_of(const RowWeights& weights, int32_t activation);
// Packs them to so many bytes. Throws what is wrong with them.
void pack_weights(const RowWeights& weights, int32_t activation, void* packed);
// Whether memory of that size may hold what that has packed.
bool is_packed_of(const RowWeights& weights, int32_t activation, const void* packed);

// Weights packed once: of one product, or of two whose results are multiplied. `before` is what was packed of the same
// weights, one of `blobs`.
class RowPack {
 public:
  RowPack(const RowWeights& weights, int32_t activation,  // an xq_activation
          const std::optional<Table>& before = std::nullopt);

  void multiply_by(const RowWeights& up, const std::optional<Table>& before = std::nullopt);

  int64_t in_features() const { return in_; }
  int64_t out_features() const { return out_; }
  int64_t bytes() const { return packed_.count + up_.count; }
  // The packed weights of each product.
  std::vector<Table> blobs() const;

  // A call on so many rows, without its operands and results.
  xq_rows call(int64_t rows) const;

 private:
  Table pack(const RowWeights& weights, int32_t activation, const std::optional<Table>& before) const;

  int isa_;
  int64_t in_, out_;
  Table packed_, up_;
};

using RowPackPtr = std::shared_ptr<const RowPack>;

// The scale and zero point of each of some rows whose codes all have the same: a call reads one a row.
class SameScale {
 public:
  SameScale(int64_t rows, float scale, int32_t zp);
  void give(xq_codes& rows) const;

 private:
  int64_t rows_;
  Scratch memory_;
};

// How many threads a call is worth. Without a product `in_features` is 0.
int64_t shares_of_rows(const xq_rows& op, int64_t in_features);
int64_t shares_of_attention(const xq_attention& op);

// Runs a call that has its operands, on as many threads as it is worth.
void run_rows(xq_rows& op, int64_t in_features);

// The same for attention.
void run_attention(xq_attention& op);

}  // namespace x86quant::runtime

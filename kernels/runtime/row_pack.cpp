#include "row_pack.h"

#include <algorithm>
#include <initializer_list>
#include <stdexcept>

#include "errors.h"
#include "native_cpu.h"
#include "packing.h"
#include "parallel.h"
#include "weights_memory.h"

namespace x86quant::runtime {
namespace {

// Less work than these is not worth waking a thread for: some microseconds of it.
constexpr double kFloatsEach = 30'000, kAttentionProductsEach = 500'000;

double products_each(int isa) { return isa == XQ_ISA_AMX_INT8 ? 4'000'000 : 1'000'000; }

double product_of(std::initializer_list<int64_t> sizes) {
  double product = 1;
  for (const int64_t size : sizes) product *= static_cast<double>(size);
  return product;
}

// Of any amount of work: an integer could not count it all.
int64_t shares(double count) { return static_cast<int64_t>(std::min(count, 1e9)); }

xq_linear plain_of(const RowWeights& w, int32_t activation) {
  return {static_cast<int32_t>(w.in_features), static_cast<int32_t>(w.out_features), activation};
}

xq_groups groups_of(const RowWeights& w, int32_t activation) {
  return {static_cast<int32_t>(w.in_features), static_cast<int32_t>(w.out_features), activation, w.groups, w.bits, w.half, w.offsets,
          w.unpack_from, w.unpack_to};
}

}  // namespace

size_t packed_size_of(const RowWeights& weights, int32_t activation) {
  if (weights.groups) {
    const xq_groups groups = groups_of(weights, activation);
    return xq_groups_packed_size(&groups, native_isa());
  }
  const xq_linear plain = plain_of(weights, activation);
  return xq_linear_packed_size(&plain, native_isa());
}

void pack_weights(const RowWeights& weights, int32_t activation, void* packed) {
  const xq::Share share = share_of_packing(weights.in_features * weights.out_features);
  if (weights.groups) {
    const xq_groups groups = groups_of(weights, activation);
    return succeed(xq::pack_groups_shared(&groups, native_isa(), weights.weight, weights.scale, weights.bias, packed, share));
  }
  const xq_linear plain = plain_of(weights, activation);
  succeed(xq::pack_linear_shared(&plain, native_isa(), static_cast<const int8_t*>(weights.weight),
                                 static_cast<const float*>(weights.scale), weights.bias, packed, share));
}

bool is_packed_of(const RowWeights& weights, int32_t activation, const void* packed) {
  if (weights.groups) {
    const xq_groups groups = groups_of(weights, activation);
    return xq::is_groups_packed_for(&groups, native_isa(), packed);
  }
  const xq_linear plain = plain_of(weights, activation);
  return xq::is_linear_packed_for(&plain, native_isa(), packed);
}

RowPack::RowPack(const RowWeights& weights, int32_t activation, const std::optional<Table>& before)
    : isa_(native_isa()),
      in_(weights.in_features),
      out_(weights.out_features),
      packed_(pack(weights, activation, before)) {}

void RowPack::multiply_by(const RowWeights& up, const std::optional<Table>& before) {
  require(up.out_features == out_ && up.in_features == in_, "gate and up must have one shape");
  up_ = pack(up, XQ_ACT_NONE, before);
}

std::vector<Table> RowPack::blobs() const {
  if (up_.count == 0) return {packed_};
  return {packed_, up_};
}

xq_rows RowPack::call(int64_t rows) const {
  xq_rows op{};
  op.isa = isa_, op.rows = rows, op.features = out_;
  op.packed = packed_.data, op.up = up_.data;
  return op;
}

Table RowPack::pack(const RowWeights& weights, int32_t activation, const std::optional<Table>& before) const {
  const size_t size = packed_size_of(weights, activation);
  if (size == 0) throw std::runtime_error(joined("the native kernel refuses this linear"));
  if (fits(before, size) && is_packed_of(weights, activation, before->data)) return *before;
  const auto fresh = std::make_shared<Buffer>(among_others(size));
  pack_weights(weights, activation, fresh->data());
  return {fresh->data(), Type::kByte, static_cast<int64_t>(size), fresh};
}

SameScale::SameScale(int64_t rows, float scale, int32_t zp)
    : rows_(rows), memory_(static_cast<size_t>(rows) * (sizeof(float) + sizeof(int32_t))) {
  xq_codes all{};
  give(all);
  std::fill_n(all.scale, rows, scale);
  std::fill_n(all.zp, rows, zp);
}

void SameScale::give(xq_codes& rows) const {
  rows.scale = reinterpret_cast<float*>(memory_.data());
  rows.zp = reinterpret_cast<int32_t*>(rows.scale + rows_);
}

int64_t shares_of_rows(const xq_rows& op, int64_t in_features) {
  const double floats = product_of({op.rows, op.features}), products = floats * product_of({in_features, op.up ? 2 : 1});
  return shares(products / products_each(op.isa)) + shares(floats / kFloatsEach);
}

int64_t shares_of_attention(const xq_attention& op) {
  return shares(product_of({2, op.batch, op.heads, op.queries, op.keys, op.size}) / kAttentionProductsEach);
}

void run_rows(xq_rows& op, int64_t in_features) {
  op.threads = useful_threads(shares_of_rows(op, in_features));
  succeed(xq_rows_check(&op));
  const Scratch shared(xq_rows_shared(&op));
  for (int phase = 0; phase < 2; ++phase)
    split(xq_rows_items(&op, phase), op.threads, [&](int64_t begin, int64_t end) {
      const Scratch mine(xq_rows_scratch(&op));
      xq_rows_run(&op, phase, begin, end, shared.data(), mine.data());
    });
}

void run_attention(xq_attention& op) {
  op.threads = useful_threads(shares_of_attention(op));
  succeed(xq_attention_check(&op));
  split(xq_attention_items(&op), op.threads, [&](int64_t begin, int64_t end) {
    const Scratch mine(xq_attention_scratch(&op));
    xq_attention_run(&op, begin, end, mine.data());
  });
}

}  // namespace x86quant::runtime

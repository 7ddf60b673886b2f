// Quantized embedding tables: any number of them, looked up in one call.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "../native/lookup.h"
#include "../runtime/lookup_faults.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"
#include "../runtime/view.h"

namespace x86quant::dynamic {

// Less than so many bytes of rows is not worth waking a thread for.
inline constexpr int64_t kBytesEach = 64 * 1024;
// Bags that are looked up in one table before the next one, and in a table that is alone.
inline constexpr int64_t kBagsAtOnce = 64;
inline constexpr int64_t kBagsOfOne = 1024;

using runtime::Type;
using runtime::View;

// Of tensors that the caller keeps.
class Tables {
 public:
  // geometry: for each table its dim, bits, codes_at, scale_at, half, mode and padding (-1: none).
  Tables(std::vector<View> rows, const std::vector<int64_t>& geometry, std::vector<std::string> names)
      : rows_(std::move(rows)), names_(std::move(names)) {
    constexpr size_t kEach = 7;
    X86QUANT_REQUIRE(!rows_.empty() && geometry.size() == kEach * rows_.size() && names_.size() == rows_.size(),
                      "malformed tables");
    for (size_t i = 0; i < rows_.size(); ++i) {
      const View& t = rows_[i];
      X86QUANT_REQUIRE(t.dims == 2 && t.type == Type::kByte && t.is_cpu && (t.stride(1) == 1 || t.size(1) <= 1),
                        "the rows of ", named(i), " must be uint8 [rows, bytes] on the CPU");
      const int64_t* g = geometry.data() + kEach * i;
      xq_lookup op{};
      op.rows = t.as<uint8_t>();
      op.row_count = t.size(0);
      op.row_stride = t.size(1);
      op.dim = static_cast<int32_t>(g[0]), op.bits = static_cast<int32_t>(g[1]);
      op.codes_at = static_cast<int32_t>(g[2]), op.scale_at = static_cast<int32_t>(g[3]);
      op.half = g[4] != 0, op.mode = static_cast<int32_t>(g[5]), op.padding = g[6];
      op.isa = native_isa();
      const int status = xq_lookup_check(&op);  // of the row as it is, then of where the next one lies
      X86QUANT_REQUIRE(status == XQ_OK, named(i), " is refused: ", xq_status_text(status));
      X86QUANT_REQUIRE(t.stride(0) >= t.size(1) || t.size(0) <= 1, "the rows of ", named(i), " overlap");
      if (t.size(0) > 1) op.row_stride = t.stride(0);
      ops_.push_back(op);
      dims_ += op.dim;
    }
  }

  // What is looked up in each table. Each of the three is one tensor a table; one tensor whose first dimension is the
  // tables; or, of offsets and weights, nothing: then indices are [bags, each], and weights 1. All of them contiguous.
  std::vector<xq_lookup> look_ups(const std::vector<View>& indices, const std::vector<View>& offsets,
                                  const std::vector<View>& weights, bool last_offset) const {
    X86QUANT_REQUIRE(!indices.empty(), "tables need indices");
    const int64_t dims = offsets.empty() ? 2 : 1;
    const Operands index(*this, indices, "indices", dims), offset(*this, offsets, "offsets", 1),
        weight(*this, weights, "weights", dims);
    std::vector<xq_lookup> ops = ops_;
    for (size_t i = 0; i < ops.size(); ++i) {
      describe(ops[i], i, index.of(i), offset.of(i), weight.of(i), last_offset);
      X86QUANT_REQUIRE(ops[i].bags == ops[0].bags, named(i), " has ", ops[i].bags, " bags, but ", named(0), " has ", ops[0].bags);
    }
    return ops;
  }

  // Of a row of the result.
  int64_t out_features() const { return dims_; }

  // Pooled rows, the tables side by side: float [bags, out_features].
  void run(std::vector<xq_lookup> ops, float* out) const {
    int64_t bytes = 0;
    for (const xq_lookup& op : ops) bytes += op.index_count * std::min<int64_t>(op.row_stride, 4096);
    for (size_t i = 0; i < ops.size(); ++i) {
      xq_lookup& op = ops[i];
      op.out = out;
      op.out_stride = dims_;
      out += op.dim;
      const int status = xq_lookup_check(&op);
      X86QUANT_REQUIRE(status == XQ_OK, named(i), " refused these indices: ", xq_status_text(status));
    }
    look_up(ops, ops[0].bags, bytes);
  }

  // The checks of `run` alone: what reads the rows then needs none.
  void check(const std::vector<xq_lookup>& ops) const {
    for (size_t i = 0; i < ops.size(); ++i) {
      xq_lookup_fault fault;
      if (!xq_lookup_verify(&ops[i], 0, ops[i].bags, &fault)) throw Refused(named(i) + ": " + runtime::fault_text(ops[i], fault));
    }
  }

 private:
  std::string named(size_t i) const {
    return runtime::table_text(names_[i], rows_[i].size(0));
  }

  // One table's share of an operand.
  struct Operand {
    const char* data = nullptr;  // null: there is none
    int64_t size = 0, first = 0, second = 1;
    Type type = Type::kFloat;
  };

  // An operand of all tables.
  class Operands {
   public:
    Operands(const Tables& tables, const std::vector<View>& given, const char* what, int64_t dims) {
      const size_t count = tables.ops_.size();
      const bool stacked = given.size() == 1 && given[0].dims == dims + 1;
      X86QUANT_REQUIRE(given.empty() || stacked || given.size() == count, "there are ", count, " tables, but ", what, " for ",
              given.size());
      X86QUANT_REQUIRE(!stacked || given[0].size(0) == static_cast<int64_t>(count), "there are ", count,
              " tables, but the first dimension of ", what, " is ", stacked ? given[0].size(0) : 0);
      for (size_t i = 0; i < given.size(); ++i) {
        const View& x = given[i];
        X86QUANT_REQUIRE(x.is_cpu && x.is_contiguous(), what, " must be plain tensors on the CPU");
        X86QUANT_REQUIRE(x.dims == dims + (stacked ? 1 : 0), tables.named(i), ": ", what, " must be ", dims == 1 ? "one" : "two",
                "-dimensional", dims == 1 ? " with" : " without", " offsets; got ", x.text());
        Operand one;
        one.data = x.as<char>();
        one.type = x.type;
        one.first = x.size(stacked ? 1 : 0), one.second = dims == 2 ? x.size(-1) : 1;
        one.size = one.first * one.second;
        // Null stands for an operand that is not there.
        if (!one.data) one.data = "";
        for (size_t t = 0; t < (stacked ? count : 1); ++t) {
          all_.push_back(one);
          one.data += static_cast<size_t>(one.size) * runtime::bytes_of(x.type);
        }
      }
    }

    Operand of(size_t i) const { return all_.empty() ? Operand{} : all_[i]; }

   private:
    std::vector<Operand> all_;
  };

  void describe(xq_lookup& op, size_t i, const Operand& indices, const Operand& offsets, const Operand& weights,
                bool last_offset) const {
    X86QUANT_REQUIRE(indices.type == Type::kInt || indices.type == Type::kLong, "", named(i),
                      ": indices must be int32 or int64, got ", name_of(indices.type));
    op.long_indices = indices.type == Type::kLong;
    op.index_count = indices.size;
    op.indices = indices.data;
    if (offsets.data) {
      X86QUANT_REQUIRE(offsets.type == indices.type, named(i), ": offsets must be of the type of the ",
                        "indices, ", name_of(indices.type), "; got ", name_of(offsets.type));
      X86QUANT_REQUIRE(!last_offset || offsets.size > 0, "", named(i),
                        ": with include_last_offset there must be an offset");
      op.offsets = offsets.data;
      op.last_offset = last_offset;
      op.bags = offsets.size - (last_offset ? 1 : 0);
      X86QUANT_REQUIRE(op.bags > 0 || op.index_count == 0, named(i), ": there are ", op.index_count,
                        " indices, but no bag");
    } else {
      op.bags = indices.first, op.each = indices.second;
    }
    if (!weights.data) return;
    X86QUANT_REQUIRE(op.mode == XQ_POOL_SUM, named(i), ": per_sample_weights need mode sum");
    X86QUANT_REQUIRE(weights.type == Type::kFloat && weights.size == op.index_count, "", named(i),
                      ": per_sample_weights must be float32 and of the input's shape, one an index; got ", weights.size,
                      " of type ", name_of(weights.type), " for ", op.index_count, " indices");
    op.weights = reinterpret_cast<const float*>(weights.data);
  }

  // A few bags of all tables, then the next ones: rows of the output are as long as all tables together, and those
  // of one piece stay in the caches, and their pages in the TLB, from table to table.
  void look_up(const std::vector<xq_lookup>& ops, int64_t bags, int64_t bytes) const {
    std::mutex lock;
    std::atomic<bool> failed = false;
    std::string error;
    const auto count = static_cast<int64_t>(ops.size());
    const int64_t each = count == 1 ? kBagsOfOne : kBagsAtOnce, blocks = (bags + each - 1) / each;
    runtime::split(blocks * count, runtime::useful_threads(bytes / kBytesEach), [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end && !failed; ++item) {
        const auto i = static_cast<size_t>(item % count);
        const int64_t first = item / count * each;
        xq_lookup_fault fault;
        if (xq_lookup_run(&ops[i], first, std::min(bags, first + each), &fault)) continue;
        const std::lock_guard<std::mutex> guard(lock);
        if (!failed) error = named(i) + ": " + runtime::fault_text(ops[i], fault);
        failed = true;
      }
    });
    if (failed) throw Refused(error);
  }

  std::vector<View> rows_;
  std::vector<std::string> names_;
  std::vector<xq_lookup> ops_;
  int64_t dims_ = 0;
};

}  // namespace x86quant::dynamic

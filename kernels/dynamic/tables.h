// Quantized embedding tables as torch has them: any number of them, looked up in one call.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "../native/lookup.h"
#include "../runtime/lookup_faults.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"

namespace x86quant::dynamic {

// Less than so many bytes of rows is not worth waking a thread for.
inline constexpr int64_t kBytesEach = 64 * 1024;
// Bags that are looked up in one table before the next one, and in a table that is alone.
inline constexpr int64_t kBagsAtOnce = 64;
inline constexpr int64_t kBagsOfOne = 1024;

class Tables {
 public:
  // geometry: for each table its dim, bits, codes_at, scale_at, half, mode and padding (-1: none).
  Tables(std::vector<at::Tensor> rows, const std::vector<int64_t>& geometry, std::vector<std::string> names)
      : rows_(std::move(rows)), names_(std::move(names)) {
    constexpr size_t kEach = 7;
    TORCH_CHECK_VALUE(!rows_.empty() && geometry.size() == kEach * rows_.size() && names_.size() == rows_.size(),
                      "x86quant: malformed tables");
    for (size_t i = 0; i < rows_.size(); ++i) {
      const at::Tensor& t = rows_[i];
      TORCH_CHECK_VALUE(t.dim() == 2 && t.scalar_type() == at::kByte && t.device().is_cpu() && t.stride(1) == 1,
                        "x86quant: the rows of ", named(i), " must be uint8 [rows, bytes] on the CPU");
      const int64_t* g = geometry.data() + kEach * i;
      xq_lookup op{};
      op.rows = t.const_data_ptr<uint8_t>();
      op.row_count = t.size(0);
      op.row_stride = t.size(1);
      op.dim = static_cast<int32_t>(g[0]), op.bits = static_cast<int32_t>(g[1]);
      op.codes_at = static_cast<int32_t>(g[2]), op.scale_at = static_cast<int32_t>(g[3]);
      op.half = g[4] != 0, op.mode = static_cast<int32_t>(g[5]), op.padding = g[6];
      op.isa = native_isa();
      const int status = xq_lookup_check(&op);  // of the row as it is, then of where the next one lies
      TORCH_CHECK_VALUE(status == XQ_OK, "x86quant: ", named(i), " is refused: ", xq_status_text(status));
      TORCH_CHECK_VALUE(t.stride(0) >= t.size(1) || t.size(0) <= 1, "x86quant: the rows of ", named(i), " overlap");
      if (t.size(0) > 1) op.row_stride = t.stride(0);
      ops_.push_back(op);
      dims_ += op.dim;
    }
  }

  // Pooled rows, the tables side by side: [bags, sum of dims]. Each of the three is one tensor a table; one tensor
  // whose first dimension is the tables; or, of offsets and weights, nothing: then indices are [bags, each], and
  // weights 1.
  at::Tensor run(const std::vector<at::Tensor>& indices, const std::vector<at::Tensor>& offsets,
                 const std::vector<at::Tensor>& weights, bool last_offset) const {
    RECORD_FUNCTION("x86quant::embedding_bags", c10::ArrayRef<const c10::IValue>{});
    const Call call(*this, indices, offsets, weights, last_offset);
    std::vector<xq_lookup> ops(call.ops);
    const size_t count = ops.size();
    int64_t bytes = 0;
    for (const xq_lookup& op : ops) bytes += op.index_count * std::min<int64_t>(op.row_stride, 4096);
    const int64_t bags = ops[0].bags;
    at::Tensor out = at::empty({bags, dims_}, at::kFloat);
    float* to = out.mutable_data_ptr<float>();
    for (size_t i = 0; i < count; ++i) {
      xq_lookup& op = ops[i];
      op.out = to;
      op.out_stride = dims_;
      to += op.dim;
      const int status = xq_lookup_check(&op);
      TORCH_CHECK_VALUE(status == XQ_OK, "x86quant: ", named(i), " refused these indices: ", xq_status_text(status));
    }
    look_up(ops, bags, bytes);
    return out;
  }

  // The checks of `run` alone: what reads the rows then needs none.
  void check(const std::vector<at::Tensor>& indices, const std::vector<at::Tensor>& offsets,
             const std::vector<at::Tensor>& weights, bool last_offset) const {
    const Call call(*this, indices, offsets, weights, last_offset);
    for (size_t i = 0; i < call.ops.size(); ++i) {
      const xq_lookup& op = call.ops[i];
      xq_lookup_fault fault;
      TORCH_CHECK_VALUE(xq_lookup_verify(&op, 0, op.bags, &fault), named(i), ": ", runtime::fault_text(op, fault));
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
    at::ScalarType type = at::kFloat;
  };

  // An operand of all tables.
  class Operands {
   public:
    Operands(const Tables& tables, const std::vector<at::Tensor>& given, const char* what, int64_t dims) {
      const size_t count = tables.ops_.size();
      const bool stacked = given.size() == 1 && given[0].dim() == dims + 1;
      TORCH_CHECK_VALUE(given.empty() || stacked || given.size() == count, "x86quant: there are ", count,
                        " tables, but ", what, " for ", given.size());
      TORCH_CHECK_VALUE(!stacked || given[0].size(0) == static_cast<int64_t>(count), "x86quant: there are ", count,
                        " tables, but the first dimension of ", what, " is ", stacked ? given[0].size(0) : 0);
      for (size_t i = 0; i < given.size(); ++i) {
        const at::Tensor& x = given[i];
        TORCH_CHECK_VALUE(x.device().is_cpu() && x.layout() == at::kStrided, "x86quant: ", what,
                          " must be plain tensors on the CPU");
        TORCH_CHECK_VALUE(x.dim() == dims + (stacked ? 1 : 0), tables.named(i), ": ", what, " must be ",
                          dims == 1 ? "one" : "two", "-dimensional", dims == 1 ? " with" : " without", " offsets; got ",
                          x.sizes());
        const at::Tensor& plain = kept_.emplace_back(x.contiguous());
        Operand one;
        one.data = static_cast<const char*>(plain.const_data_ptr());
        one.type = x.scalar_type();
        one.first = x.size(stacked ? 1 : 0), one.second = dims == 2 ? x.size(-1) : 1;
        one.size = one.first * one.second;
        // Null stands for an operand that is not there.
        if (!one.data) one.data = "";
        for (size_t t = 0; t < (stacked ? count : 1); ++t) {
          all_.push_back(one);
          one.data += static_cast<size_t>(one.size) * x.element_size();
        }
      }
    }

    Operand of(size_t i) const { return all_.empty() ? Operand{} : all_[i]; }

   private:
    std::vector<at::Tensor> kept_;
    std::vector<Operand> all_;
  };

  // What is looked up in each table, and the tensors that it points into.
  struct Call {
    Call(const Tables& tables, const std::vector<at::Tensor>& indices, const std::vector<at::Tensor>& offsets,
         const std::vector<at::Tensor>& weights, bool last_offset)
        : index(tables, indices, "indices", offsets.empty() ? 2 : 1), offset(tables, offsets, "offsets", 1),
          weight(tables, weights, "weights", offsets.empty() ? 2 : 1), ops(tables.ops_) {
      TORCH_CHECK_VALUE(!indices.empty(), "x86quant: tables need indices");
      for (size_t i = 0; i < ops.size(); ++i) {
        tables.describe(ops[i], i, index.of(i), offset.of(i), weight.of(i), last_offset);
        TORCH_CHECK_VALUE(ops[i].bags == ops[0].bags, "x86quant: ", tables.named(i), " has ", ops[i].bags,
                          " bags, but ", tables.named(0), " has ", ops[0].bags);
      }
    }

    const Operands index, offset, weight;
    std::vector<xq_lookup> ops;
  };

  void describe(xq_lookup& op, size_t i, const Operand& indices, const Operand& offsets, const Operand& weights,
                bool last_offset) const {
    TORCH_CHECK_VALUE(indices.type == at::kInt || indices.type == at::kLong, "x86quant: ", named(i),
                      ": indices must be int32 or int64, got ", indices.type);
    op.long_indices = indices.type == at::kLong;
    op.index_count = indices.size;
    op.indices = indices.data;
    if (offsets.data) {
      TORCH_CHECK_VALUE(offsets.type == indices.type, named(i), ": offsets must be of the type of the ",
                        "indices, ", indices.type, "; got ", offsets.type);
      TORCH_CHECK_VALUE(!last_offset || offsets.size > 0, "x86quant: ", named(i),
                        ": with include_last_offset there must be an offset");
      op.offsets = offsets.data;
      op.last_offset = last_offset;
      op.bags = offsets.size - (last_offset ? 1 : 0);
      TORCH_CHECK_VALUE(op.bags > 0 || op.index_count == 0, named(i), ": there are ", op.index_count,
                        " indices, but no bag");
    } else {
      op.bags = indices.first, op.each = indices.second;
    }
    if (!weights.data) return;
    TORCH_CHECK_VALUE(op.mode == XQ_POOL_SUM, named(i), ": per_sample_weights need mode sum");
    TORCH_CHECK_VALUE(weights.type == at::kFloat && weights.size == op.index_count, "x86quant: ", named(i),
                      ": per_sample_weights must be float32 and of the input's shape, one an index; got ", weights.size,
                      " of type ", weights.type, " for ", op.index_count, " indices");
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
    TORCH_CHECK_VALUE(!failed, error);
  }

  std::vector<at::Tensor> rows_;
  std::vector<std::string> names_;
  std::vector<xq_lookup> ops_;
  int64_t dims_ = 0;
};

}  // namespace x86quant::dynamic

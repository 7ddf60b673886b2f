// Pooled rows of any number of tables, side by side as floats; or their interaction with a dense vector, as codes.
//
// A block of bags goes through all of it before the next one, so that looked-up rows never leave the caches.
#include <algorithm>
#include <atomic>
#include <mutex>

#include "../runtime/errors.h"
#include "../runtime/lookup_faults.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"
#include "../runtime/scratch.h"
#include "row_rounding.h"

namespace x86quant::runtime {
namespace {

constexpr int64_t kFloat = sizeof(float);
// Bags of a block, where every thread gets one.
constexpr int64_t kMostBags = 32, kFewestBags = 8;
// Less than so many bytes of rows is not worth waking a thread for.
constexpr int64_t kBytesEach = 64 * 1024;
// So many indices of a bag may be one and the same in memory: they are copied, and are there once.
constexpr int64_t kMostOfOne = 1 << 16;
// Floats of a bag before its interaction and after it: a run takes memory for those of a block, a plan may have fewer.
constexpr int64_t kMostOfABag = 1 << 22;

int64_t product(StepFields& fields, const std::string& name, int64_t a, int64_t b) {
  int64_t found = 0;
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &found)) fields.refuse(name, "has an impossible size");
  return found;
}

// One table of the step, and where its operands lie.
struct TableOperands {
  xq_lookup op{};
  Table rows;
  std::string name;
  Address offsets;
  OpenAddress indices, weights;
  Words index_strides;  // without offsets: elements from bag to bag, and from one index of it to the next
  bool apart = false;   // these are not one behind the other
};

class Lookup final : public Step {
 public:
  explicit Lookup(StepFields& fields) : bags_(fields.integer("bags")) {
    if (bags_ < 0 || bags_ == INT64_MAX) fields.refuse("bags", "is no number of bags");
    const int64_t count = fields.integer("tables");
    if (count < 1 || count > 1 << 20) fields.refuse("tables", "is not a number of tables");
    const bool last_offset = fields.flag("last_offset");
    for (int64_t i = 0; i < count; ++i) {
      read_table(fields, std::to_string(i), last_offset);
      width_ += tables_.back().op.dim;
    }
    for (TableOperands& table : tables_) {
      table.op.out_stride = width_;
      xq_lookup trial = table.op;
      trial.out = reinterpret_cast<float*>(uintptr_t{64});
      trial.indices = table.indices.first.any<const void>(), trial.offsets = table.offsets.any<const void>();
      trial.weights = table.weights.first.any<const float>();
      refuse_unless_ok(xq_lookup_check(&trial));
    }
    fields.has("dense") ? read_interaction(fields) : read_output(fields, width_, kFloat);
  }

  void run(const Bases& bases) const override {
    int64_t bytes = 0;
    for (const TableOperands& table : tables_) {
      const int64_t count = index_count(bases, table);
      bytes += std::min<int64_t>(count, 1 << 20) * std::min<int64_t>(table.op.row_stride, 4096);
      const int64_t weights = table.weights.first ? table.weights.size(bases, table.op.index_count) : count;
      require(weights == count, table_text(table.name, table.op.row_count), ": there are ", weights,
              " per_sample_weights for ", count, " indices");
    }
    const int threads = useful_threads(bytes / kBytesEach);
    const int64_t each = std::clamp((bags_ + threads - 1) / threads, kFewestBags, kMostBags);
    std::mutex lock;
    std::atomic<bool> failed = false;
    std::string error;
    split((bags_ + each - 1) / each, threads, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end && !failed; ++block) {
        const std::string wrong = run_block(bases, block * each, std::min(bags_, (block + 1) * each));
        if (wrong.empty()) continue;
        const std::lock_guard<std::mutex> guard(lock);
        if (!failed) error = wrong;
        failed = true;
      }
    });
    if (failed) throw Refused(error);
  }

 private:
  void read_table(StepFields& fields, const std::string& number, bool last_offset) {
    const auto name = [&](const char* field) { return field + number; };
    TableOperands table;
    xq_lookup& op = table.op;
    // Rows and bytes of each; dim, bits, codes_at, scale_at, half, mode, padding; indices: how many a bag, how many
    // in all, bytes of one.
    const Words f = fields.integers(name("table").c_str(), 12);
    op.row_count = f[0], op.row_stride = f[1];
    for (const int i : {2, 3, 4, 5, 7})
      if (f[i] != static_cast<int32_t>(f[i])) fields.refuse(name("table"), "is too large");
    op.dim = static_cast<int32_t>(f[2]), op.bits = static_cast<int32_t>(f[3]);
    op.codes_at = static_cast<int32_t>(f[4]), op.scale_at = static_cast<int32_t>(f[5]);
    op.half = f[6] != 0, op.mode = static_cast<int32_t>(f[7]), op.padding = f[8];
    op.each = f[9], op.index_count = f[10], op.long_indices = f[11] == 8;
    op.bags = bags_, op.isa = native_isa();
    table.rows = fields.table(name("rows").c_str(), Type::kByte, product(fields, name("table"), f[0], f[1]));
    op.rows = table.rows.as<uint8_t>();
    if (fields.has(name("name").c_str()))
      for (const int64_t byte : fields.integers(name("name").c_str())) table.name += static_cast<char>(byte);
    const int64_t size = op.long_indices ? 8 : 4;
    if (fields.has(name("offsets").c_str())) {
      op.last_offset = last_offset;
      table.offsets = fields.address(Access::kIndex, name("offsets").c_str(), size, {bags_ + (last_offset ? 1 : 0)}, {size});
      table.indices = fields.elements(Access::kIndex, name("indices").c_str(), name("count").c_str(), size, op.index_count);
    } else {
      table.index_strides = fields.integers(name("strides").c_str(), 2);
      table.apart = table.index_strides != Words{op.each, 1};
      if (table.index_strides[1] == 0 && op.each > kMostOfOne) fields.refuse(name("strides"), "repeats one index without end");
      Words bytes;
      for (const int64_t stride : table.index_strides) bytes.push_back(product(fields, name("strides"), stride, size));
      table.indices.first = fields.address(Access::kIndex, name("indices").c_str(), size, {bags_, op.each}, bytes);
    }
    if (fields.has(name("weights").c_str()))
      table.weights = fields.elements(Access::kRead, name("weights").c_str(), name("weight_count").c_str(), kFloat, op.index_count);
    tables_.push_back(std::move(table));
  }

  void read_interaction(StepFields& fields) {
    xq_interaction& op = interaction_;
    op.isa = native_isa(), op.samples = bags_, op.dim = tables_[0].op.dim;
    op.vectors = static_cast<int32_t>(tables_.size());
    for (const TableOperands& table : tables_)
      if (table.op.dim != op.dim) fields.refuse("dense", "needs rows of one size");
    const int64_t pairs = int64_t{op.vectors} * (op.vectors + 1) / 2, every = pairs + op.vectors + 1;
    if (fields.has("places")) {
      places_ = fields.integers("places");
      for (const int64_t place : places_)
        if (place < 0 || place >= every) fields.refuse("places", "is not among the products: " + std::to_string(place));
      op.squares = std::any_of(places_.begin(), places_.end(), [&](int64_t place) { return place >= pairs; });
    }
    op.first_stride = fields.integer("dense_stride"), op.in_stride = width_;
    op.out_stride = op.dim + (op.squares ? every : pairs);
    if (width_ > kMostOfABag || op.out_stride > kMostOfABag) fields.refuse("tables", "are more than interact with each other");
    const int64_t dense_bytes = product(fields, "dense_stride", op.first_stride, kFloat);
    dense_ = fields.address(Access::kRead, "dense", kFloat, {bags_, op.dim}, {dense_bytes, kFloat});
    xq_interaction trial = op;
    trial.first = dense_.any<const float>(), trial.in = dense_.any<const float>(), trial.out = dense_.any<float>();
    refuse_unless_ok(xq_interaction_check(&trial));
    columns_ = places_.empty() ? op.out_stride : op.dim + static_cast<int64_t>(places_.size());
    read_output(fields, columns_, 1);
    rounding_ = RowRounding(fields, "a_mult", fields.zero_point("out_zp"), columns_);
  }

  void read_output(StepFields& fields, int64_t width, int64_t size) {
    out_stride_ = fields.integer("out_stride");
    if (bags_ > 1 && out_stride_ < width) fields.refuse("out_stride", "is less than a row");
    out_ = fields.address(Access::kWrite, "out", size, {bags_, width}, {product(fields, "out_stride", out_stride_, size), size});
  }

  static void refuse_unless_ok(int status) {
    require(status == XQ_OK, "step \"lookup\" of a plan: ", xq_status_text(status));
  }

  // Bags [begin, end); returns what is wrong with them.
  std::string run_block(const Bases& bases, int64_t begin, int64_t end) const {
    if (!columns_) return look_up(bases, begin, end, out_.at<float>(bases) + begin * out_stride_, out_stride_);
    const int64_t bags = end - begin;
    const auto floats = [&](int64_t width) { return static_cast<size_t>(bags * width * kFloat); };
    xq_interaction op = interaction_;
    const Scratch rows(floats(width_)), products(floats(op.out_stride)), placed(places_.empty() ? 0 : floats(columns_));
    const std::string wrong = look_up(bases, begin, end, reinterpret_cast<float*>(rows.data()), width_);
    if (!wrong.empty()) return wrong;
    op.samples = bags, op.first = dense_.at<const float>(bases) + begin * op.first_stride;
    op.in = reinterpret_cast<float*>(rows.data()), op.out = reinterpret_cast<float*>(products.data());
    xq_interaction_run(&op, 0, bags);
    float* last = op.out;
    if (!places_.empty()) place(op.out, last = reinterpret_cast<float*>(placed.data()), bags);
    rounding_.run(last, out_.at<uint8_t>(bases) + begin * out_stride_, bags, out_stride_);
    return {};
  }

  // Products in the order that is wanted.
  void place(const float* from, float* to, int64_t bags) const {
    const int64_t dim = interaction_.dim;
    for (int64_t bag = 0; bag < bags; ++bag, from += interaction_.out_stride, to += columns_) {
      std::copy(from, from + dim, to);
      for (size_t i = 0; i < places_.size(); ++i) to[dim + static_cast<int64_t>(i)] = from[dim + places_[i]];
    }
  }

  // A table's call for bags [begin, end), and the bags that these are of it.
  struct Call {
    xq_lookup op;
    int64_t begin, end;
  };

  std::string look_up(const Bases& bases, int64_t begin, int64_t end, float* to, int64_t stride) const {
    for (const TableOperands& table : tables_) {
      const Scratch near(table.apart ? static_cast<size_t>((end - begin) * table.op.each) * sizeof(int64_t) : 0);
      Call now = call(bases, table, begin, end, reinterpret_cast<int64_t*>(near.data()));
      now.op.out = to - now.begin * stride, now.op.out_stride = stride;
      to += table.op.dim;
      xq_lookup_fault fault;
      if (xq_lookup_run(&now.op, now.begin, now.end, &fault)) continue;
      if (table.apart) fault.position += begin * table.op.each;
      return joined(table_text(table.name, table.op.row_count), ": ", fault_text(now.op, fault));
    }
    return {};
  }

  static int64_t index_count(const Bases& bases, const TableOperands& table) {
    return table.indices.size(bases, table.op.index_count);
  }

  // Indices that lie apart are copied to `near`.
  static Call call(const Bases& bases, const TableOperands& table, int64_t begin, int64_t end, int64_t* near) {
    Call found{table.op, begin, end};
    xq_lookup& op = found.op;
    op.indices = table.indices.first.at<const void>(bases), op.offsets = table.offsets.at<const void>(bases);
    op.weights = table.weights.first.at<const float>(bases);
    op.index_count = index_count(bases, table);
    if (!table.apart) return found;
    const int64_t bag_stride = table.index_strides[0], stride = table.index_strides[1];
    const auto copy = [&](const auto* from) {
      int64_t* at = near;
      for (int64_t bag = begin; bag < end; ++bag)
        for (int64_t i = 0; i < op.each; ++i) *at++ = from[bag * bag_stride + i * stride];
    };
    op.long_indices ? copy(static_cast<const int64_t*>(op.indices)) : copy(static_cast<const int32_t*>(op.indices));
    op.indices = near, op.long_indices = 1;
    op.bags = end - begin, op.index_count = op.bags * op.each;
    if (op.weights) op.weights += begin * op.each;
    found.begin = 0, found.end = op.bags;
    return found;
  }

  int64_t bags_, width_ = 0;
  std::vector<TableOperands> tables_;
  xq_interaction interaction_{};
  RowRounding rounding_;
  Words places_;
  int64_t columns_ = 0;  // of the interaction's result; 0: there is none
  int64_t out_stride_ = 0;
  Address dense_, out_;
};

const RegisterStep lookup("lookup", [](StepFields& fields) -> StepPtr { return std::make_unique<Lookup>(fields); });

}  // namespace
}  // namespace x86quant::runtime

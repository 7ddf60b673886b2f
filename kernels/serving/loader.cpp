#include "loader.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "../runtime/activation.h"
#include "../runtime/errors.h"
#include "../runtime/packed_cache.h"
#include "../runtime/parallel.h"
#include "../runtime/weight_extremes.h"
#include "program_file.h"
#include "this_cpu.h"
#include "types.h"
#include "x86quant/runtime.h"

namespace x86quant::serving {
namespace {

using runtime::Field;
using runtime::Layout;
using runtime::PackedConvPtr;
using runtime::RowPackPtr;
using runtime::Table;

// Copies that outlive the file, in which floats may lie anywhere: one of each tensor, however many steps read it.
class Copies {
 public:
  Table of(const std::string& name, const Table& table) {
    const std::lock_guard<std::mutex> guard(lock_);
    std::weak_ptr<const runtime::Buffer>& known = copies_[name];
    std::shared_ptr<const runtime::Buffer> memory = known.lock();
    if (memory == nullptr) {
      const size_t size = static_cast<size_t>(table.count) * runtime::bytes_of(table.type);
      const auto fresh = std::make_shared<runtime::Buffer>(size);
      if (size > 0) std::memcpy(fresh->data(), table.data, size);
      known = memory = fresh;
    }
    return {memory->data(), table.type, table.count, memory};
  }

 private:
  std::mutex lock_;
  std::map<std::string, std::weak_ptr<const runtime::Buffer>> copies_;
};

// What packed weights may take. Those that several packs share are packed for each, and channels are filled up to whole
// vectors: a file is refused that takes more memory than one that means well would.
class Room {
 public:
  explicit Room(size_t file_bytes) : left_(kAlways + kTimes * static_cast<int64_t>(file_bytes)) {}
  void take(int64_t bytes) {
    require((left_ -= bytes) >= 0, "packed weights of the file would take more than ", kTimes, " times its size");
  }

 private:
  static constexpr int64_t kAlways = int64_t{64} << 20, kTimes = 64;
  std::atomic<int64_t> left_;
};

class Loader {
 public:
  Loader(const std::string& path, const std::string& level, const std::string& cache) : file_(path), room_(file_.bytes()) {
    pack(cache, {level, l1_bytes(), l2_bytes(), cache.empty() ? "" : file_.digest()});
    for (const Json& pack : file_.manifest().at("row_packs").list("the packs of rows")) row_packs_.push_back(row_packed(pack));
  }

  std::vector<std::unique_ptr<runtime::Program>> programs() {
    std::vector<std::unique_ptr<runtime::Program>> all;
    for (const Json& plan : file_.manifest().at("plans").list("the plans")) all.push_back(program(plan));
    require(!all.empty(), "the file has no plan");
    return all;
  }

 private:
  void pack(const std::string& cache, const runtime::CacheKey& key) {
    const Json::List& wanted = file_.manifest().at("packs").list("the packs");
    std::optional<std::vector<Table>> before;
    if (!cache.empty()) before = runtime::read_packed(cache, key);
    if (before && before->size() != wanted.size()) before.reset();
    packs_.resize(wanted.size());
    const auto one = [&](int i) {
      const auto at = static_cast<size_t>(i);
      packs_[at] = packed(wanted[at], before ? std::optional<Table>((*before)[at]) : std::nullopt);
    };
    const int count = static_cast<int>(wanted.size());
    if (runtime::useful_threads(count) > 1) {
      runtime::run_on_threads(count, one);
    } else {
      for (int i = 0; i < count; ++i) one(i);
    }
    if (cache.empty() || before) return;
    std::vector<Table> blobs;
    for (const PackedConvPtr& pack : packs_) blobs.push_back(pack->blob());
    runtime::write_packed(cache, key, blobs);
  }

  PackedConvPtr packed(const Json& pack, std::optional<Table> before) const {
    const ProgramFile::Tensor& weight = file_.tensor(pack.at("weight").text("a weight"));
    runtime::ConvFields fields;
    fields.weight = weight.table;
    fields.sizes = weight.sizes;
    fields.mult = table(pack.at("mult"));
    if (!pack.at("bias").is_null()) fields.bias = table(pack.at("bias"));
    if (!pack.at("lut").is_null()) fields.lut = table(pack.at("lut"));
    if (file_.version() >= kFirstWithSlopes && !pack.at("slopes").is_null())
      fields.slopes = table(pack.at("slopes"));
    fields.geometry = pack.at("geometry").integers("a geometry");
    fields.codes = pack.at("codes").integers("a code");
    fields.res_mult = pack.at("res_mult").real("a multiplier");
    runtime::ConvDescription description = runtime::describe_conv(std::move(fields));
    require_sums_fit(description.weight.as<int8_t>(), description.conv.out_channels, description.products());
    description.packed = std::move(before);
    PackedConvPtr made = runtime::pack_conv("native", std::move(description));
    room_.take(made->bytes());
    return made;
  }

  // Sums are int32. Whoever exported the file has seen to that; a file may come from anywhere.
  static void require_sums_fit(const int8_t* weights, int64_t outputs, int64_t products) {
    constexpr int64_t kMostCode = 255, kAlwaysFit = INT32_MAX / (kMostCode * 128);
    if (products <= kAlwaysFit) return;
    const runtime::SumRange sums = runtime::weight_extremes(weights, outputs, products).rows;
    require(std::max(sums.high, -sums.low) <= INT32_MAX / kMostCode, "sums of ", products, " products do not fit 32 bits with ",
            "these weights, of which those of one output and one sign sum to ", sums.low, " and ", sums.high);
  }

  // One linear, or two whose results are multiplied.
  RowPackPtr row_packed(const Json& pack) const {
    const Json::List& linears = pack.at("linears").list("linears");
    require(linears.size() == 1 || linears.size() == 2, "a pack of rows has ", linears.size(), " linears");
    const RowLinear first = row_linear(linears[0]);
    const int32_t activation = runtime::activation_code(pack.at("activation").text("an activation"));
    const auto made = std::make_shared<runtime::RowPack>(first.view(), activation);
    if (linears.size() == 2) made->multiply_by(row_linear(linears[1]).view());
    room_.take(made->bytes());
    return made;
  }

  struct RowLinear {
    const ProgramFile::Tensor& weight;
    Table scale;
    std::vector<int64_t> scale_sizes;
    std::optional<Table> bias;

    runtime::RowWeights view() const {
      const bool nibbles = weight.table.type == runtime::Type::kByte;
      runtime::RowWeights view{weight.table.data, scale.data, bias ? bias->as<float>() : nullptr,
                               weight.sizes[1] * (nibbles ? 2 : 1), weight.sizes[0]};
      if (scale_sizes.size() < 2) return view;
      view.groups = static_cast<int32_t>(scale_sizes[1]), view.bits = nibbles ? 4 : 8;
      view.half = scale.type == runtime::Type::kHalf, view.offsets = scale_sizes.size() == 3;
      return view;
    }
  };

  RowLinear row_linear(const Json& json) const {
    const ProgramFile::Tensor& weight = file_.tensor(json.at("weight").text("a weight"));
    const auto possible = [](int64_t size) { return size > 0 && size == static_cast<int32_t>(size); };
    const ProgramFile::Tensor& scale = file_.tensor(json.at("scale").text("a scale"));
    const bool nibbles = weight.table.type == runtime::Type::kByte, groups = scale.sizes.size() > 1;
    require((weight.table.type == runtime::Type::kChar || (nibbles && groups)) && weight.sizes.size() == 2 &&
                possible(weight.sizes[0]) && possible(2 * weight.sizes[1]),
            "a linear of rows takes an int8 weight of two dimensions, or one of 4 bits with groups");
    const auto floats = [&](const Json& name) {
      Table found = table(name);
      require(found.type == runtime::Type::kFloat && found.count == weight.sizes[0],
              "a linear of rows takes a float for each of its ", weight.sizes[0], " results");
      return found;
    };
    if (groups) {  // whether they divide the weight is asked where it is packed
      const std::vector<int64_t>& sizes = scale.sizes;
      require((scale.table.type == runtime::Type::kFloat || scale.table.type == runtime::Type::kHalf) && sizes.size() <= 3 &&
                  sizes[0] == weight.sizes[0] && possible(sizes[1]) && (sizes.size() < 3 || sizes[2] == 2),
              "a linear of rows takes a scale, or a scale and an offset, for each group of its weight");
    } else {
      require_sums_fit(weight.table.as<int8_t>(), weight.sizes[0], weight.sizes[1]);
    }
    RowLinear found{weight, groups ? table(json.at("scale")) : floats(json.at("scale")), scale.sizes, std::nullopt};
    if (!json.at("bias").is_null()) found.bias = floats(json.at("bias"));
    return found;
  }

  Table table(const Json& json) const {
    const std::string& name = json.text("a tensor's name");
    return copies_.of(name, file_.tensor(name).table);
  }

  std::unique_ptr<runtime::Program> program(const Json& plan) const {
    auto made = std::make_unique<runtime::Program>(plan.at("arena").integer("an arena"), owner_);
    for (const Json& input : plan.at("inputs").list("inputs")) made->add_input(layout(input));
    for (const Json& output : plan.at("outputs").list("outputs")) {
      made->add_output(layout(output));
      require(!made->outputs().back().is_open(), "an output of a plan has no size");
    }
    made->keep(plan.at("kept").integers("what a plan keeps"));
    for (const Json& stage : plan.at("stages").list("stages")) {
      for (const Json& step : stage.at("steps").list("steps")) add(*made, step);
      const Json& parts = stage.at("parts");
      if (!parts.is_null())
        made->repeat(parts.at("times").integer("a number of parts"), parts.at("bytes").integers("a part"));
    }
    made->check_reach(runtime::Program::Inputs::kRead);
    return made;
  }

  void add(runtime::Program& program, const Json& step) const {
    runtime::StepFields::Values fields;
    for (const auto& [name, value] : step.at("fields").object("fields")) fields.emplace(name, field(value));
    program.add(step.at("kind").text("a kind of step"), fields);
  }

  static Layout layout(const Json& json) {
    Layout found{json.at("sizes").integers("a size"), json.at("strides").integers("a stride"),
                 json.at("type").text("a type")};
    require(type_number(found.type) >= 0, "a plan has inputs or outputs of type ", found.type);
    require(found.sizes.size() == found.strides.size() && found.sizes.size() <= X86QUANT_MAX_RANK,
            "a tensor of a plan has a bad shape");
    if (!found.is_open() || found.strides != runtime::Words{1}) found.bytes();  // which refuses sizes that no memory has
    return found;
  }

  Field field(const Json& json) const {
    if (const auto* object = std::get_if<Json::Object>(&json.value)) {
      if (object->count("table")) return table(object->find("table")->second);
      if (object->count("row_pack")) return one_of(row_packs_, object->find("row_pack")->second);
      return one_of(packs_, json.at("pack"));
    }
    if (const auto* list = std::get_if<Json::List>(&json.value)) return numbers(*list);
    if (const auto* flag = std::get_if<bool>(&json.value)) return *flag;
    if (const auto* real = std::get_if<double>(&json.value)) return *real;
    return json.integer("a field of a step");
  }

  template <class Pack>
  static Field one_of(const std::vector<Pack>& packs, const Json& number) {
    const auto index = number.integer("a pack");
    require(index >= 0 && index < static_cast<int64_t>(packs.size()), "the file has no pack ", index);
    return packs[static_cast<size_t>(index)];
  }

  // Of integers unless the first is a real.
  static Field numbers(const Json::List& list) {
    if (list.empty() || std::get_if<double>(&list[0].value) == nullptr) {
      runtime::Words words;
      for (const Json& item : list) words.push_back(item.integer("a number of a step"));
      return words;
    }
    std::vector<double> reals;
    for (const Json& item : list) reals.push_back(item.real("a number of a step"));
    return reals;
  }

  const ProgramFile file_;
  const runtime::Owner owner_ = runtime::new_owner();
  mutable Copies copies_;
  mutable Room room_;
  std::vector<PackedConvPtr> packs_;
  std::vector<RowPackPtr> row_packs_;
};

}  // namespace

std::vector<std::unique_ptr<runtime::Program>> load_programs(const std::string& path, const std::string& level,
                                                             const std::string& cache) {
  return Loader(path, level, cache).programs();
}

}  // namespace x86quant::serving

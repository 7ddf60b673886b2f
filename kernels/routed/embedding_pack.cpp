// Packed tables of the stock workflow that compare indices with their bounds, and choose their kernel by the rules.
//
// The pack is the stock one with other lookups: every stock module, operator and serializer takes it.
#include <ATen/core/Tensor.h>
#include <ATen/native/quantized/cpu/fbgemm_utils.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../dynamic/tables.h"

namespace x86quant {
namespace {

using EmbeddingPack = c10::intrusive_ptr<EmbeddingPackedParamsBase>;
using OptionalTensor = std::optional<at::Tensor>;

// How tensors of torch lie, which the caller keeps.
std::vector<runtime::View> views_of(const std::vector<at::Tensor>& tensors) {
  std::vector<runtime::View> views;
  for (const at::Tensor& x : tensors) {
    const at::ScalarType type = x.scalar_type();
    const auto as = type == at::kByte    ? runtime::Type::kByte
                    : type == at::kInt   ? runtime::Type::kInt
                    : type == at::kLong  ? runtime::Type::kLong
                    : type == at::kFloat ? runtime::Type::kFloat
                                         : runtime::Type::kOther;
    views.push_back({x.const_data_ptr(), as, x.is_cpu(), x.dim(), x.sizes().data(), x.strides().data()});
  }
  return views;
}

std::vector<int64_t> geometry_of(const PackedEmbeddingBagWeight& pack) {
  const int64_t bits = pack.bit_rate_, scale_bytes = bits == 8 ? 8 : 4;
  const int64_t code_bytes = pack.packed_w.size(1) - scale_bytes;
  return {code_bytes * 8 / bits, bits, 0, code_bytes, bits == 8 ? 0 : 1, XQ_POOL_SUM, -1};
}

struct RoutedEmbedding final : PackedEmbeddingBagWeight {
  // limits: up to how many bags each of `kernels` runs; the last one has no bound.
  RoutedEmbedding(const PackedEmbeddingBagWeight& stock, at::IntArrayRef limits, std::vector<std::string> kernels,
                  std::string record)
      : PackedEmbeddingBagWeight(stock.packed_w, stock.w_scale, stock.w_zp, stock.bit_rate_, stock.q_scheme,
                                 stock.version_),
        tables_(views_of({packed_w}), geometry_of(*this), {""}), limits_(limits.vec()), kernels_(std::move(kernels)),
        record_(std::move(record)) {
    TORCH_CHECK_VALUE(!kernels_.empty() && limits_.size() == kernels_.size(), "x86quant: one kernel for each limit");
  }

  const std::string& record() const { return record_; }

  at::Tensor embeddingbag_byte(const at::Tensor& indices, const OptionalTensor& offsets, bool pruned,
                               const OptionalTensor& weights, const OptionalTensor& mapping, bool last_offset,
                               bool is_embedding) override {
    if (const OptionalTensor found = native(8, indices, offsets, pruned, weights, mapping, last_offset, is_embedding))
      return *found;
    return PackedEmbeddingBagWeight::embeddingbag_byte(indices, offsets, pruned, weights, mapping, last_offset,
                                                       is_embedding);
  }

  at::Tensor embeddingbag_4bit(const at::Tensor& indices, const OptionalTensor& offsets, bool pruned,
                               const OptionalTensor& weights, const OptionalTensor& mapping, bool last_offset,
                               bool is_embedding) override {
    if (const OptionalTensor found = native(4, indices, offsets, pruned, weights, mapping, last_offset, is_embedding))
      return *found;
    return PackedEmbeddingBagWeight::embeddingbag_4bit(indices, offsets, pruned, weights, mapping, last_offset,
                                                       is_embedding);
  }

 private:
  // What the native kernel finds; nothing where FBGEMM is to run, for which indices have been compared with their
  // bounds: it reads whatever they say. Codes of other bits, and tables that leave rows out, are left to it whole.
  OptionalTensor native(int64_t bits, const at::Tensor& indices, const OptionalTensor& offsets, bool pruned,
                        const OptionalTensor& weights, const OptionalTensor& mapping, bool last_offset,
                        bool is_embedding) const {
    if (bit_rate_ != bits || pruned || mapping) return std::nullopt;
    std::vector<at::Tensor> index = {(is_embedding ? indices.reshape({-1, 1}) : indices).contiguous()}, starts, own;
    if (offsets && !is_embedding) starts = {offsets->to(indices.scalar_type()).contiguous()};
    if (weights) own = {weights->contiguous()};
    const bool last = last_offset && !starts.empty();
    const int64_t bags = starts.empty() ? index[0].size(0) : starts[0].numel() - (last ? 1 : 0);
    const auto range = std::lower_bound(limits_.begin(), limits_.end() - 1, bags) - limits_.begin();
    const bool is_native = kernels_[static_cast<size_t>(range)] == "native";
    at::Tensor found;
    try {
      const std::vector<xq_lookup> ops = tables_.look_ups(views_of(index), views_of(starts), views_of(own), last);
      if (!is_native) {
        tables_.check(ops);
        return std::nullopt;
      }
      found = at::empty({ops[0].bags, tables_.out_features()}, at::kFloat);
      tables_.run(ops, found.mutable_data_ptr<float>());
    } catch (const Refused& error) {
      TORCH_CHECK_VALUE(false, error.what());
    }
    if (!is_embedding) return found;
    std::vector<int64_t> shape = indices.sizes().vec();
    shape.push_back(found.size(1));
    return found.reshape(shape);
  }

  dynamic::Tables tables_;
  std::vector<int64_t> limits_;
  std::vector<std::string> kernels_;
  std::string record_;
};

// limits: up to how many bags each kernel runs; -1: no bound.
EmbeddingPack pack_embedding(const at::Tensor& weight, at::IntArrayRef limits, std::vector<std::string> kernels,
                             std::string record) {
  const EmbeddingPack made = PackedEmbeddingBagWeight::prepack(weight);
  const auto* stock = dynamic_cast<const PackedEmbeddingBagWeight*>(made.get());
  TORCH_CHECK(stock, "x86quant: this torch packs embeddings otherwise");
  if (stock->bit_rate_ != 8 && stock->bit_rate_ != 4) return made;
  return c10::make_intrusive<RoutedEmbedding>(*stock, limits, std::move(kernels), std::move(record));
}

// How a pack was routed, or that it is a stock one.
std::string embedding_record(const EmbeddingPack& pack) {
  const auto* routed = dynamic_cast<const RoutedEmbedding*>(pack.get());
  return routed ? routed->record() : "stock:PackedEmbeddingBagWeight";
}

#define PACK "__torch__.torch.classes.quantized.EmbeddingPackedParamsBase"

TORCH_LIBRARY_FRAGMENT(x86quant, m) {
  m.def("pack_embedding(Tensor weight, int[] limits, str[] kernels, str record) -> " PACK, pack_embedding);
  m.def("embedding_record(" PACK " pack) -> str", embedding_record);
}

}  // namespace
}  // namespace x86quant

// Quantized embedding tables as torch sees them: any number of them, looked up in one call.
#include <torch/library.h>

#include "tables.h"

namespace x86quant::dynamic {
namespace {

// dense [samples, dim], vectors [samples, any number, dim]: dense, then the product of each vector with all before it,
// then, with `squares`, that of each with itself.
at::Tensor interact(const at::Tensor& dense, const at::Tensor& vectors, bool squares) {
  TORCH_CHECK_VALUE(dense.dim() == 2 && vectors.dim() == 3 && dense.scalar_type() == at::kFloat &&
                        vectors.scalar_type() == at::kFloat && dense.size(0) == vectors.size(0) &&
                        dense.size(1) == vectors.size(2),
                    "x86quant: an interaction takes float32 [samples, size] and [samples, vectors, size], got ",
                    dense.scalar_type(), " ", dense.sizes(), " and ", vectors.scalar_type(), " ", vectors.sizes());
  const at::Tensor first = dense.contiguous(), rest = vectors.contiguous();
  xq_interaction op{};
  op.samples = dense.size(0), op.dim = static_cast<int32_t>(dense.size(1));
  op.vectors = static_cast<int32_t>(vectors.size(1));
  op.first_stride = op.dim, op.in_stride = int64_t{op.vectors} * op.dim;
  op.squares = squares;
  op.out_stride = op.dim + int64_t{op.vectors} * (op.vectors + 1) / 2 + (squares ? op.vectors + 1 : 0);
  at::Tensor out = at::empty({op.samples, op.out_stride}, at::kFloat);
  if (out.numel() == 0) return out;
  op.first = first.const_data_ptr<float>(), op.in = rest.const_data_ptr<float>();
  op.out = out.mutable_data_ptr<float>();
  op.isa = native_isa();
  const int status = xq_interaction_check(&op);
  TORCH_CHECK_VALUE(status == XQ_OK, "x86quant: the interaction is refused: ", xq_status_text(status));
  constexpr int64_t kProductsEach = 500'000;  // fewer are not worth waking a thread for
  const int threads = runtime::useful_threads(op.samples * op.vectors * op.vectors / 2 * op.dim / kProductsEach);
  runtime::split(op.samples, threads, [&](int64_t begin, int64_t end) { xq_interaction_run(&op, begin, end); });
  return out;
}

at::Tensor embedding_bags(std::vector<at::Tensor> rows, std::vector<at::Tensor> indices,
                          std::vector<at::Tensor> offsets, std::vector<at::Tensor> weights, at::IntArrayRef geometry,
                          std::vector<std::string> names, bool last_offset) {
  return Tables(std::move(rows), geometry.vec(), std::move(names)).run(indices, offsets, weights, last_offset);
}

void check_bags(std::vector<at::Tensor> rows, std::vector<at::Tensor> indices, std::vector<at::Tensor> offsets,
                std::vector<at::Tensor> weights, at::IntArrayRef geometry, std::vector<std::string> names,
                bool last_offset) {
  Tables(std::move(rows), geometry.vec(), std::move(names)).check(indices, offsets, weights, last_offset);
}

TORCH_LIBRARY_FRAGMENT(x86quant, m) {
  m.def("look_up_bags(Tensor[] rows, Tensor[] indices, Tensor[] offsets, Tensor[] weights, int[] geometry, "
        "str[] names, bool last_offset) -> Tensor", embedding_bags);
  m.def("check_bags(Tensor[] rows, Tensor[] indices, Tensor[] offsets, Tensor[] weights, int[] geometry, str[] names, "
        "bool last_offset) -> ()", check_bags);
  m.def("interact_vectors(Tensor dense, Tensor vectors, bool squares) -> Tensor", interact);
}

}  // namespace
}  // namespace x86quant::dynamic

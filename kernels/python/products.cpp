// Attention, interactions and weight-only products on tensors: see x86quant/ops.
#include <algorithm>

#include "../native/float_products.h"
#include "../native/lookup.h"
#include "../runtime/activation.h"
#include "../runtime/native_cpu.h"
#include "../runtime/parallel.h"
#include "../runtime/row_pack.h"
#include "arguments.h"
#include "module.h"

namespace x86quant::python {
namespace {

// Heads as the kernel reads them: the features of each adjacent.
Tensor adjacent_features(Tensor x) { return x->size(3) <= 1 || x->stride(3) == 1 ? std::move(x) : x.contiguous(); }

void set_strides(const Tensor& x, int64_t strides[3]) {
  for (int i = 0; i < 3; ++i) strides[i] = x->stride(i);
}

// native_attention(q, k, v, mask, causal, scale): q [B, S, H, D], k and v [B, T, heads, D] in float32; mask bool or
// float32 [B or 1, H or 1, S or 1, T].
PyObject* native_attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("native_attention", args, count, 6);
    const Labelled label("x86quant::attention");
    Tensor q = a.tensor(0), k = a.tensor(1), v = a.tensor(2);
    for (const Tensor* x : {&q, &k, &v})
      X86QUANT_REQUIRE((*x)->is_cpu && (*x)->type == Type::kFloat && (*x)->dims == 4,
              "attention: q, k and v must be float32 on the CPU with 4 dimensions, got ", name_of((*x)->type), " ", (*x)->text());
    X86QUANT_REQUIRE(k->shape() == v->shape() && k->size(0) == q->size(0) && k->size(3) == q->size(3) && k->size(2) > 0 &&
                q->size(2) % k->size(2) == 0,
            "attention: q ", q->text(), ", k ", k->text(), " and v ", v->text(), " do not fit each other");
    q = adjacent_features(std::move(q)), k = adjacent_features(std::move(k)), v = adjacent_features(std::move(v));
    NewTensor out(Type::kFloat, q->shape());
    xq_attention op{};
    op.isa = native_isa();
    op.batch = q->size(0), op.queries = q->size(1), op.keys = k->size(1);
    op.heads = q->size(2), op.kv_heads = k->size(2), op.size = q->size(3);
    op.q = q->as<float>(), op.k = k->as<float>(), op.v = v->as<float>();
    set_strides(q, op.q_stride), set_strides(k, op.k_stride), set_strides(v, op.v_stride);
    OptionalTensor mask = a.optional(3);
    if (mask) {
      const View& m = mask->view();
      const int64_t scores[4] = {op.batch, op.heads, op.queries, op.keys};
      bool fits = m.is_cpu && m.dims == 4 && m.size(3) == op.keys;
      for (int i = 0; fits && i < 3; ++i) fits = m.size(i) == 1 || m.size(i) == scores[i];
      X86QUANT_REQUIRE(fits && (m.type == Type::kBool || m.type == Type::kFloat), "attention: the mask must be bool or float32 of shape [",
              op.batch, " or 1, ", op.heads, " or 1, ", op.queries, " or 1, ", op.keys, "], got ", name_of(m.type), " ", m.text());
      mask = adjacent_features(std::move(*mask));
      op.mask = mask->view().data;
      op.mask_is_bool = mask->view().type == Type::kBool;
      for (int i = 0; i < 3; ++i) op.mask_stride[i] = mask->view().size(i) == 1 ? 0 : mask->view().stride(i);
    }
    op.causal = a.flag(4), op.scale = static_cast<float>(a.real(5));
    op.out = out.data<float>();
    without_gil([&] { runtime::run_attention(op); });
    return out.release();
  });
}

// interact_vectors(dense [samples, dim], vectors [samples, any number, dim], squares): dense, then the product of each
// vector with all before it, then, with `squares`, that of each with itself.
PyObject* interact_vectors(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("interact_vectors", args, count, 3);
    const Tensor dense = a.tensor(0).contiguous(), vectors = a.tensor(1).contiguous();
    const bool squares = a.flag(2);
    X86QUANT_REQUIRE(dense->dims == 2 && vectors->dims == 3 && dense->type == Type::kFloat && vectors->type == Type::kFloat &&
                dense->is_cpu && vectors->is_cpu && dense->size(0) == vectors->size(0) && dense->size(1) == vectors->size(2),
            "an interaction takes float32 [samples, size] and [samples, vectors, size], got ", name_of(dense->type), " ",
            dense->text(), " and ", name_of(vectors->type), " ", vectors->text());
    xq_interaction op{};
    op.samples = dense->size(0), op.dim = static_cast<int32_t>(dense->size(1));
    op.vectors = static_cast<int32_t>(vectors->size(1));
    op.first_stride = op.dim, op.in_stride = int64_t{op.vectors} * op.dim;
    op.squares = squares;
    op.out_stride = op.dim + int64_t{op.vectors} * (op.vectors + 1) / 2 + (squares ? op.vectors + 1 : 0);
    NewTensor out(Type::kFloat, {op.samples, op.out_stride});
    if (out.count() == 0) return out.release();
    op.first = dense->as<float>(), op.in = vectors->as<float>();
    op.out = out.data<float>();
    op.isa = native_isa();
    const int status = xq_interaction_check(&op);
    X86QUANT_REQUIRE(status == XQ_OK, "the interaction is refused: ", xq_status_text(status));
    constexpr int64_t kProductsEach = 500'000;  // fewer are not worth waking a thread for
    without_gil([&] {
      const int threads = runtime::useful_threads(op.samples * op.vectors * op.vectors / 2 * op.dim / kProductsEach);
      runtime::split(op.samples, threads, [&](int64_t begin, int64_t end) { xq_interaction_run(&op, begin, end); });
    });
    return out.release();
  });
}

// weight_only_rows(x, weight, scale, bias, activation): float rows (rows, in) times int8 weight (out, in), for few rows.
PyObject* weight_only_rows(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("weight_only_rows", args, count, 5);
    const Tensor x = a.tensor(0).contiguous(), weight = a.tensor(1).contiguous(), scale = a.tensor(2).contiguous();
    const OptionalTensor bias = contiguous(a.optional(3));
    bool fits = x->dims == 2 && weight->dims == 2 && x->size(1) == weight->size(1) && scale->count() == weight->size(0) &&
                x->type == Type::kFloat && weight->type == Type::kChar && scale->type == Type::kFloat && x->is_cpu &&
                weight->is_cpu && scale->is_cpu;
    if (bias) fits = fits && bias->view().count() == scale->count() && bias->view().type == Type::kFloat && bias->view().is_cpu;
    X86QUANT_REQUIRE(fits, "the operands of a weight-only linear do not fit each other");
    NewTensor out(Type::kFloat, {x->size(0), weight->size(0)});
    xq_weight_only op{};
    op.in = x->as<float>();
    op.out = out.data<float>();
    op.weight = weight->as<int8_t>();
    op.scale = scale->as<float>();
    op.bias = bias ? bias->view().as<float>() : nullptr;
    op.rows = x->size(0);
    op.in_stride = op.in_features = weight->size(1);
    op.out_stride = op.out_features = weight->size(0);
    op.activation = runtime::activation_code(a.text(4));
    op.isa = native_isa();
    succeed(xq_weight_only_check(&op));
    constexpr int64_t kFloatMultiplyAddsEach = 200'000;  // fewer are not worth waking a thread for
    without_gil([&] {
      const int threads = runtime::useful_threads(weight->count() * op.rows / kFloatMultiplyAddsEach);
      runtime::split(op.out_features, threads, [&](int64_t begin, int64_t end) { xq_weight_only_run(&op, begin, end); });
    });
    return out.release();
  });
}

// float_rows(x, weight, bias, outputs, rows, stride): float32 x [images, length], of each of which `rows` rows are read,
// `stride` floats from one to the next, times panels of weights [panels, in, XQ_PANEL], with biases of whole panels:
// [images, rows, outputs].
PyObject* float_rows(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("float_rows", args, count, 6);
    const Tensor x = a.tensor(0).contiguous(), weight = a.tensor(1).contiguous(), bias = a.tensor(2).contiguous();
    const int64_t outputs = a.integer(3), rows = a.integer(4), stride = a.integer(5);
    bool fits = x->dims == 2 && weight->dims == 3 && outputs >= 1 && rows >= 1 && stride >= 1;
    for (const Tensor* t : {&x, &weight, &bias}) fits = fits && (*t)->type == Type::kFloat && (*t)->is_cpu;
    fits = fits && weight->size(0) == (outputs - 1) / XQ_PANEL + 1 && weight->size(2) == XQ_PANEL && weight->size(1) >= 1 &&
           bias->count() == weight->size(0) * XQ_PANEL && weight->size(1) <= x->size(1) &&
           rows - 1 <= (x->size(1) - weight->size(1)) / stride;
    X86QUANT_REQUIRE(fits, "the operands of a product of float rows do not fit each other");
    const int64_t images = x->size(0);
    NewTensor out(Type::kFloat, {images, rows, outputs});
    xq_float_product op{};
    op.weight = weight->as<float>(), op.bias = bias->as<float>();
    op.in_stride = stride, op.out_stride = op.out_features = outputs, op.features = op.panel = weight->size(1);
    op.isa = native_isa();
    const auto* from = x->as<float>();
    auto* to = out.data<float>();
    without_gil([&] {
      constexpr int64_t kRowsAtOnce = 120, kProductsEach = 200'000;  // fewer are not worth waking a thread for
      const int64_t blocks = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
      const double products = static_cast<double>(out.count()) * static_cast<double>(op.features);
      const int threads = runtime::useful_threads(static_cast<int64_t>(products / kProductsEach) + 1);
      runtime::split(images * blocks, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t image = i / blocks, first = i % blocks * kRowsAtOnce;
          xq_float_product block = op;
          block.in = from + image * x->size(1) + first * stride;
          block.out = to + (image * rows + first) * outputs;
          xq_float_product_run(&block, 0, std::min(kRowsAtOnce, rows - first));
        }
      });
    });
    return out.release();
  });
}

PyMethodDef functions[] = {
    {"float_rows", as_method(float_rows), METH_FASTCALL, nullptr},
    {"interact_vectors", as_method(interact_vectors), METH_FASTCALL, nullptr},
    {"native_attention", as_method(native_attention), METH_FASTCALL, nullptr},
    {"weight_only_rows", as_method(weight_only_rows), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

Part product_part() { return {functions, nullptr}; }

}  // namespace x86quant::python

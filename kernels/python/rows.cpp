// Products of row codes, and what needs no product: see x86quant/ops/rows.py.
#include <limits>
#include <vector>

#include "../native/native_rows.h"
#include "../runtime/activation.h"
#include "../runtime/native_cpu.h"
#include "arguments.h"
#include "module.h"
#include "operands.h"
#include "packs.h"

namespace x86quant::python {
namespace {

using runtime::RowPack;
using Sizes = std::vector<int64_t>;

// Bits of `outputs`.
constexpr int64_t kTotal = 1, kNormed = 2, kCodes = 4;

// Row codes as three tensors: codes uint8 [..., K], scales float32 [...], zero points int32 [...].
struct NewRowCodes {
  explicit NewRowCodes(const Sizes& sizes) : NewRowCodes(sizes, Sizes(sizes.begin(), sizes.end() - 1)) {}
  static NewRowCodes none() { return {{0}, {0}}; }

  xq_codes written() const { return {codes.data<uint8_t>(), scale.data<float>(), zp.data<int32_t>()}; }
  PyObject* release() {
    Ref first(codes.release()), second(scale.release()), third(zp.release());
    return tuple_of(first.release(), second.release(), third.release());
  }

  NewTensor codes, scale, zp;

 private:
  NewRowCodes(const Sizes& sizes, const Sizes& rows) : codes(Type::kByte, sizes), scale(Type::kFloat, rows), zp(Type::kInt, rows) {}
};

// Row codes that are read: checked, and contiguous.
class RowCodes {
 public:
  RowCodes(const Tensor& codes, const Tensor& scale, const Tensor& zp, int64_t features)
      : codes_(codes.contiguous()), scale_(scale.contiguous()), zp_(zp.contiguous()) {
    X86QUANT_REQUIRE(codes->is_cpu && codes->type == Type::kByte && codes->dims > 0 && codes->size(-1) == features,
            "expected uint8 codes of ", features, " features, got ", name_of(codes->type), " ", codes->text());
    rows_ = 1;
    for (int64_t i = 0; i + 1 < codes->dims; ++i) rows_ *= codes->size(i);
    X86QUANT_REQUIRE(scale->is_cpu && zp->is_cpu && scale->type == Type::kFloat && zp->type == Type::kInt && scale->count() == rows_ &&
                zp->count() == rows_,
            "expected a float32 scale and an int32 zero point for each of ", rows_, " rows of codes, got ",
            name_of(scale->type), " ", scale->text(), " and ", name_of(zp->type), " ", zp->text());
    const int32_t* zps = zp_->as<int32_t>();
    for (int64_t i = 0; i < rows_; ++i)
      X86QUANT_REQUIRE(zps[i] >= 0 && zps[i] <= 255, "row ", i, " has the zero point ", zps[i],
              ", which no code can have; it must be from 0 to 255");
  }

  int64_t rows() const { return rows_; }

  Sizes sizes_with(int64_t features) const {
    Sizes sizes = codes_->shape();
    sizes.back() = features;
    return sizes;
  }

  // They are only read.
  xq_codes view() const {
    return {const_cast<uint8_t*>(codes_->as<uint8_t>()), const_cast<float*>(scale_->as<float>()),
            const_cast<int32_t*>(zp_->as<int32_t>())};
  }

 private:
  Tensor codes_, scale_, zp_;
  int64_t rows_;
};

xq_rows call_on(const RowPack& linear, const RowCodes& codes) {
  xq_rows op = linear.call(codes.rows());
  op.in = codes.view();
  return op;
}

void run_rows(xq_rows& op, int64_t in_features) {
  without_gil([&] { runtime::run_rows(op, in_features); });
}

OptionalTensor contiguous_floats(OptionalTensor t) {
  if (!t) return t;
  X86QUANT_REQUIRE(t->view().is_cpu && t->view().type == Type::kFloat, "the operands of a norm must be float32 on the CPU, got ",
          name_of(t->view().type));
  return t->contiguous();
}

// How a norm is asked for, with operands that live as long as this does.
struct Norm {
  OptionalTensor residual, weight, bias;
  double eps;
  int32_t kind;
  int64_t outputs;

  // From argument `first` on: residual, weight, bias, eps, kind, outputs.
  Norm(const Arguments& a, Py_ssize_t first)
      : residual(contiguous_floats(a.optional(first))), weight(contiguous_floats(a.optional(first + 1))),
        bias(contiguous_floats(a.optional(first + 2))), eps(a.real(first + 3)),
        kind(a.text(first + 4) == "layer" ? XQ_NORM_LAYER : XQ_NORM_RMS), outputs(a.integer(first + 5)) {}

  // Five tensors, in a tuple.
  PyObject* run_on(xq_rows& op, const Sizes& sizes, int64_t in_features) const {
    const auto fits = [](const OptionalTensor& t, int64_t count) { return !t || t->view().count() == count; };
    X86QUANT_REQUIRE(fits(residual, op.rows * op.features) && fits(weight, op.features) && fits(bias, op.features),
            "the operands of a norm do not fit each other");
    op.residual = floats_of(residual);
    op.norm_weight = floats_of(weight), op.norm_bias = floats_of(bias);
    op.norm = kind, op.eps = static_cast<float>(eps);
    const auto floats = [&](bool wanted) { return NewTensor(Type::kFloat, wanted ? sizes : Sizes{0}); };
    NewTensor total = floats(outputs & kTotal), normed = floats(outputs & kNormed);
    NewRowCodes codes = outputs & kCodes ? NewRowCodes(sizes) : NewRowCodes::none();
    if (op.rows * op.features > 0) {
      if (outputs & kTotal) op.total = total.data<float>();
      if (outputs & kNormed) op.normed = normed.data<float>();
      if (outputs & kCodes) op.out = codes.written();
      run_rows(op, in_features);
    }
    Ref one(total.release()), two(normed.release()), three(codes.codes.release()), four(codes.scale.release()),
        five(codes.zp.release());
    return tuple_of(one.release(), two.release(), three.release(), four.release(), five.release());
  }

 private:
  static const float* floats_of(const OptionalTensor& t) { return t ? t->view().as<float>() : nullptr; }
};

// --- packed weights ---

std::optional<runtime::Table> packed_before(const OptionalTensor& known) {
  X86QUANT_REQUIRE(!known || (known->view().type == Type::kByte && known->view().is_cpu), "packed weights are bytes");
  return table_of(known);
}

// pack_row_linear(weight, scale, bias, activation, unpack, known=None)
PyObject* pack_row_linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("pack_row_linear", args, count, 5, 6);
    const Operands operands(a, 0);
    const runtime::RowWeights weights = operands.weights(a.integers(4));
    const int32_t activation = runtime::activation_code(a.optional_text(3));
    const std::optional<runtime::Table> known = packed_before(a.optional(5));
    return RowPackType::object(without_gil([&]() -> runtime::RowPackPtr {
      return std::make_shared<RowPack>(weights, activation, known);
    }));
  });
}

// pack_gated_rows(gate, gate_scale, gate_bias, up, up_scale, up_bias, activation, unpack, known=None, known_up=None)
PyObject* pack_gated_rows(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("pack_gated_rows", args, count, 8, 10);
    const Operands gate(a, 0), up(a, 3);
    const runtime::RowWeights first = gate.weights(a.integers(7)), second = up.weights(a.integers(7));
    const int32_t activation = runtime::activation_code(a.text(6));
    const std::optional<runtime::Table> known = packed_before(a.optional(8)), known_up = packed_before(a.optional(9));
    return RowPackType::object(without_gil([&]() -> runtime::RowPackPtr {
      const auto pack = std::make_shared<RowPack>(first, activation, known);
      pack->multiply_by(second, known_up);
      return pack;
    }));
  });
}

// floats(codes, scale, zero_point): the product of row codes, as float32 rows.
PyObject* floats(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Labelled label("x86quant::linear_rows");
    const runtime::RowPackPtr linear = RowPackType::of(self);
    const Arguments a("floats", args, count, 3);
    const RowCodes codes(a.tensor(0), a.tensor(1), a.tensor(2), linear->in_features());
    NewTensor out(Type::kFloat, codes.sizes_with(linear->out_features()));
    if (out.count() == 0) return out.release();
    xq_rows op = call_on(*linear, codes);
    op.total = out.data<float>();
    run_rows(op, linear->in_features());
    return out.release();
  });
}

// codes(codes, scale, zero_point): the same as row codes.
PyObject* row_codes(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Labelled label("x86quant::linear_rows_rows");
    const runtime::RowPackPtr linear = RowPackType::of(self);
    const Arguments a("codes", args, count, 3);
    const RowCodes codes(a.tensor(0), a.tensor(1), a.tensor(2), linear->in_features());
    NewRowCodes out(codes.sizes_with(linear->out_features()));
    if (codes.rows() == 0) return out.release();
    xq_rows op = call_on(*linear, codes);
    op.out = out.written();
    run_rows(op, linear->in_features());
    return out.release();
  });
}

// normed(codes, scale, zero_point, residual, weight, bias, eps, kind, outputs)
PyObject* normed(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Labelled label("x86quant::linear_rows_norm");
    const runtime::RowPackPtr linear = RowPackType::of(self);
    const Arguments a("normed", args, count, 9);
    const RowCodes codes(a.tensor(0), a.tensor(1), a.tensor(2), linear->in_features());
    xq_rows op = call_on(*linear, codes);
    return Norm(a, 3).run_on(op, codes.sizes_with(linear->out_features()), linear->in_features());
  });
}

PyObject* bytes(PyObject* self, PyObject*) {
  return answer([&] { return to_python(RowPackType::of(self)->bytes()); });
}

PyObject* blobs(PyObject* self, PyObject*) {
  return answer([&] {
    const std::vector<runtime::Table> found = RowPackType::of(self)->blobs();
    return list_of(found.size(), [&](size_t i) { return tensor_of(found[i]); });
  });
}

// --- without a product ---

// Float32 rows, contiguous, at least one dimension.
Tensor rows_of(const Tensor& x) {
  X86QUANT_REQUIRE(x->is_cpu && x->type == Type::kFloat && x->dims > 0, "rows must be float32 on the CPU, got ", name_of(x->type),
          " of shape ", x->text());
  return x.contiguous();
}

xq_rows call_on(const Tensor& x) {
  xq_rows op{};
  op.isa = native_isa(), op.features = x->size(-1);
  op.rows = x->count() == 0 ? 0 : x->count() / op.features;
  op.x = x->as<float>();
  return op;
}

PyObject* native_quantize_rows(PyObject*, PyObject* tensor) {
  return answer([&] {
    const Tensor in = rows_of(Tensor(tensor));
    NewRowCodes out(in->shape());
    if (in->count() == 0) {  // rows of no features have no range
      std::fill_n(out.scale.data<float>(), out.scale.count(), std::numeric_limits<float>::min());
      std::fill_n(out.zp.data<int32_t>(), out.zp.count(), 0);
      return out.release();
    }
    xq_rows op = call_on(in);
    op.out = out.written();
    run_rows(op, 0);
    return out.release();
  });
}

// native_norm_rows(x, residual, weight, bias, eps, kind, outputs)
PyObject* native_norm_rows(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("native_norm_rows", args, count, 7);
    const Tensor in = rows_of(a.tensor(0));
    xq_rows op = call_on(in);
    return Norm(a, 1).run_on(op, in->shape(), 0);
  });
}

PyMethodDef methods[] = {
    {"blobs", blobs, METH_NOARGS, nullptr},
    {"bytes", bytes, METH_NOARGS, nullptr},
    {"codes", as_method(row_codes), METH_FASTCALL, nullptr},
    {"floats", as_method(floats), METH_FASTCALL, nullptr},
    {"normed", as_method(normed), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef functions[] = {
    {"native_norm_rows", as_method(native_norm_rows), METH_FASTCALL, nullptr},
    {"native_quantize_rows", native_quantize_rows, METH_O, nullptr},
    {"pack_gated_rows", as_method(pack_gated_rows), METH_FASTCALL, nullptr},
    {"pack_row_linear", as_method(pack_row_linear), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

void add_types(PyObject* module) {
  add_type(module, "RowLinear", RowPackType::make("x86quant._C.RowLinear", methods));
}

}  // namespace

Part row_part() { return {functions, add_types}; }

}  // namespace x86quant::python

// LSTMs and GRUs: see dynamic/recurrent.h.
#include "../dynamic/recurrent.h"

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "module.h"
#include "operands.h"
#include "types.h"

namespace x86quant::python {
namespace {

using RecurrentPtr = std::shared_ptr<const dynamic::Recurrent>;
using RecurrentType = HolderType<RecurrentPtr>;

// Recurrent(kind, bidirectional, projected, weights, scales, biases): direction by direction and layer by layer the
// products of the input, the state and, where states are projected, the projection.
PyObject* make_recurrent(PyTypeObject*, PyObject* args, PyObject*) {
  return answer([&]() -> PyObject* {
    PyObject *kind = nullptr, *weights = nullptr, *scales = nullptr, *biases = nullptr;
    int bidirectional = 0, projected = 0;
    if (!PyArg_ParseTuple(args, "OppOOO", &kind, &bidirectional, &projected, &weights, &scales, &biases)) return nullptr;
    const Items codes(weights), steps(scales), shifts(biases);
    X86QUANT_REQUIRE(steps.size() == codes.size() && shifts.size() == codes.size(), "malformed recurrent layer");
    std::vector<Operands> operands;
    std::vector<runtime::RowWeights> products;
    for (size_t i = 0; i < codes.size(); ++i) {
      operands.emplace_back(Tensor(codes[i]), Tensor(steps[i]), optional_tensor(shifts[i]));
      products.push_back(operands.back().weights());
    }
    const std::string name = text_of(kind);
    return RecurrentType::object(without_gil([&]() -> RecurrentPtr {
      return std::make_shared<dynamic::Recurrent>(name, bidirectional != 0, projected != 0, products);
    }));
  });
}

void check(const dynamic::Recurrent& layer, const Tensor& x, const std::vector<int64_t>& sizes, const Tensors& initial) {
  X86QUANT_REQUIRE(x->dims == 2 && x->type == Type::kFloat && x->is_cpu && x->size(1) == layer.features(), "expected float32 [rows, ",
          layer.features(), "] in the input, got ", name_of(x->type), " ", x->text());
  int64_t rows = 0;
  bool falling = !sizes.empty() && sizes[0] >= 0;
  for (size_t t = 0; t < sizes.size(); ++t) {
    falling = falling && sizes[t] >= 0 && sizes[t] <= sizes[t ? t - 1 : 0];
    rows += sizes[t];
  }
  const auto text = [](const std::vector<int64_t>& all) {
    return runtime::sizes_text(all.data(), static_cast<int64_t>(all.size()));
  };
  X86QUANT_REQUIRE(falling && rows == x->size(0), "the numbers of sequences at each step must not grow, and make ", x->size(0),
          " together; got ", text(sizes));
  const std::vector<int64_t> h = {layer.states(), sizes[0], layer.state_size()}, c = {layer.states(), sizes[0], layer.cell_size()};
  const bool fits = initial.size() == (layer.is_lstm() ? 2 : 1) && initial[0]->shape() == h &&
                    (!layer.is_lstm() || initial[1]->shape() == c) &&
                    std::all_of(initial.begin(), initial.end(), [](const Tensor& state) {
                      return state->type == Type::kFloat && state->is_cpu;
                    });
  X86QUANT_REQUIRE(fits, "expected initial states of float32 ", text(h), layer.is_lstm() ? " and " + text(c) : std::string());
}

// run(x, sizes, initial): the states of the last layer at all steps, then the last h, and c of an LSTM.
PyObject* run(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const RecurrentPtr layer = RecurrentType::of(self);
    const Labelled label(layer->is_lstm() ? "x86quant::lstm_dynamic" : "x86quant::gru_dynamic");
    const Arguments a("run", args, count, 3);
    const Tensor x = a.tensor(0).contiguous();
    const std::vector<int64_t> sizes = a.integers(1);
    const Tensors initial = a.tensors(2);
    check(*layer, x, sizes, initial);
    std::vector<NewTensor> results;
    results.emplace_back(Type::kFloat, std::vector<int64_t>{x->size(0), layer->out_features()});
    for (const Tensor& state : initial) {
      const Tensor plain = state.contiguous();
      NewTensor& last = results.emplace_back(Type::kFloat, plain->shape());
      std::copy_n(plain->as<float>(), plain->count(), last.data<float>());
    }
    float* const c = layer->is_lstm() ? results[2].data<float>() : nullptr;
    without_gil([&] { layer->run(x->as<float>(), sizes, results[1].data<float>(), c, results[0].data<float>()); });
    return list_of(results.size(), [&](size_t i) { return results[i].release(); });
  });
}

PyObject* bytes(PyObject* self, PyObject*) {
  return answer([&] { return to_python(RecurrentType::of(self)->bytes()); });
}

PyMethodDef methods[] = {
    {"bytes", bytes, METH_NOARGS, nullptr},
    {"run", as_method(run), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

void add_types(PyObject* module) {
  add_type(module, "Recurrent", RecurrentType::make("x86quant._C.Recurrent", methods, make_recurrent));
}

}  // namespace

Part recurrent_part() { return {nullptr, add_types}; }

}  // namespace x86quant::python

// Linears on float rows: weights packed once for each kernel that the rules chose.
#include <limits>
#include <vector>

#include "../dynamic/kernel.h"
#include "arguments.h"
#include "module.h"
#include "operands.h"
#include "types.h"

namespace x86quant::python {
namespace {

// What runs up to so many rows: a kernel, or a Python function of the rows.
struct Segment {
  int64_t max_rows;
  dynamic::KernelPtr kernel;
  Ref function;
};

struct DynamicLinear {
  int64_t in, out;
  std::string record;
  std::vector<Segment> segments;
};

using LinearPtr = std::shared_ptr<const DynamicLinear>;
using LinearType = HolderType<LinearPtr>;

// pack_linear_dynamic(weight, scale, bias, activation, unpack, max_rows, kernels, record): kernels are names, or functions.
PyObject* pack_linear_dynamic(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("pack_linear_dynamic", args, count, 8);
    const Operands operands(a, 0);
    const dynamic::Description d{operands.weights(a.integers(4)), a.optional_text(3)};
    const std::vector<int64_t> max_rows = a.integers(5);
    const Items kernels(a[6]);
    X86QUANT_REQUIRE(kernels.size() > 0 && kernels.size() == max_rows.size(), "one kernel is needed for each of the row bounds");
    auto made = std::make_shared<DynamicLinear>();
    made->in = d.weights.in_features, made->out = d.weights.out_features;
    made->record = a.text(7);
    for (size_t i = 0; i < kernels.size(); ++i) {
      Segment& segment = made->segments.emplace_back();
      segment.max_rows = max_rows[i] < 0 ? std::numeric_limits<int64_t>::max() : max_rows[i];
      if (PyCallable_Check(kernels[i])) {
        segment.function = Ref::to(kernels[i]);
        continue;
      }
      const std::string name = text_of(kernels[i]);
      segment.kernel = without_gil([&] { return dynamic::make(name, d); });
    }
    X86QUANT_REQUIRE(made->segments.back().max_rows == std::numeric_limits<int64_t>::max(), "the last kernel runs any number of rows");
    return LinearType::object(std::move(made));
  });
}

PyObject* run(PyObject* self, PyObject* tensor) {
  return answer([&]() -> PyObject* {
    const LinearPtr linear = LinearType::of(self);
    const Labelled label("x86quant::linear_dynamic");
    Tensor x(tensor);
    X86QUANT_REQUIRE(x->is_cpu && x->type == Type::kFloat, "linear_dynamic: x must be float32 on the CPU, got ", name_of(x->type),
            x->is_cpu ? "" : " elsewhere", "; convert it with x.float().cpu()");
    X86QUANT_REQUIRE(x->dims > 0 && x->size(-1) == linear->in, "linear_dynamic: expected ", linear->in,
            " input features, got shape ", x->text());
    std::vector<int64_t> sizes = x->shape();
    sizes.back() = linear->out;
    NewTensor out(Type::kFloat, std::move(sizes));
    if (out.count() == 0) return out.release();
    const int64_t rows = out.count() / linear->out;
    size_t i = 0;
    while (rows > linear->segments[i].max_rows) ++i;
    const Segment& segment = linear->segments[i];
    if (!segment.kernel) return Ref(PyObject_CallFunctionObjArgs(segment.function.get(), x.object(), nullptr)).release();
    // Rows may lie apart; anything less regular is copied.
    const bool apart = x->dims == 2 && x->stride(1) == 1 && x->stride(0) >= linear->in;
    if (!apart) x = x.contiguous();
    const int64_t row_stride = apart ? x->stride(0) : linear->in;
    without_gil([&] { segment.kernel->run(x->as<float>(), rows, row_stride, out.data<float>()); });
    return out.release();
  });
}

PyObject* record(PyObject* self, PyObject*) {
  return answer([&] { return to_python(LinearType::of(self)->record); });
}

PyObject* bytes(PyObject* self, PyObject*) {
  return answer([&] {
    int64_t sum = 0;
    for (const Segment& segment : LinearType::of(self)->segments)
      if (segment.kernel) sum += segment.kernel->bytes();
    return to_python(sum);
  });
}

PyMethodDef methods[] = {
    {"bytes", bytes, METH_NOARGS, nullptr},
    {"record", record, METH_NOARGS, nullptr},
    {"run", run, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef functions[] = {
    {"pack_linear_dynamic", as_method(pack_linear_dynamic), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

void add_types(PyObject* module) {
  add_type(module, "DynamicLinear", LinearType::make("x86quant._C.DynamicLinear", methods));
}

}  // namespace

Part linear_part() { return {functions, add_types}; }

}  // namespace x86quant::python

// Lookups in quantized embedding tables: any number of them in one call.
#include "../dynamic/tables.h"

#include "arguments.h"
#include "module.h"

namespace x86quant::python {
namespace {

Tensors contiguous(const Tensors& given) {
  Tensors found;
  found.reserve(given.size());
  for (const Tensor& x : given) found.push_back(x.contiguous());
  return found;
}

// (rows, indices, offsets, weights, geometry, names, last_offset): the tensors of a call, and the tables in it.
struct Call {
  Call(const Arguments& a, Tensors rows, const Tensors& indices, const Tensors& offsets, const Tensors& weights)
      : rows(std::move(rows)), indices(contiguous(indices)), offsets(contiguous(offsets)), weights(contiguous(weights)),
        tables(views_of(this->rows), a.integers(4), a.texts(5)),
        ops(tables.look_ups(views_of(this->indices), views_of(this->offsets), views_of(this->weights), a.flag(6))) {}
  explicit Call(const Arguments& a) : Call(a, a.tensors(0), a.tensors(1), a.tensors(2), a.tensors(3)) {}

  PyObject* run() const {
    const Labelled label("x86quant::embedding_bags");
    NewTensor out(Type::kFloat, {ops[0].bags, tables.out_features()});
    without_gil([&] { tables.run(ops, out.data<float>()); });
    return out.release();
  }

  Tensors rows, indices, offsets, weights;
  dynamic::Tables tables;
  std::vector<xq_lookup> ops;
};

PyObject* look_up_bags(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] { return Call(Arguments("look_up_bags", args, count, 7)).run(); });
}

PyObject* check_bags(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Call call(Arguments("check_bags", args, count, 7));
    without_gil([&] { call.tables.check(call.ops); });
    return none();
  });
}

// try_look_up: as look_up_bags; None if somebody watches, or an operand is more than a tensor's memory.
PyObject* try_look_up(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("try_look_up", args, count, 7);
    if (somebody_watches()) return none();
    std::optional<Tensors> operands[4];
    for (Py_ssize_t i = 0; i < 4; ++i)
      if (!(operands[i] = plain_tensors(a[i]))) return none();
    return Call(a, std::move(*operands[0]), *operands[1], *operands[2], *operands[3]).run();
  });
}

PyMethodDef functions[] = {
    {"check_bags", as_method(check_bags), METH_FASTCALL, nullptr},
    {"look_up_bags", as_method(look_up_bags), METH_FASTCALL, nullptr},
    {"try_look_up", as_method(try_look_up), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

Part table_part() { return {functions, nullptr}; }

}  // namespace x86quant::python

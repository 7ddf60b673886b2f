// The runtime's functions: packed weights, their cache, the CPU that kernels are for, what threads cost.
#include <algorithm>
#include <chrono>
#include <optional>
#include <vector>

#include "../runtime/arenas.h"
#include "../runtime/native_cpu.h"
#include "../runtime/packed_cache.h"
#include "../runtime/parallel.h"
#include "../runtime/step.h"
#include "../runtime/weight_extremes.h"
#include "arguments.h"
#include "module.h"
#include "packs.h"

namespace x86quant::python {
namespace {

using namespace runtime;

// --- packed weights ---

// pack_graph_conv(kernel, weight, mult, bias, lut, geometry, codes, res_mult, packed=None, slopes=None): as ConvFields has them.
PyObject* pack_graph_conv(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("pack_graph_conv", args, count, 8, 10);
    const std::string kernel = a.text(0);
    const Tensor weight = a.tensor(1);
    ConvFields fields;
    fields.weight = table_of(weight);
    fields.sizes = weight->shape();
    fields.mult = table_of(a.tensor(2));
    fields.bias = table_of(a.optional(3));
    fields.lut = table_of(a.optional(4));
    fields.geometry = a.integers(5);
    fields.codes = a.integers(6);
    fields.res_mult = a.real(7);
    std::optional<Table> packed = table_of(a.optional(8));
    fields.slopes = table_of(a.optional(9));
    return ConvPackType::object(without_gil([&] {
      ConvDescription description = describe_conv(std::move(fields));
      description.packed = std::move(packed);
      return pack_conv(kernel, std::move(description));
    }));
  });
}

PyObject* pack_bytes(PyObject* self, PyObject*) {
  return answer([&] { return to_python(ConvPackType::of(self)->bytes()); });
}

// None where the packed weights are not one stretch of memory.
PyObject* pack_blob(PyObject* self, PyObject*) {
  return answer([&] {
    const Table found = ConvPackType::of(self)->blob();
    return found.count == 0 ? none() : tensor_of(found);
  });
}

PyMethodDef pack_methods[] = {
    {"blob", pack_blob, METH_NOARGS, nullptr},
    {"bytes", pack_bytes, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

CacheKey key_of(std::string model) {
  NativeCpu cpu = native_cpu();
  return {std::move(cpu.level), cpu.l1, cpu.l2, std::move(model)};
}

// read_packed_cache(path, model): the tensors that are there, and why there are none.
PyObject* read_packed_cache(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("read_packed_cache", args, count, 2);
    const std::string path = a.text(0), model = a.text(1);
    std::string why;
    const auto found = without_gil([&] { return read_packed(path, key_of(model), &why); });
    Ref blobs(list_of(found ? found->size() : 0, [&](size_t i) { return tensor_of((*found)[i]); }));
    Ref reason(to_python(why));
    return tuple_of(blobs.release(), reason.release());
  });
}

PyObject* write_packed_cache(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("write_packed_cache", args, count, 3);
    const std::string path = a.text(0), model = a.text(1);
    std::vector<Table> tables;
    for (const Tensor& one : a.tensors(2)) tables.push_back(table_of(one));
    return PyBool_FromLong(without_gil([&] { return write_packed(path, key_of(model), tables); }));
  });
}

// --- facts ---

PyObject* weight_extremes_of(PyObject*, PyObject* tensor) {
  return answer([&] {
    const Tensor rows(tensor);
    require(rows->dims == 2 && rows->type == Type::kChar && rows->is_cpu && rows->is_contiguous(),
            "extremes are those of rows of int8");
    const WeightExtremes found =
        without_gil([&] { return weight_extremes(rows->as<int8_t>(), rows->size(0), rows->size(1)); });
    const int64_t ends[] = {found.neighbours.low, found.neighbours.high, found.any_two.low,
                            found.any_two.high,   found.rows.low,        found.rows.high};
    return list_of(std::size(ends), [&](size_t i) { return to_python(ends[i]); });
  });
}

PyObject* set_cpu(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("set_native_cpu", args, count, 3);
    return to_python(set_native_cpu(a.text(0), a.integer(1), a.integer(2)));
  });
}

PyObject* idle_bytes(PyObject*, PyObject*) {
  return answer([] { return to_python(static_cast<int64_t>(idle_arena_bytes())); });
}

PyObject* kinds(PyObject*, PyObject*) {
  return answer([] {
    const std::vector<std::string> found = step_kinds();
    return list_of(found.size(), [&](size_t i) { return to_python(found[i]); });
  });
}

// --- what it costs to share a loop among threads; `benchmarks/scaling.py` asks ---

using Clock = std::chrono::steady_clock;

double nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

// Nanoseconds of one of `loops` loops, each of `threads` shares that take `busy` nanoseconds; all in one region or
// each in one of its own.
double nanoseconds_of_loops(int64_t loops, int64_t threads, double busy, bool together) {
  const auto share = [&](int) {
    for (const auto start = Clock::now(); busy > 0 && nanoseconds_since(start) < busy;) {
    }
  };
  const auto all = [&](int) {
    for (int64_t i = 0; i < loops; ++i) run_on_threads(static_cast<int>(threads), share);
  };
  const auto start = Clock::now();
  together ? with_team(all) : all(0);
  return nanoseconds_since(start) / static_cast<double>(loops);
}

PyObject* loop_nanoseconds(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return answer([&] {
    const Arguments a("loop_nanoseconds", args, count, 4);
    const int64_t loops = a.integer(0), threads = a.integer(1);
    const double busy = a.real(2);
    const bool together = a.flag(3);
    const double found = without_gil([&] { return nanoseconds_of_loops(loops, threads, busy, together); });
    return Ref(PyFloat_FromDouble(found)).release();
  });
}

PyMethodDef functions[] = {
    {"idle_arena_bytes", idle_bytes, METH_NOARGS, nullptr},
    {"loop_nanoseconds", as_method(loop_nanoseconds), METH_FASTCALL, nullptr},
    {"pack_graph_conv", as_method(pack_graph_conv), METH_FASTCALL, nullptr},
    {"read_packed_cache", as_method(read_packed_cache), METH_FASTCALL, nullptr},
    {"set_native_cpu", as_method(set_cpu), METH_FASTCALL, nullptr},
    {"step_kinds", kinds, METH_NOARGS, nullptr},
    {"weight_extremes", weight_extremes_of, METH_O, nullptr},
    {"write_packed_cache", as_method(write_packed_cache), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

void add_types(PyObject* module) {
  add_type(module, "PackedConv", ConvPackType::make("x86quant._C.PackedConv", pack_methods));
}

}  // namespace

Part runtime_part() { return {functions, add_types}; }

}  // namespace x86quant::python

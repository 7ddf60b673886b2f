// A program as Python holds it: built step by step, then run on tensors.
#include "../runtime/program.h"

#include <algorithm>
#include <vector>

#include "../runtime/parallel.h"
#include "arguments.h"
#include "module.h"
#include "packs.h"

namespace x86quant::python {
namespace {

using namespace runtime;

Type type_named(const std::string& name) {
  for (int i = 0; i < static_cast<int>(Type::kOther); ++i)
    if (name == facts_of(static_cast<Type>(i)).torch_name) return static_cast<Type>(i);
  throw Refused(joined("a program takes no tensors of type ", name));
}

struct PlannedProgram {
  explicit PlannedProgram(std::unique_ptr<Program> made, size_t inputs) : steps(std::move(made)), inputs(inputs) {}

  // To be changed, and checked again.
  Program& open() {
    is_checked = false;
    return *steps;
  }

  void check_reach() {
    steps->check_reach(Program::Inputs::kMayBeUpdated);
    input_types.clear(), output_types.clear();
    for (const Layout& input : steps->inputs()) input_types.push_back(type_named(input.type));
    for (const Layout& output : steps->outputs()) output_types.push_back(type_named(output.type));
    is_checked = true;
  }

  // Whether it is for inputs like these.
  bool takes(const Tensors& given) const {
    const std::vector<Layout>& expected = steps->inputs();
    if (given.size() != inputs || inputs != expected.size()) return false;
    for (size_t i = 0; i < inputs; ++i) {
      const View& x = given[i].view();
      const Layout& wanted = expected[i];
      if (!x.is_cpu || x.type != (is_checked ? input_types[i] : type_named(wanted.type))) return false;
      const bool fits = wanted.is_open() ? x.dims == 1 && x.is_contiguous()
                                         : x.dims == static_cast<int64_t>(wanted.sizes.size()) &&
                                               std::equal(wanted.sizes.begin(), wanted.sizes.end(), x.sizes) &&
                                               std::equal(wanted.strides.begin(), wanted.strides.end(), x.strides);
      if (!fits) return false;
    }
    return true;
  }

  std::unique_ptr<Program> steps;
  size_t inputs;
  bool is_checked = false;
  std::vector<Type> input_types, output_types;
};

using PlannedPtr = std::shared_ptr<PlannedProgram>;
using ProgramType = HolderType<PlannedPtr>;

// A call: addresses of inputs and results, and the sizes that one of them is of.
class Call {
 public:
  Call(const PlannedProgram& program, const Tensors& inputs) : program_(program) {
    require(program.is_checked, "a program runs once check_reach has found it right");
    const std::vector<Layout>& outputs = program.steps->outputs();
    results_.reserve(outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i)
      results_.emplace_back(program.output_types[i], outputs[i].sizes, outputs[i].strides);
    bases_.reserve(2 + inputs.size() + outputs.size());
    bases_.push_back(nullptr);      // the arena
    for (const Tensor& x : inputs)  // no step writes to those that none updates: see Program::check_reach
      bases_.push_back(static_cast<uint8_t*>(const_cast<void*>(x->data)));
    for (const NewTensor& y : results_) bases_.push_back(y.data<uint8_t>());
    for (size_t i = 0; i < inputs.size(); ++i)
      if (program.steps->inputs()[i].is_open()) sizes_.push_back(inputs[i]->count());
    if (!sizes_.empty()) bases_.push_back(reinterpret_cast<uint8_t*>(sizes_.data()));
  }

  void run() {
    without_gil([&] { program_.steps->run(bases_); });
  }
  void run_timed(std::vector<double>& microseconds) {
    without_gil([&] { program_.steps->run_timed(bases_, microseconds); });
  }

  PyObject* results_in_list() {
    return list_of(results_.size(), [&](size_t i) { return results_[i].release(); });
  }
  PyObject* results_in_tuple() {
    Ref made(PyTuple_New(static_cast<Py_ssize_t>(results_.size())));
    for (size_t i = 0; i < results_.size(); ++i)
      if (PyTuple_SetItem(made.get(), static_cast<Py_ssize_t>(i), results_[i].release()) < 0) throw Raised();
    return made.release();
  }

 private:
  const PlannedProgram& program_;
  std::vector<NewTensor> results_;
  Bases bases_;
  Words sizes_;
};

// --- building ---

// Of integers unless the first is a real; the rest must be like it.
Field list_field(PyObject* list) {
  const Items items(list);
  const bool reals = items.size() > 0 && PyFloat_Check(items[0]);
  Words integers;
  std::vector<double> doubles;
  for (size_t i = 0; i < items.size(); ++i) {
    PyObject* item = items[i];
    if (!(reals ? PyFloat_Check(item) : PyLong_Check(item)))
      throw WrongType("x86quant: a list of a step holds integers or reals alone");
    reals ? doubles.push_back(real_of(item)) : integers.push_back(integer_of(item));
  }
  return reals ? Field(std::move(doubles)) : Field(std::move(integers));
}

Field field_of(PyObject* value) {
  if (PyBool_Check(value)) return Field(value == Py_True);
  if (PyLong_Check(value)) return integer_of(value);
  if (PyFloat_Check(value)) return real_of(value);
  if (PyList_Check(value)) return list_field(value);
  if (value == Py_None) return {};
  if (RowPackType::is_of(value)) return RowPackType::of(value);
  if (ConvPackType::is_of(value)) return ConvPackType::of(value);
  if (torch_api().is_tensor(value)) return table_of(Tensor(value));
  const Ref type(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(value)), "__name__"));
  throw WrongType(joined("a field of a step cannot be of type ", text_of(type.get())));
}

PyObject* make_program(PyTypeObject*, PyObject* args, PyObject*) {
  return answer([&]() -> PyObject* {
    long long arena = 0, inputs = 0;
    if (!PyArg_ParseTuple(args, "LL", &arena, &inputs)) return nullptr;
    require(inputs >= 0, "negative sizes in a plan");
    return ProgramType::object(
        std::make_shared<PlannedProgram>(std::make_unique<Program>(arena), static_cast<size_t>(inputs)));
  });
}

// A method whose body takes the program and its arguments; it returns a new reference, or nothing.
template <class Body>
PyObject* on_program(PyObject* self, const Body& body) {
  return answer([&]() -> PyObject* {
    const PlannedPtr program = ProgramType::of(self);
    if constexpr (std::is_void_v<decltype(body(*program))>) {
      body(*program);
      return none();
    } else {
      return body(*program);
    }
  });
}

Layout layout_of(const Arguments& a) { return {a.integers(0), a.integers(1), a.text(2)}; }

PyObject* add_output(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return on_program(self, [&](PlannedProgram& p) { p.open().add_output(layout_of(Arguments("add_output", args, count, 3))); });
}

PyObject* expect(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return on_program(self, [&](PlannedProgram& p) { p.open().add_input(layout_of(Arguments("expect", args, count, 3))); });
}

PyObject* expect_any_size(PyObject* self, PyObject* type) {
  return on_program(self, [&](PlannedProgram& p) { p.open().add_input({{-1}, {1}, text_of(type)}); });
}

PyObject* keep(PyObject* self, PyObject* bytes) {
  return on_program(self, [&](PlannedProgram& p) { p.steps->keep(all_of<int64_t>(bytes, integer_of)); });
}

PyObject* repeat(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return on_program(self, [&](PlannedProgram& p) {
    const Arguments a("repeat", args, count, 2);
    p.steps->repeat(a.integer(0), a.integers(1));
  });
}

PyObject* of_parts(PyObject* self, PyObject* times) {
  return on_program(self, [&](PlannedProgram& p) {
    std::unique_ptr<Program> made = p.steps->of_parts(integer_of(times));
    const size_t inputs = made->inputs().size();
    auto other = std::make_shared<PlannedProgram>(std::move(made), inputs);
    other->check_reach();
    return ProgramType::object(std::move(other));
  });
}

PyObject* check_reach(PyObject* self, PyObject*) {
  return on_program(self, [](PlannedProgram& p) { p.check_reach(); });
}

// add_step(kind, fields): see step.h.
PyObject* add_step(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return on_program(self, [&](PlannedProgram& p) {
    const Arguments a("add_step", args, count, 2);
    if (!PyUnicode_Check(a[0]) || !PyDict_Check(a[1])) throw WrongType("x86quant: add_step takes a kind and a dictionary");
    StepFields::Values fields;
    each_item(a[1], [&](PyObject* key, PyObject* value) { return fields.emplace(text_of(key), field_of(value)), true; });
    p.steps->add(a.text(0), fields);
  });
}

// --- running ---

// run(inputs): a list of results.
PyObject* run(PyObject* self, PyObject* inputs) {
  return on_program(self, [&](PlannedProgram& p) {
    const Tensors given = tensors_of(inputs);
    require(p.takes(given), "the plan is for other inputs");
    Call call(p, given);
    call.run();
    return call.results_in_list();
  });
}

// run_timed(inputs): the results, and the microseconds of each step. The times come as a tensor: thousands of numbers in
// Python's form would take longer than a step.
PyObject* run_timed(PyObject* self, PyObject* inputs) {
  return on_program(self, [&](PlannedProgram& p) {
    const Tensors given = tensors_of(inputs);
    require(p.takes(given), "the plan is for other inputs");
    Call call(p, given);
    std::vector<double> microseconds;
    call.run_timed(microseconds);
    NewTensor times(Type::kDouble, {static_cast<int64_t>(microseconds.size())});
    std::copy(microseconds.begin(), microseconds.end(), times.data<double>());
    Ref results(call.results_in_list());
    return tuple_of(results.release(), times.release());
  });
}

// try_run(inputs): a tuple of results, or None if the program is for other inputs or another number of threads, or if
// somebody watches.
PyObject* try_run(PyObject* self, PyObject* inputs) {
  return on_program(self, [&](PlannedProgram& p) {
    const std::optional<Tensors> given = plain_tensors(inputs);
    if (!given || somebody_watches() || !p.takes(*given) || p.steps->threads() != all_threads()) return none();
    Call call(p, *given);
    call.run();
    return call.results_in_tuple();
  });
}

PyMethodDef methods[] = {
    {"add_output", as_method(add_output), METH_FASTCALL, nullptr},
    {"add_step", as_method(add_step), METH_FASTCALL, nullptr},
    {"check_reach", check_reach, METH_NOARGS, nullptr},
    {"expect", as_method(expect), METH_FASTCALL, nullptr},
    {"expect_any_size", expect_any_size, METH_O, nullptr},
    {"keep", keep, METH_O, nullptr},
    {"of_parts", of_parts, METH_O, nullptr},
    {"repeat", as_method(repeat), METH_FASTCALL, nullptr},
    {"run", run, METH_O, nullptr},
    {"run_timed", run_timed, METH_O, nullptr},
    {"try_run", try_run, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

void add_types(PyObject* module) {
  add_type(module, "Program", ProgramType::make("x86quant._C.Program", methods, make_program));
}

}  // namespace

Part program_part() { return {nullptr, add_types}; }

}  // namespace x86quant::python

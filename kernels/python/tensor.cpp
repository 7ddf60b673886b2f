#include "tensor.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace x86quant::python {
namespace {

constexpr size_t kAlignment = 64;

DLDataType dlpack_of(Type type) {
  const auto bits = static_cast<uint8_t>(8 * runtime::bytes_of(type));
  switch (type) {
    case Type::kBool: return {kDLBool, bits, 1};
    case Type::kByte: return {kDLUInt, bits, 1};
    case Type::kBFloat16: return {kDLBfloat, bits, 1};
    case Type::kHalf:
    case Type::kFloat:
    case Type::kDouble: return {kDLFloat, bits, 1};
    default: return {kDLInt, bits, 1};
  }
}

Type type_of(DLDataType type) {
  if (type.lanes != 1) return Type::kOther;
  const int bits = type.bits;
  switch (type.code) {
    case kDLBool: return bits == 8 ? Type::kBool : Type::kOther;
    case kDLUInt: return bits == 8 ? Type::kByte : Type::kOther;
    case kDLBfloat: return bits == 16 ? Type::kBFloat16 : Type::kOther;
    case kDLInt:
      return bits == 8 ? Type::kChar : bits == 16 ? Type::kShort : bits == 32 ? Type::kInt : bits == 64 ? Type::kLong : Type::kOther;
    case kDLFloat: return bits == 16 ? Type::kHalf : bits == 32 ? Type::kFloat : bits == 64 ? Type::kDouble : Type::kOther;
    default: return Type::kOther;
  }
}

bool is_neg(PyObject* tensor) {
  return Ref(PyObject_CallFunctionObjArgs(torch_api().is_neg, tensor, nullptr)).get() == Py_True;
}

// What a tensor of ours is made of; sizes, strides and perhaps its memory lie behind it.
struct Block {
  DLManagedTensorVersioned managed{};
  std::shared_ptr<const void> owner;
};

void end(DLManagedTensorVersioned* managed) {
  auto* block = static_cast<Block*>(managed->manager_ctx);
  block->~Block();
  std::free(block);
}

// A tensor with `bytes` of memory of its own.
DLManagedTensorVersioned* new_block(Type type, const int64_t* sizes, const int64_t* strides, size_t dims, size_t bytes) {
  const size_t head = (sizeof(Block) + 2 * dims * sizeof(int64_t) + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = nullptr;
  size_t all = 0;
  if (__builtin_add_overflow(head, bytes, &all) || posix_memalign(&memory, kAlignment, all) != 0) throw std::bad_alloc();
  auto* block = new (memory) Block;
  auto* numbers = reinterpret_cast<int64_t*>(block + 1);
  std::copy_n(sizes, dims, numbers);
  std::copy_n(strides, dims, numbers + dims);
  DLManagedTensorVersioned& managed = block->managed;
  managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  managed.manager_ctx = block;
  managed.deleter = end;
  managed.dl_tensor = {static_cast<char*>(memory) + head, {kDLCPU, 0}, static_cast<int32_t>(dims), dlpack_of(type),
                       numbers, numbers + dims, 0};
  return &managed;
}

PyObject* to_torch(DLManagedTensorVersioned* managed) {
  void* tensor = nullptr;
  if (torch_api().exchange->managed_tensor_to_py_object_no_sync(managed, &tensor) != 0) throw Raised();
  return static_cast<PyObject*>(tensor);
}

std::vector<int64_t> adjacent(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t next = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = next;
    next *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

size_t bytes_for(Type type, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  size_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    size_t reach = 0;
    if (sizes[i] < 0 || strides[i] < 0 ||
        __builtin_mul_overflow(static_cast<size_t>(sizes[i] - 1), static_cast<size_t>(strides[i]), &reach) ||
        __builtin_add_overflow(last, reach, &last))
      throw Refused(joined("no tensor has the sizes ", runtime::sizes_text(sizes.data(), static_cast<int64_t>(sizes.size()))));
  }
  size_t bytes = 0;
  if (__builtin_mul_overflow(last + 1, runtime::bytes_of(type), &bytes)) throw std::bad_alloc();
  return bytes;
}

}  // namespace

bool Tensor::look() {
  DLTensor seen;
  if (torch_api().exchange->dltensor_from_py_object_no_sync(object_.get(), &seen) != 0) return false;
  view_.data = static_cast<const char*>(seen.data) + seen.byte_offset;
  view_.type = type_of(seen.dtype);
  view_.is_cpu = seen.device.device_type == kDLCPU;
  view_.dims = seen.ndim, view_.sizes = seen.shape, view_.strides = seen.strides;
  return true;
}

Tensor::Tensor(PyObject* object) : object_(Ref::to(object)) {
  if (!torch_api().is_tensor(object)) {
    const Ref type(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
    throw WrongType(joined("a tensor is wanted, not an object of type ", text_of(type.get())));
  }
  if (is_neg(object)) object_ = Ref(PyObject_CallFunctionObjArgs(torch_api().resolve_neg, object, nullptr));
  if (!look()) throw Raised();
}

std::optional<Tensor> Tensor::plain(PyObject* object) {
  if (!torch_api().is_exactly_tensor(object) || is_neg(object)) return std::nullopt;
  Tensor found;
  found.object_ = Ref::to(object);
  if (!found.look()) {  // sparse, say, or without memory
    PyErr_Clear();
    return std::nullopt;
  }
  return found;
}

Tensor Tensor::contiguous() const {
  if (view_.is_contiguous()) {
    Tensor same;
    same.object_ = Ref::to(object_.get());
    same.view_ = view_;
    return same;
  }
  return Tensor(Ref(PyObject_CallFunctionObjArgs(torch_api().contiguous, object_.get(), nullptr)).get());
}

std::vector<View> views_of(const Tensors& tensors) {
  std::vector<View> views;
  views.reserve(tensors.size());
  for (const Tensor& tensor : tensors) views.push_back(tensor.view());
  return views;
}

NewTensor::NewTensor(Type type, std::vector<int64_t> sizes) : NewTensor(type, sizes, adjacent(sizes)) {}

NewTensor::NewTensor(Type type, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides)
    : memory_(new_block(type, sizes.data(), strides.data(), sizes.size(), bytes_for(type, sizes, strides))) {}

int64_t NewTensor::count() const {
  const DLTensor& tensor = memory_->dl_tensor;
  return View{nullptr, Type::kOther, true, tensor.ndim, tensor.shape, tensor.strides}.count();
}

PyObject* NewTensor::release() { return to_torch(memory_.release()); }

runtime::Table table_of(const Tensor& tensor) {
  if (!tensor->is_cpu) return {nullptr, Type::kOther, tensor->count(), nullptr};
  const Tensor plain = tensor.contiguous();
  DLManagedTensorVersioned* managed = nullptr;
  if (torch_api().exchange->managed_tensor_from_py_object_no_sync(plain.object(), &managed) != 0) throw Raised();
  std::shared_ptr<const void> owner(managed, [](DLManagedTensorVersioned* held) { held->deleter(held); });
  const Type type = tensor->type;
  return {type == Type::kOther ? nullptr : plain->data, type, plain->count(), std::move(owner)};
}

std::optional<runtime::Table> table_of(const OptionalTensor& tensor) {
  return tensor ? std::make_optional(table_of(*tensor)) : std::nullopt;
}

PyObject* tensor_of(const runtime::Table& table) {
  const int64_t stride = 1;
  DLManagedTensorVersioned* managed = new_block(table.type, &table.count, &stride, 1, 0);
  static_cast<Block*>(managed->manager_ctx)->owner = table.owner;
  managed->dl_tensor.data = const_cast<void*>(table.data);
  return to_torch(managed);
}

}  // namespace x86quant::python

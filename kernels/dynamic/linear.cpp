// `DynamicLinear` as torch sees it: weights packed once for each kernel the rules chose.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <limits>
#include <vector>

#include "kernel.h"

namespace x86quant::dynamic {
namespace {

class DynamicLinear final : public torch::CustomClassHolder {
 public:
  DynamicLinear(const Description& d, at::IntArrayRef max_rows, const c10::List<std::string>& kernels,
                std::string record)
      : in_(d.in_features()), out_(d.out_features()), record_(std::move(record)) {
    TORCH_CHECK_VALUE(!kernels.empty() && kernels.size() == max_rows.size(),
                      "x86quant: one kernel is needed for each of the row bounds");
    for (size_t i = 0; i < max_rows.size(); ++i)
      segments_.push_back({max_rows[i] < 0 ? std::numeric_limits<int64_t>::max() : max_rows[i],
                           make(kernels.get(i), d)});
  }

  at::Tensor run(const at::Tensor& x) const {
    RECORD_FUNCTION("x86quant::linear_dynamic", c10::ArrayRef<const c10::IValue>{});
    TORCH_CHECK_VALUE(x.device().is_cpu() && x.scalar_type() == at::kFloat,
                      "x86quant::linear_dynamic: x must be float32 on the CPU, got ", x.scalar_type(), " on ",
                      x.device(), "; convert it with x.float().cpu()");
    TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == in_, "x86quant::linear_dynamic: expected ", in_,
                      " input features, got shape ", x.sizes());
    std::vector<int64_t> size = x.sizes().vec();
    size.back() = out_;
    at::Tensor out = at::empty(size, at::kFloat);
    if (out.numel() == 0) return out;
    const int64_t rows = out.numel() / out_;
    // Rows may lie apart; anything less regular is copied.
    const bool apart = x.dim() == 2 && x.stride(1) == 1 && x.stride(0) >= in_;
    const at::Tensor in = apart ? x : x.contiguous();
    size_t i = 0;
    while (rows > segments_[i].max_rows) ++i;
    segments_[i].kernel->run(in, rows, apart ? x.stride(0) : in_, out);
    return out;
  }

  const std::string& record() const { return record_; }

  int64_t bytes() const {
    int64_t sum = 0;
    for (const Segment& s : segments_) sum += s.kernel->bytes();
    return sum;
  }

 private:
  struct Segment {
    int64_t max_rows;
    std::shared_ptr<const Kernel> kernel;
  };

  int64_t in_, out_;
  std::string record_;
  std::vector<Segment> segments_;
};

using Pack = c10::intrusive_ptr<DynamicLinear>;

Pack pack(at::Tensor weight, at::Tensor scale, std::optional<at::Tensor> bias,
          std::optional<std::string> activation, at::IntArrayRef max_rows,
          c10::List<std::string> kernels, std::string record) {
  const Description d{Weights(weight, scale, bias), activation.value_or("")};
  return c10::make_intrusive<DynamicLinear>(d, max_rows, kernels, std::move(record));
}

#define PACK "__torch__.torch.classes.x86quant.DynamicLinear"

TORCH_LIBRARY_FRAGMENT(x86quant, m) {
  m.class_<DynamicLinear>("DynamicLinear")
      // A method, not an op: torch takes 8 us to pass an object to an op.
      .def("run", [](const Pack& p, const at::Tensor& x) { return p->run(x); })
      .def("record", [](const Pack& p) { return p->record(); })
      .def("bytes", [](const Pack& p) { return p->bytes(); });
  m.def("pack_linear_dynamic(Tensor weight, Tensor scale, Tensor? bias, str? activation, int[] max_rows, "
        "str[] kernels, str record) -> " PACK, pack);
}

}  // namespace
}  // namespace x86quant::dynamic

#include "stock.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>

namespace x86quant {
namespace {

// The stock prepack ops read the process-wide engine, so it is switched for the duration of
// one call, under this lock, and put back even when the prepack throws. If another thread set
// an engine meanwhile, its wish stands.
std::mutex engine_lock;

class EngineSwitch {
 public:
  explicit EngineSwitch(at::QEngine engine)
      : lock_(engine_lock), before_(at::globalContext().qEngine()), during_(engine) {
    if (before_ != during_) at::globalContext().setQEngine(during_);
  }
  ~EngineSwitch() {
    if (before_ != during_ && at::globalContext().qEngine() == during_)
      at::globalContext().setQEngine(before_);
  }
  EngineSwitch(const EngineSwitch&) = delete;
  EngineSwitch& operator=(const EngineSwitch&) = delete;

 private:
  std::lock_guard<std::mutex> lock_;
  at::QEngine before_, during_;
};

// The `_quantized` twins of the prepack ops are never overridden by the router.
template <class Signature>
c10::TypedOperatorHandle<Signature> stock_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
}

c10::List<int64_t> list(const std::vector<int64_t>& values) {
  return c10::List<int64_t>(c10::ArrayRef<int64_t>(values));
}

}  // namespace

at::QEngine user_engine() {
  std::lock_guard<std::mutex> guard(engine_lock);
  return at::globalContext().qEngine();
}

at::QEngine engine_named(const std::string& name) {
  for (auto engine : at::globalContext().supportedQEngines()) {
    std::string known = at::toString(engine);
    for (auto& c : known) c = static_cast<char>(std::tolower(c));
    if (known == name) return engine;
  }
  TORCH_CHECK(false, "x86quant: this torch was built without the quantized engine '", name, "'");
}

LinearPack stock_linear(at::QEngine engine, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias) {
  static const auto op =
      stock_op<LinearPack(at::Tensor, std::optional<at::Tensor>)>("_quantized::linear_prepack");
  EngineSwitch guard(engine);
  return op.call(weight, bias);
}

template <int N>
ConvPack<N> stock_conv(at::QEngine engine, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, const ConvGeometry& g) {
  using List = c10::List<int64_t>;
  using Plain = ConvPack<N>(at::Tensor, std::optional<at::Tensor>, List, List, List, int64_t);
  using Transposed =
      ConvPack<N>(at::Tensor, std::optional<at::Tensor>, List, List, List, List, int64_t);
  EngineSwitch guard(engine);
  if (g.transposed) {
    static const auto op = stock_op<Transposed>(N == 2 ? "_quantized::conv_transpose2d_prepack"
                                                       : "_quantized::conv_transpose3d_prepack");
    return op.call(weight, bias, list(g.stride), list(g.padding), list(g.output_padding),
                   list(g.dilation), g.groups);
  }
  static const auto op =
      stock_op<Plain>(N == 2 ? "_quantized::conv2d_prepack" : "_quantized::conv3d_prepack");
  return op.call(weight, bias, list(g.stride), list(g.padding), list(g.dilation), g.groups);
}

template ConvPack<2> stock_conv<2>(at::QEngine, const at::Tensor&, const std::optional<at::Tensor>&,
                                   const ConvGeometry&);
template ConvPack<3> stock_conv<3>(at::QEngine, const at::Tensor&, const std::optional<at::Tensor>&,
                                   const ConvGeometry&);

}  // namespace x86quant

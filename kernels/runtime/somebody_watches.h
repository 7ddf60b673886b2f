// Whether what runs must be seen, so that it goes by torch's dispatcher.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/jit/frontend/tracer.h>

namespace x86quant::runtime {

// Whether a mode, a tracer or a transform must see the ops that run.
inline bool somebody_watches() {
  return c10::impl::TorchDispatchModeTLS::stack_len() > 0 || torch::jit::tracer::isTracing() ||
         c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

}  // namespace x86quant::runtime

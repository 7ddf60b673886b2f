// Which torch this extension was compiled for: its headers say so.

#include <torch/library.h>
#include <torch/version.h>

#include <string>

namespace {

std::string built_for() { return TORCH_VERSION; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(x86quant, m) { m.def("built_for() -> str", built_for); }

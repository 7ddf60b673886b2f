// How a kernel packs weights for the stock operators.
#pragma once

#include "register_packer.h"
#include "stock.h"

#include <functional>

namespace x86quant {

// An empty function: the kernel has no such op.
struct Packer {
  template <int N>
  using MakeConv = std::function<ConvPack<N>(const at::Tensor&, const std::optional<at::Tensor>&,
                                             const ConvGeometry&)>;

  std::function<LinearPack(const at::Tensor&, const std::optional<at::Tensor>&)> linear;
  MakeConv<2> conv2d;
  MakeConv<3> conv3d;
  KeyedBy keyed_by = KeyedBy::kNothing;
  bool unpacks = true;  // whether weights can be had back from every one of its packs
};

// Declared once, by a static object beside the kernel, under the name of its `engine`. A stock
// engine is declared by RegisterStockPacker.
struct RegisterPacker {
  RegisterPacker(const std::string& name, Packer packer);
};

const Packer& packer(const std::string& name);

}  // namespace x86quant

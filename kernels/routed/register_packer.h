// Declaring that weights can be packed by a stock engine; for more, see packer.h.
#pragma once

namespace x86quant {

// What a pack depends on besides its weights. Packs that keep something of a call must not serve
// calls that differ in it.
enum class KeyedBy { kNothing, kVariant, kQuantization };

// Declared once, by a static object beside the kernel, under the name of its `engine`, which is
// that of torch's. `unpacks`: whether weights can be had back from every one of its packs.
struct RegisterStockPacker {
  RegisterStockPacker(const char* engine, KeyedBy keyed_by, bool unpacks = true);
};

}  // namespace x86quant

// A pack caches one primitive, keyed without what follows the product.
#include "../routed/register_packer.h"

namespace {

const x86quant::RegisterStockPacker onednn("onednn", x86quant::KeyedBy::kVariant);

}  // namespace

// Its packs hold weights alone.
#include "../routed/register_packer.h"

namespace {

const x86quant::RegisterStockPacker fbgemm("fbgemm", x86quant::KeyedBy::kNothing);

}  // namespace

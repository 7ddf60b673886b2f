// A pack keeps the output scale and the padding of its first run until the input scale changes, and
// one of a 3d convolution cannot be unpacked.
#include "../routed/register_packer.h"

namespace {

const x86quant::RegisterStockPacker qnnpack("qnnpack", x86quant::KeyedBy::kQuantization,
                                            /*unpacks=*/false);

}  // namespace

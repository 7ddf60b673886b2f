// Lookups, interactions, gates, sums of channels and products with AVX2.
#define XQ_TARGET "avx2,fma,f16c"
#include "target.h"

#include "channel_sums_rows.h"
#include "float_product_loops.h"
#include "gate_rows.h"
#include "interaction.h"
#include "lookup_rows.h"

namespace xq {
const FloatLoops kFloatAvx2 = {within, rising, look_up, interact, lstm_gates, gru_gates, channel_sums,
                               float_product, float_taps, float_functions};
}  // namespace xq

XQ_TARGET_END

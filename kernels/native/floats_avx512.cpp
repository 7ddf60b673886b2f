// Lookups, interactions, gates, sums of channels and products with AVX512.
#define XQ_TARGET "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c"
#define XQ_FLOATS_AVX512
#include "target.h"

#include "channel_sums_rows.h"
#include "float_product_loops.h"
#include "gate_rows.h"
#include "interaction.h"
#include "lookup_rows.h"

namespace xq {
const FloatLoops kFloatAvx512 = {within, rising, look_up, interact, lstm_gates, gru_gates, channel_sums,
                                 float_product, float_taps, float_functions};
}  // namespace xq

XQ_TARGET_END

// Lookups, interactions and gates with AVX2.
#define XQ_TARGET "avx2,fma,f16c"
#include "target.h"

#include "vec256.h"

namespace {
using Lanes = Vec256<false>;
}  // namespace

#include "gate_rows.h"
#include "interaction.h"
#include "lookup_rows.h"

namespace xq {
const FloatLoops kFloatAvx2 = {within, rising, look_up, interact, lstm_gates, gru_gates};
}  // namespace xq

XQ_TARGET_END

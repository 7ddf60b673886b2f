// Sums over positions: dispatch and the plain loop.
#include "channel_sums.h"

#include "float_loops.h"

namespace xq {
namespace {

void reference(const xq_channel_sums& op, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t w = 0; w < op.a.w; ++w) {
      const uint8_t* pixel = op.a.data + row / op.a.h * op.a.stride_d + row % op.a.h * op.a.stride_h + w * op.a.stride_w;
      for (int64_t c = 0; c < op.a.c; ++c) op.sums[c] += pixel[c], op.squares[c] += int64_t{pixel[c]} * pixel[c];
    }
}

}  // namespace
}  // namespace xq

void xq_channel_sums_run(const xq_channel_sums* op, int64_t begin, int64_t end) {
  op->isa == XQ_ISA_REFERENCE ? xq::reference(*op, begin, end) : xq::float_loops_of(op->isa).channel_sums(*op, begin, end);
}

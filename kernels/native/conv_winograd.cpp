// Splits a Winograd convolution into tiles of output pixels and blocks of channels.
#include "internal.h"

namespace xq {
namespace {

Cut cut_of(const xq_conv_call& call) {
  const auto& p = *static_cast<const Packed*>(call.packed);
  const int64_t tiles = winograd_tiles(p, call.out), threads = call.threads;
  // Sharing out blocks transforms the input once a thread; sharing out tiles reads the weights as often.
  const bool many = tiles >= threads * winograd_group(p);
  if (many || p.n_blocks < threads) return {tiles, min64(threads, tiles), 1};
  return {tiles, 1, threads};
}

}  // namespace

int64_t winograd_items(const xq_conv_call& call) { return cut_of(call).items(); }

size_t winograd_scratch(const xq_conv_call& call) {
  const auto& p = *static_cast<const Packed*>(call.packed);
  const int64_t products = winograd_positions(p) * winograd_group(p) * 2 * p.lanes * 4;
  const int64_t codes = winograd_positions(p) * winograd_step(p, p.conv.in_channels) * 2;
  return static_cast<size_t>(products + codes + p.conv.in_channels + kAlign);
}

void winograd_run(const xq_conv_call& call, int64_t begin, int64_t end, uint8_t* scratch) {
  const auto& p = *static_cast<const Packed*>(call.packed);
  const Cut cut = cut_of(call);
  for (int64_t item = begin; item < end; ++item) {
    const CutPiece some = piece_of(cut, item, p);
    kernels_of(p.isa).winograd({&p, &call.in, &call.out, p.residual ? &call.residual : nullptr, some.first, some.last,
                                some.block_begin, some.block_end, scratch});
  }
}

}  // namespace xq

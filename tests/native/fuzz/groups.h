// Random linears whose weights have scales for groups of features: every level against the plain loops, bit for bit.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../../kernels/native/groups.h"

namespace {

// Runs packed weights on rows of floats. `Aligned` is memory of a size at a multiple of 64 bytes.
template <class Aligned>
std::vector<float> run_linear(const void* packed, int32_t outputs, const std::vector<float>& in, int64_t in_stride, int64_t rows,
                              int64_t out_stride, int threads) {
  // No row longer than it must be.
  std::vector<float> out(static_cast<size_t>((rows - 1) * out_stride + outputs));
  xq_linear_call call{packed, in.data(), out.data(), rows, in_stride, out_stride, nullptr, threads};
  if (xq_linear_check(&call) != XQ_OK) std::abort();
  Aligned codes(xq_linear_codes_size(&call));
  call.codes = codes.data;
  if (!xq_linear_by_rows(&call)) xq_linear_quantize(&call, 0, rows);
  xq_linear_run(&call, 0, xq_linear_items(&call));
  return out;
}

template <class Aligned, class Random>
bool groups_agree(Random& r, const std::vector<int>& isas) {
  // Activations are approximations on all but the reference: those that are exact only.
  // Some have more groups, and more rows, than are multiplied together.
  const int groups = r.one_in(6) ? r.upto(60) : r.upto(6), features = 8 * r.upto(9) * groups;
  const xq_groups g{features, r.upto(90), r.upto(2) - 1, groups, r.one_in(3) ? 8 : 4, r.one_in(2), r.one_in(2),
                    r.one_in(3) ? 0 : r.upto(40), r.one_in(3) ? r.upto(80) : 0};
  const int64_t rows = r.one_in(8) ? r.upto(260) : r.upto(40), numbers = int64_t{g.out_features} * groups * (g.offsets ? 2 : 1);
  const auto floats = [&](int64_t count) {
    std::vector<float> v(static_cast<size_t>(count));
    for (float& x : v) x = static_cast<float>(r.byte() - 128) * static_cast<float>(r.byte()) * 0.01f;
    return v;
  };
  const std::vector<float> in = floats(rows * features), bias = floats(g.out_features), scale = floats(g.half ? 0 : numbers);
  std::vector<uint16_t> halves(static_cast<size_t>(g.half ? numbers : 0));
  for (uint16_t& x : halves) x = static_cast<uint16_t>((r.byte() << 8 | r.byte()) & 0xbbff);  // finite, of both signs
  const std::vector<uint8_t> codes = r.bytes(static_cast<size_t>(g.out_features) * static_cast<size_t>(features) * static_cast<size_t>(g.bits) / 8);
  const void* scales = g.half ? static_cast<const void*>(halves.data()) : scale.data();
  const auto run = [&](int isa, int threads) {
    Aligned packed(xq_groups_packed_size(&g, isa));
    if (xq_groups_pack(&g, isa, codes.data(), scales, bias.data(), packed.data) != XQ_OK) std::abort();
    return run_linear<Aligned>(packed.data, g.out_features, in, features, rows, g.out_features, threads);
  };
  const std::vector<float> want = run(XQ_ISA_REFERENCE, 1);
  for (int isa : isas)
    for (int threads : {1, 3})
      if (run(isa, threads) != want) {
        std::printf("isa %d differs: %d -> %d in %d groups, %d bits, half %d, offsets %d, %ld rows\n", isa, features,
                    g.out_features, groups, g.bits, g.half, g.offsets, static_cast<long>(rows));
        return false;
      }
  return true;
}

}  // namespace

// Choosing an algorithm, and laying out what is packed for it.
#include "conv_layout.h"

#include <algorithm>
#include <atomic>

#include "depthwise_pack.h"

namespace xq {
namespace {

Geometry geometry_of(const xq_conv& c) {
  Geometry g;
  for (int i = 0; i < 3; ++i) {
    g.kernel[i] = c.kernel[i];
    g.dilation[i] = c.dilation[i];
    g.stride[i] = c.transposed ? 1 : c.stride[i];
    g.up[i] = c.transposed ? c.stride[i] : 1;
    g.pad[i] = c.transposed ? int64_t{c.dilation[i]} * (c.kernel[i] - 1) - c.padding[i] : c.padding[i];
  }
  return g;
}

// Whether output pixel i is made of input pixel i and nothing else. The output of a transposed convolution may
// be up to max(stride, dilation) - 1 pixels longer than its taps reach, whatever its kernel.
bool plain_pixel(const xq_conv& c, const Geometry& g) {
  for (int i = 0; i < 3; ++i) {
    if (g.kernel[i] != 1 || g.stride[i] != 1 || g.pad[i] != 0 || g.up[i] != 1) return false;
    if (c.transposed && g.dilation[i] != 1) return false;
  }
  return true;
}

// A strip holds all columns from the first tap of some outputs to their last: where these are far apart, it would not stay
// in a cache.
bool can_depthwise(const xq_conv& c) {
  constexpr int64_t kMostColumns = 4096, kOutputs = 6;
  const int64_t columns = (kOutputs - 1) * c.stride[2] + int64_t{c.kernel[2] - 1} * c.dilation[2] + 1;
  const int64_t slices = c.kernel[0] == 1 ? 1 : std::max<int64_t>(c.kernel[0], c.kernel[1]);
  return c.groups > 1 && c.groups == c.in_channels && c.groups == c.out_channels && !c.transposed &&
         slices <= kMostSlices && slices * columns <= kMostColumns;
}

// One vector of output channels must find its inputs in whole quads within 16 * vector bytes.
bool can_grouped(const xq_conv& c, int isa) {
  const int64_t in = c.in_channels / c.groups, out = c.out_channels / c.groups;
  return isa != XQ_ISA_REFERENCE && c.groups > 1 && in == out && (in == 4 || in == 8);
}

// The transform takes 16 channels at a time; beyond 1024 a group the sums of 2 x 2 tiles could leave int32.
bool can_winograd(const xq_conv& c, int isa) {
  if (isa == XQ_ISA_REFERENCE || isa == XQ_ISA_AMX_INT8 || c.transposed) return false;
  for (int i = 0; i < 3; ++i)
    if (c.kernel[i] != (i ? 3 : 1) || c.stride[i] != 1 || c.dilation[i] != 1) return false;
  if (c.padding[0]) return false;
  const int64_t in = c.in_channels / c.groups;
  return in % 16 == 0 && in <= 1024;
}

// The weights of 4 x 4 tiles are eight times as big as they were: with many channels they come from beyond L2, which only
// so many tiles make worth it. With VNNI the other way is quicker, and it takes more of them.
bool worth_winograd4(const xq_conv& c, int isa) {
  constexpr int64_t kManyChannels = 256, kLeastPixels = 128, kLeastPixelsVnni = 512;
  if (c.in_channels / c.groups <= kManyChannels && c.out_channels / c.groups <= kManyChannels) return true;
  return c.pixels >= (has_vnni(isa) ? kLeastPixelsVnni : kLeastPixels);
}

// Whether dense blocks are one vector wide: where groups fit one and there is enough to multiply. Of two, each would meet
// the zeros of the other one's groups.
bool narrow_blocks(const xq_conv& c, int isa) {
  constexpr int64_t kLeastBytes = 64;  // of a row that meets two vectors; of less the stores of narrow blocks take longer
  const int64_t in = c.in_channels / c.groups, out = c.out_channels / c.groups, lanes = lanes_of(isa);
  return isa == XQ_ISA_AVX512_VNNI && c.groups > 1 && out <= lanes && 2 * lanes / out * in * taps_of(c) >= kLeastBytes;
}

int choose_algo(const xq_conv& c, int isa) {
  if (c.algo != XQ_ALGO_AUTO) return c.algo;
  if (isa == XQ_ISA_REFERENCE) return XQ_ALGO_REFERENCE;
  if (can_depthwise(c)) return XQ_ALGO_DEPTHWISE;
  // Tiles waste most of a block-diagonal product and are still quicker than permuting.
  if (can_grouped(c, isa) && isa != XQ_ISA_AMX_INT8) return XQ_ALGO_GROUPED;
  if (can_winograd(c, isa) && !narrow_blocks(c, isa)) {
    if (worth_winograd4(c, isa)) return XQ_ALGO_WINOGRAD4;
    if (!has_vnni(isa)) return XQ_ALGO_WINOGRAD;  // with VNNI bytes are multiplied as quickly as this saves
  }
  return XQ_ALGO_DENSE;
}

// What xq_set_caches said last. Until then, and for a size that is unknown, those of the CPU (Sapphire Rapids)
// on which the shares of the caches that loops take were measured.
constexpr int64_t kUsualL1 = 48 * 1024, kUsualL2 = 2048 * 1024;
std::atomic<int64_t> cache_l1{kUsualL1}, cache_l2{kUsualL2};

void add_block(Layout& l, int64_t a_off, int64_t out_c, int64_t count, int max_vecs, int64_t quads) {
  const int lanes = l.head.lanes;
  int vecs = 1;
  while (vecs < max_vecs && vecs * lanes < count) vecs *= 2;
  const int64_t size = round_up(quads * vecs * lanes * 4, kAlign);
  l.blocks.push_back({static_cast<int32_t>(a_off), static_cast<int32_t>(out_c),
                      static_cast<int32_t>(count), vecs, 0, l.weight_bytes, size, l.scalars});
  l.weight_bytes += size;
  l.scalars += round_up(vecs * lanes, 16);
}

void layout_runs(Layout& l, int64_t channels) {
  const Geometry& g = l.head.geo;
  // Tiles take 16 quads, or as many as a run has where it has fewer.
  const int64_t tile = l.head.isa == XQ_ISA_AMX_INT8 && l.head.algo == XQ_ALGO_DENSE ? 16 : 1;
  auto add = [&](int64_t z, int64_t y, int64_t x, int64_t bytes) {
    const int64_t least = ceil_div(bytes, 4), quads = least < tile ? least : round_up(least, tile);
    l.runs.push_back({{static_cast<int32_t>(z), static_cast<int32_t>(y), static_cast<int32_t>(x)},
                      static_cast<int32_t>(bytes), static_cast<int32_t>(quads)});
  };
  if (l.head.mode == kIm2col) return add(0, 0, 0, taps_of(l.head.conv) * channels);
  const int64_t kw = g.kernel[2];
  auto steps = [&](int64_t bytes) { return ceil_div(ceil_div(bytes, 4), tile); };
  const bool adjacent = l.head.conv.groups == 1 && g.stride[2] == 1 && g.dilation[2] == 1 &&
                        steps(kw * channels) < kw * steps(channels);
  for (int64_t z = 0; z < g.kernel[0]; ++z)
    for (int64_t y = 0; y < g.kernel[1]; ++y)
      for (int64_t x = 0; x < (adjacent ? 1 : kw); ++x)
        add(z, y, x, adjacent ? kw * channels : channels);
}

// Whether taps of a dense product lie apart, so that some may meet nothing but padding for many outputs.
bool taps_may_miss(const Packed& h) {
  constexpr int64_t kMostTaps = 16;
  const Geometry& g = h.geo;
  return h.algo == XQ_ALGO_DENSE && h.mode == kPlanes && !h.is_phase && !h.conv.transposed && !h.in_words && !h.regroup &&
         (g.dilation[1] > 1 || g.dilation[2] > 1) && std::max({g.kernel[0], g.kernel[1], g.kernel[2]}) <= kMostTaps &&
         h.n_runs == taps_of(h.conv);
}

// Output channels of a dense block. Tiles take two vectors.
int64_t dense_width(const Packed& h) { return (narrow_blocks(h.conv, h.isa) ? 1 : 2) * int64_t{h.lanes}; }

void layout_dense(Layout& l, bool float_out) {
  const xq_conv& c = l.head.conv;
  const int64_t in = c.in_channels / c.groups, out = c.out_channels / c.groups;
  const int64_t width = dense_width(l.head), joined = joined_groups(l.head);
  l.head.mode = plain_pixel(c, l.head.geo) && !l.head.is_phase ? kDirect : kPlanes;
  if (l.head.mode == kPlanes && c.groups == 1 && c.in_channels <= 16 &&
      (l.head.geo.stride[2] > 1 || c.in_channels % 4 != 0))
    l.head.mode = kIm2col;
  layout_runs(l, in * joined);
  int64_t quads = 0;
  for (const Run& r : l.runs) quads += r.quads;
  l.head.in_words = !has_vnni(l.head.isa) && !float_out && c.groups == 1 && l.runs.size() == 1 && 4 * quads <= kMostWords;
  if (l.head.in_words) quads *= 2;
  for (int64_t g = 0; g < c.groups; g += joined) {
    const int64_t all = std::min(joined, c.groups - g) * out;
    for (int64_t first = 0; first < all; first += width)
      add_block(l, g * in, g * out + first, std::min(width, all - first), 2, quads);
  }
}

void layout_grouped(Layout& l) {
  const xq_conv& c = l.head.conv;
  l.head.mode = kPlanes;
  layout_runs(l, c.in_channels / c.groups);
  int64_t quads = 0;
  for (const Run& r : l.runs) quads += r.quads;
  const int64_t width = 2 * l.head.lanes;
  for (int64_t first = 0; first < c.out_channels; first += width)
    add_block(l, first, first, std::min<int64_t>(width, c.out_channels - first), 2, quads);
}

void layout_depthwise(Layout& l) {
  plan_depthwise(l.head);
  const int64_t channels = l.head.conv.out_channels, quads = depthwise_weights(l.head);
  for (int64_t c = 0; c < channels;) {
    const int64_t left = channels - c, lanes = l.head.lanes;
    // A block of 4 vectors is worth its empty lanes once 3 of the 4 are used.
    const int64_t width = left > 3 * lanes ? 4 * lanes : lanes;
    add_block(l, c, c, std::min(width, left), static_cast<int>(width / lanes), quads);
    c += width;
  }
}

void layout_winograd(Layout& l, int tile) {
  l.head.winograd = tile;
  const xq_conv& c = l.head.conv;
  const int64_t in = c.in_channels / c.groups, out = c.out_channels / c.groups, width = 2 * l.head.lanes;
  for (int64_t g = 0; g < c.groups; ++g)
    for (int64_t first = 0; first < out; first += width)
      add_block(l, g * in, g * out + first, std::min(width, out - first), 2, winograd_positions(l.head) * in / 2);
}

Layout layout_in(const xq_conv& conv, const Geometry& geometry, int isa, bool is_phase, bool float_out) {
  Layout l;
  Packed& h = l.head;
  h.magic = kMagic;
  h.isa = isa;
  h.caches = caches_in_use();
  h.conv = conv;
  h.algo = choose_algo(conv, isa);
  h.geo = geometry;
  h.lanes = lanes_of(isa);
  h.is_phase = is_phase;
  if (h.algo == XQ_ALGO_REFERENCE) {
    l.scalars = conv.out_channels;
    l.weight_bytes = conv.out_channels * taps_of(conv) * (conv.in_channels / conv.groups);
  } else if (h.algo == XQ_ALGO_DENSE) {
    layout_dense(l, float_out);
  } else if (h.algo == XQ_ALGO_DEPTHWISE) {
    layout_depthwise(l);
  } else if (h.algo == XQ_ALGO_WINOGRAD) {
    layout_winograd(l, 2);
  } else if (h.algo == XQ_ALGO_WINOGRAD4) {
    layout_winograd(l, 4);
  } else {
    layout_grouped(l);
  }
  h.n_blocks = static_cast<int32_t>(l.blocks.size());
  h.n_runs = static_cast<int32_t>(l.runs.size());
  int64_t at = round_up(sizeof(Packed), kAlign);
  auto place = [&](int64_t bytes) {
    const int64_t here = at;
    at = round_up(at + bytes, kAlign);
    return here;
  };
  h.blocks = place(h.n_blocks * int64_t{sizeof(Block)});
  h.runs = place(h.n_runs * int64_t{sizeof(Run)});
  h.corr = place(l.scalars * 4);
  h.mult = place(l.scalars * 4);
  h.bias = place(l.scalars * 4);
  if (!float_out) h.slopes = place(l.scalars * 4);
  h.lut = place(256);
  if (float_out) h.weight_sums = place(l.scalars * 4);
  if (h.algo == XQ_ALGO_DENSE && !has_vnni(isa) && !h.in_words) {
    h.order_stride = int64_t{kClasses} * h.n_runs;
    for (const Run& r : l.runs) h.order_stride += r.quads;
    h.order = place(h.n_blocks * h.order_stride * 4);
    const int64_t row = h.n_runs * regrouped_bytes(l.runs[0]);
    if (l.runs[0].bytes >= 16 && row <= (h.n_runs == 1 ? kMaxRegroup : kMaxRegroup / 2)) {  // all runs are alike
      h.regroup_stride = 2 * round_up(row, kAlign);
      h.regroup = place(h.n_blocks * h.regroup_stride);
    }
  }
  if (h.algo == XQ_ALGO_GROUPED && !has_vnni(isa)) {
    const int64_t quads = h.n_runs * int64_t{l.runs[0].quads};
    h.order_stride = 1 + quads;
    h.order = place(h.n_blocks * h.order_stride * 4);
    h.regroup_stride = quads * 2 * h.lanes * 4;
    h.regroup = place(h.n_blocks * h.regroup_stride);
  }
  if (taps_may_miss(h)) h.tap_corr = place(h.n_runs * l.scalars * 4);
  h.weights = place(l.weight_bytes);
  h.size = at;
  return l;
}

// A head before the blobs of all phases.
Layout layout_of_phases(const xq_conv& conv, int isa) {
  Layout l;
  Packed& h = l.head;
  h.magic = kMagic, h.isa = isa, h.caches = caches_in_use(), h.conv = conv;
  h.algo = XQ_ALGO_DENSE, h.mode = kPlanes, h.geo = geometry_of(conv), h.lanes = lanes_of(isa);
  h.blocks = h.runs = h.corr = h.mult = h.bias = h.slopes = h.lut = h.weights = h.phases = round_up(sizeof(Packed), kAlign);
  h.size = h.phases;
  for (int64_t i = 0; i < phases_of(conv); ++i) h.size += layout_of_phase(conv, Phase(conv, i), isa).head.size;
  return l;
}

// Offsets within the weights of one output, and the bytes of a row of taps, are 32 bits; sums are right for far fewer.
constexpr int64_t kMostProducts = int64_t{1} << 28;

}  // namespace

int64_t joined_groups(const Packed& h) {
  return std::max<int64_t>(1, std::min<int64_t>(h.conv.groups, dense_width(h) * h.conv.groups / h.conv.out_channels));
}

xq_conv without_winograd4(const xq_conv& conv, int isa) {
  xq_conv other = conv;
  other.algo = has_vnni(isa) ? XQ_ALGO_DENSE : XQ_ALGO_WINOGRAD;
  return other;
}

Layout layout_of_phase(const xq_conv& whole, const Phase& phase, int isa) {
  const xq_conv conv = phase.conv(whole);
  Geometry geometry = geometry_of(conv);
  std::copy(phase.pad, phase.pad + 3, geometry.pad);
  return layout_in(conv, geometry, isa, true, false);
}

Layout layout_of(const xq_conv& conv, int isa, bool float_out) {
  if (choose_algo(conv, isa) == XQ_ALGO_DENSE && phases_of(conv)) return layout_of_phases(conv, isa);
  return layout_in(conv, geometry_of(conv), isa, false, float_out);
}

bool conv_valid(const xq_conv& c, int isa) {
  if (isa < XQ_ISA_REFERENCE || isa > XQ_ISA_AMX_INT8) return false;
  if (c.algo < XQ_ALGO_AUTO || c.algo > XQ_ALGO_WINOGRAD4) return false;
  if (c.in_channels < 1 || c.out_channels < 1 || c.groups < 1) return false;
  if (c.in_channels % c.groups || c.out_channels % c.groups || c.pixels < 0) return false;
  int64_t products = c.in_channels / c.groups;  // of one output
  for (int i = 0; i < 3; ++i) {
    if (c.kernel[i] < 1 || c.stride[i] < 1 || c.dilation[i] < 1 || c.padding[i] < 0) return false;
    products *= c.kernel[i];
    if (products > kMostProducts) return false;
  }
  if (c.algo == XQ_ALGO_DEPTHWISE && (!can_depthwise(c) || isa == XQ_ISA_REFERENCE)) return false;
  if (c.algo == XQ_ALGO_GROUPED && !can_grouped(c, isa)) return false;
  if ((c.algo == XQ_ALGO_WINOGRAD || c.algo == XQ_ALGO_WINOGRAD4) && !can_winograd(c, isa)) return false;
  return !(c.algo == XQ_ALGO_DENSE && isa == XQ_ISA_REFERENCE);
}

Caches caches_in_use() { return {cache_l1, cache_l2}; }

}  // namespace xq

void xq_set_caches(int64_t l1, int64_t l2) {
  // A size beyond these is a misreading, by which working memory should not become absurd.
  constexpr int64_t kLeastL1 = 8 << 10, kMostL1 = 1 << 20, kLeastL2 = 64 << 10, kMostL2 = 64 << 20;
  xq::cache_l1 = l1 > 0 ? std::clamp(l1, kLeastL1, kMostL1) : xq::kUsualL1;
  xq::cache_l2 = l2 > 0 ? std::clamp(l2, kLeastL2, kMostL2) : xq::kUsualL2;
}

int xq_conv_algo(const xq_conv* conv, int isa) {
  return conv && xq::conv_valid(*conv, isa) ? xq::choose_algo(*conv, isa) : XQ_ALGO_AUTO;
}

size_t xq_conv_packed_size(const xq_conv* conv, int isa) {
  if (!conv || !xq::conv_valid(*conv, isa)) return 0;
  const xq::Packed head = xq::layout_of(*conv, isa).head;
  const bool two = head.algo == XQ_ALGO_WINOGRAD4 && conv->algo == XQ_ALGO_AUTO;
  const int64_t more = two ? xq::layout_of(xq::without_winograd4(*conv, isa), isa).head.size : 0;
  return static_cast<size_t>(head.size + more);
}

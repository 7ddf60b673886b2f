// Packing weights as they are laid out.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <vector>

#include "conv_layout.h"
#include "depthwise_pack.h"
#include "pack_shared.h"
#include "safe_pairs.h"
#include "winograd_pack.h"

namespace xq {
namespace {

struct Weights {
  const xq_conv& c;
  const int8_t* data;
};

// The weights of a block's channels as rows along K: each run's bytes, tap by tap, then zeros to whole quads.
class BlockRows {
 public:
  BlockRows(const Layout& l, const Weights& w, const Block& block) : h_(l.head), block_(block) {
    const xq_conv& c = h_.conv;
    const int64_t in = c.in_channels / c.groups, out = c.out_channels / c.groups, taps = taps_of(c);
    for (const Run& run : l.runs) length_ += int64_t{run.quads} * 4;
    if (taps == 1 && c.groups == 1 && length_ == in) {  // they lie so
      from_ = w.data + block.out_c * in;
      return;
    }
    rows_.resize(static_cast<size_t>(block.count * length_));
    from_ = rows_.data();
    const bool grouped = h_.algo == XQ_ALGO_GROUPED;
    const int64_t channels = grouped ? in : in * joined_groups(h_);
    for (int64_t oc = block.out_c; oc < block.out_c + block.count; ++oc) {
      // Of the input channels that the block reads, its own group's.
      int8_t* run_at = rows_.data() + (oc - block.out_c) * length_ + (grouped ? 0 : oc / out * in - block.a_off);
      for (const Run& run : l.runs) {
        const int64_t first = (int64_t{run.tap[0]} * c.kernel[1] + run.tap[1]) * c.kernel[2] + run.tap[2];
        for (int64_t t = 0; t < run.bytes / channels; ++t) {
          const int64_t tap = c.transposed ? taps - 1 - (first + t) : first + t;
          const int8_t* weight = w.data + oc * in * taps + tap;
          for (int64_t ic = 0; ic < in; ++ic) run_at[t * channels + ic] = weight[ic * taps];
        }
        run_at += int64_t{run.quads} * 4;
      }
    }
  }

  // One quad of all channels: vecs x lanes x 4 bytes, zeros where there is no channel.
  void quad(int64_t index, int8_t* to) const {
    for (int vec = 0; vec < block_.vecs; ++vec)
      for (int lane = 0; lane < h_.lanes; ++lane, to += 4)
        if (const int64_t oc = channel_of(h_, block_.vecs, vec, lane); oc < block_.count)
          memcpy(to, from_ + oc * length_ + index * 4, 4);
  }

 private:
  const Packed& h_;
  const Block& block_;
  int64_t length_ = 0;
  std::vector<int8_t> rows_;
  const int8_t* from_;
};

// These pack some of the blocks: others may be packed beside them. What a block has is zero before.
struct Stretch {
  size_t first, end;
};

// Quads as two pairs of 16 bits each.
void pack_words(const BlockRows& rows, int64_t quads, int64_t quad_bytes, int16_t* to) {
  std::vector<int8_t> quad(static_cast<size_t>(quad_bytes));
  for (int64_t q = 0; q < quads; ++q) {
    rows.quad(q, quad.data());
    for (int64_t pair = 0; pair < 2; ++pair)
      for (int64_t lane = 0; lane < quad_bytes / 4; ++lane)
        for (int64_t i = 0; i < 2; ++i) *to++ = quad[static_cast<size_t>(4 * lane + 2 * pair + i)];
  }
}

void pack_dense(const Layout& l, const Weights& w, char* base, Stretch some) {
  const Packed& h = l.head;
  auto* to = reinterpret_cast<int8_t*>(base + h.weights);
  for (size_t b = some.first; b < some.end; ++b) {
    const Block& block = l.blocks[b];
    const BlockRows rows(l, w, block);
    const int64_t quad_bytes = int64_t{block.vecs} * h.lanes * 4;
    int64_t quads = 0;
    for (const Run& run : l.runs) quads += run.quads;
    if (h.in_words) {
      pack_words(rows, quads, quad_bytes, reinterpret_cast<int16_t*>(to + block.w_off));
      continue;
    }
    for (int64_t quad = 0; quad < quads; ++quad) rows.quad(quad, to + block.w_off + quad * quad_bytes);
    if (!h.order) continue;
    const auto index = static_cast<int64_t>(b);
    auto* order = reinterpret_cast<int32_t*>(base + h.order) + index * h.order_stride;
    auto* from = reinterpret_cast<uint8_t*>(base + h.regroup) + index * h.regroup_stride;
    int32_t more[2 * kMaxLanes];
    const Regroup regroup{from, from + h.regroup_stride / 2, more};
    if (!order_block(to + block.w_off, l.runs.data(), h.n_runs, quad_bytes, order, h.regroup ? &regroup : nullptr))
      continue;
    reinterpret_cast<Block*>(base + h.blocks)[b].regroup = 1;
    auto* corr = reinterpret_cast<int32_t*>(base + h.corr) + block.s_off;
    // As unsigned: what is added may leave int32, and the products that it stands for bring it back.
    for (int64_t i = 0; i < quad_bytes / 4; ++i)
      corr[i] = static_cast<int32_t>(static_cast<uint32_t>(corr[i]) + static_cast<uint32_t>(more[i]));
  }
}

// Quads whose lanes can all be made safe come first.
void pack_grouped(const Layout& l, const Weights& w, char* base, Stretch some) {
  const Packed& h = l.head;
  const int64_t group = h.conv.in_channels / h.conv.groups;
  for (size_t b = some.first; b < some.end; ++b) {
    const Block& block = l.blocks[b];
    const int64_t lanes = int64_t{block.vecs} * h.lanes, bytes = lanes * 4;
    auto* at = reinterpret_cast<int8_t*>(base + h.weights) + block.w_off;
    auto* count = reinterpret_cast<int32_t*>(base + h.order) + static_cast<int64_t>(b) * h.order_stride;
    auto* places = reinterpret_cast<uint8_t*>(base + h.regroup) + static_cast<int64_t>(b) * h.regroup_stride;
    int32_t* order = count + 1;
    std::vector<int8_t> quad_weights(static_cast<size_t>(bytes));
    std::vector<uint8_t> quad_places(quad_weights.size());
    const BlockRows rows(l, w, block);
    for (const bool wanted : {true, false}) {
      int64_t index = 0;
      for (size_t i = 0; i < l.runs.size(); ++i)
        for (int64_t quad = 0; quad < l.runs[i].quads; ++quad, ++index) {
          std::fill(quad_weights.begin(), quad_weights.end(), int8_t{0});
          rows.quad(index, quad_weights.data());
          for (int64_t k = 0; k < bytes; ++k) {
            const int lane = static_cast<int>(k / 4), oc = channel_of(block.vecs, lane / h.lanes, lane % h.lanes);
            quad_places[static_cast<size_t>(k)] = static_cast<uint8_t>((oc / group * group + quad * 4 + k % 4) % 16);
          }
          if (order_lanes(quad_weights.data(), lanes, quad_places.data()) != wanted) continue;
          memcpy(at, quad_weights.data(), quad_weights.size()), at += bytes;
          memcpy(places, quad_places.data(), quad_places.size()), places += bytes;
          *order++ = static_cast<int32_t>(i), *count += wanted;
        }
    }
  }
}

// Per-channel values in the blob's order; returns whether a sum can leave int32 once multiplied.
bool pack_scalars(const Layout& l, const Weights& w, const xq_requant& q, Packed* to, Stretch some) {
  const xq_conv& c = l.head.conv;
  const int64_t in = c.in_channels / c.groups, per = in * taps_of(c);
  char* base = reinterpret_cast<char*>(to);
  auto* corr = reinterpret_cast<int32_t*>(base + to->corr);
  auto* mult = reinterpret_cast<float*>(base + to->mult);
  auto* bias = reinterpret_cast<float*>(base + to->bias);
  auto* slopes = q.slopes ? reinterpret_cast<float*>(base + to->slopes) : nullptr;
  auto* tap_corr = to->tap_corr ? reinterpret_cast<int32_t*>(base + to->tap_corr) : nullptr;
  auto* sums = to->weight_sums ? reinterpret_cast<int32_t*>(base + to->weight_sums) : nullptr;
  bool leaves = false;
  auto set = [&](int64_t at, int64_t oc) {
    int64_t sum = 0, size = 0;
    constexpr int64_t kFew = 1 << 16;  // whose sums fit 32 bits
    for (int64_t first = 0; first < per; first += kFew) {
      const int8_t* some = w.data + oc * per + first;
      int32_t part = 0, part_size = 0;
      for (int64_t i = 0; i < min64(kFew, per - first); ++i) part += some[i], part_size += std::abs(int{some[i]});
      sum += part, size += part_size;
    }
    corr[at] = static_cast<int32_t>(static_cast<uint32_t>(-sum * q.in_zp));
    if (sums) sums[at] = static_cast<int32_t>(sum);
    for (int64_t tap = 0; tap_corr && tap < to->n_runs; ++tap) {
      int64_t of_tap = 0;
      for (int64_t ic = 0; ic < in; ++ic) of_tap += w.data[oc * per + ic * to->n_runs + tap];
      tap_corr[tap * l.scalars + at] = static_cast<int32_t>(static_cast<uint32_t>(of_tap * q.in_zp));
    }
    mult[at] = q.mult[oc];
    bias[at] = q.bias ? q.bias[oc] : 0.0f;
    if (slopes) slopes[at] = q.slopes[oc];
    const double steepest = slopes ? std::max(1.0, double{std::fabs(q.slopes[oc])}) : 1.0;
    const double reach = steepest * (255.0 * size * std::fabs(q.mult[oc]) + std::fabs(bias[at]) +
                                     255.0 * std::fabs(q.res_mult));
    if (!(reach < 2.0e9)) leaves = true;
  };
  if (to->algo == XQ_ALGO_REFERENCE) {
    for (int64_t oc = 0; oc < c.out_channels; ++oc) set(oc, oc);
    return leaves;
  }
  for (size_t block = some.first; block < some.end; ++block) {
    const Block& b = l.blocks[block];
    for (int vec = 0; vec < b.vecs; ++vec)
      for (int lane = 0; lane < to->lanes; ++lane)
        if (const int64_t oc = channel_of(*to, b.vecs, vec, lane); oc < b.count)
          set(b.s_off + vec * to->lanes + lane, b.out_c + oc);
  }
  return leaves;
}

bool byte_range(int32_t v) { return v >= 0 && v <= 255; }

bool finite(const float* values, int64_t count) {
  for (int64_t i = 0; values && i < count; ++i)
    if (!std::isfinite(values[i])) return false;
  return true;
}

// As the epilogues look it up: without VBMI in rows of 16 codes, each of which holds the difference to the row
// before it, but for the first of either half.
void place_lut(const uint8_t* lut, int isa, uint8_t* to) {
  memcpy(to, lut, 256);
  if (isa == XQ_ISA_REFERENCE || isa == XQ_ISA_AMX_INT8) return;
  for (int i = 16; i < 256; ++i)
    if (i / 16 % 8) to[i] = static_cast<uint8_t>(lut[i] ^ lut[i - 16]);
}

// All but what depends on the values of weights, multipliers and biases.
void set_head(const Layout& l, const xq_requant& q, Packed& head) {
  head = l.head;
  head.in_zp = q.in_zp, head.out_zp = q.out_zp, head.lo = q.lo, head.hi = q.hi;
  head.residual = q.residual, head.res_zp = q.res_zp, head.res_mult = q.res_mult;
  head.has_lut = q.lut != nullptr, head.has_slopes = q.slopes != nullptr;
}

// Whether `count` numbers are all from 0 to `end` - 1.
bool all_below(const int32_t* numbers, int64_t count, int64_t end) {
  return std::all_of(numbers, numbers + count, [&](int32_t n) { return n >= 0 && n < end; });
}

// Whether what says in which order quads are read, of a blob that another process wrote, leads to no other places.
bool order_holds(const Layout& l, const char* base) {
  const Packed& h = l.head;
  for (int64_t b = 0; h.order && b < h.n_blocks; ++b) {
    const auto* order = reinterpret_cast<const int32_t*>(base + h.order) + b * h.order_stride;
    if (h.algo == XQ_ALGO_GROUPED) {
      const int64_t quads = h.order_stride - 1;
      if (!all_below(order, 1, quads + 1) || !all_below(order + 1, quads, h.n_runs)) return false;
      continue;
    }
    if (!all_below(&reinterpret_cast<const Block*>(base + h.blocks)[b].regroup, 1, h.regroup ? 2 : 1)) return false;
    for (const Run& run : l.runs) {
      const int64_t quads = run.quads;
      if (!all_below(order, kClasses, quads + 1) || !all_below(order + kClasses, quads, quads)) return false;
      int64_t used = *order;  // a couple is two
      for (int i = 0; i < kClasses; ++i) used += order[i];
      if (used > quads) return false;
      order += kClasses + quads;
    }
  }
  return true;
}

// Whether pack_blob may have made `packed` of the same, for another blob behind it or for none.
bool is_blob_of(const Layout& l, const xq_requant& q, int32_t activation, int64_t for_few, const void* packed) {
  Packed found, wanted;
  memcpy(static_cast<void*>(&found), packed, sizeof(found));
  memset(static_cast<void*>(&wanted), 0, sizeof(wanted));
  set_head(l, q, wanted);
  wanted.clamp_float = found.clamp_float, wanted.activation = activation, wanted.for_few = for_few;
  if (memcmp(&found, &wanted, sizeof(found)) != 0) return false;
  const char* base = static_cast<const char*>(packed);
  const auto same_block = [](const Block& a, const Block& b) {
    return a.a_off == b.a_off && a.out_c == b.out_c && a.count == b.count && a.vecs == b.vecs && a.w_off == b.w_off &&
           a.w_size == b.w_size && a.s_off == b.s_off;
  };
  return std::equal(l.blocks.begin(), l.blocks.end(), reinterpret_cast<const Block*>(base + l.head.blocks), same_block) &&
         (l.runs.empty() || memcmp(base + l.head.runs, l.runs.data(), l.runs.size() * sizeof(Run)) == 0) &&
         order_holds(l, base);
}

// Writes the blob that `l` lays out.
void pack_blob(const Layout& l, const int8_t* weight, const xq_requant& q, void* packed, const Share& share) {
  const bool in_blocks = l.head.algo != XQ_ALGO_REFERENCE;
  memset(packed, 0, static_cast<size_t>(in_blocks ? l.head.weights : l.head.size));
  auto* head = static_cast<Packed*>(packed);
  set_head(l, q, *head);
  char* base = static_cast<char*>(packed);
  if (q.lut) place_lut(q.lut, head->isa, reinterpret_cast<uint8_t*>(base + head->lut));
  if (!l.blocks.empty()) memcpy(base + head->blocks, l.blocks.data(), l.blocks.size() * sizeof(Block));
  // Packed weights may go to a file, byte for byte: what lies between fields must not tell of other memory.
  constexpr size_t kGap = offsetof(Block, regroup) + sizeof(Block::regroup);
  for (size_t i = 0; i < l.blocks.size(); ++i)
    memset(base + head->blocks + i * sizeof(Block) + kGap, 0, offsetof(Block, w_off) - kGap);
  if (!l.runs.empty()) memcpy(base + head->runs, l.runs.data(), l.runs.size() * sizeof(Run));
  const Weights w{l.head.conv, weight};
  auto* to = reinterpret_cast<int8_t*>(base + head->weights);
  if (!in_blocks) {
    head->clamp_float = pack_scalars(l, w, q, head, {});
    memcpy(to, weight, static_cast<size_t>(l.weight_bytes));
    return;
  }
  std::atomic<bool> leaves{false};
  share(head->n_blocks, [&](int64_t first, int64_t end) {
    const Stretch some{static_cast<size_t>(first), static_cast<size_t>(end)};
    // Here and not before: whoever writes to fresh memory first waits for the system to make it.
    for (size_t b = some.first; b < some.end; ++b)
      memset(to + l.blocks[b].w_off, 0, static_cast<size_t>(l.blocks[b].w_size));
    if (pack_scalars(l, w, q, head, some)) leaves = true;
    if (head->algo == XQ_ALGO_DEPTHWISE) pack_depthwise(*head, l.blocks.data() + first, l.blocks.data() + end, weight, to);
    else if (head->winograd) pack_winograd(*head, l.blocks.data() + first, l.blocks.data() + end, weight, to);
    else if (head->algo == XQ_ALGO_GROUPED && head->order) pack_grouped(l, w, base, some);
    else pack_dense(l, w, base, some);
  });
  head->clamp_float = leaves;
}

// The weights of a phase, in the order of an ordinary convolution's.
std::vector<int8_t> weights_of(const xq_conv& c, const Phase& phase, const int8_t* weight) {
  const int64_t filters = int64_t{c.out_channels} * (c.in_channels / c.groups);
  std::vector<int8_t> own(static_cast<size_t>(filters * phase.taps[0] * phase.taps[1] * phase.taps[2]));
  int8_t* to = own.data();
  for (int64_t f = 0; f < filters; ++f, weight += taps_of(c))
    for (int64_t z = 0; z < phase.taps[0]; ++z)
      for (int64_t y = 0; y < phase.taps[1]; ++y)
        for (int64_t x = 0; x < phase.taps[2]; ++x)
          *to++ = weight[(phase.tap_of(c, 0, z) * c.kernel[1] + phase.tap_of(c, 1, y)) * c.kernel[2] + phase.tap_of(c, 2, x)];
  return own;
}

// Writes the blobs that layout_of_phases lays out.
void pack_phases(const Layout& l, const int8_t* weight, const xq_requant& q, void* packed, const Share& share) {
  const xq_conv& c = l.head.conv;
  memset(packed, 0, static_cast<size_t>(l.head.phases));
  set_head(l, q, *static_cast<Packed*>(packed));
  char* at = static_cast<char*>(packed) + l.head.phases;
  for (int64_t i = 0; i < phases_of(c); ++i) {
    const Phase phase(c, i);
    const Layout own = layout_of_phase(c, phase, l.head.isa);
    pack_blob(own, weights_of(c, phase, weight).data(), q, at, share);
    at += own.head.size;
  }
}

// Whether pack_phases may have made `packed` of the same.
bool are_phases_of(const Layout& l, const xq_requant& q, const void* packed) {
  if (!is_blob_of(l, q, 0, 0, packed)) return false;
  const char* at = static_cast<const char*>(packed) + l.head.phases;
  for (int64_t i = 0; i < phases_of(l.head.conv); ++i) {
    const Layout own = layout_of_phase(l.head.conv, Phase(l.head.conv, i), l.head.isa);
    if (!is_blob_of(own, q, 0, 0, at)) return false;
    at += own.head.size;
  }
  return true;
}

// A linear as a convolution with a kernel of 1.
xq_conv pointwise(const xq_linear& linear) {
  xq_conv c{};
  c.in_channels = linear.in_features, c.out_channels = linear.out_features, c.groups = 1;
  for (int i = 0; i < 3; ++i) c.kernel[i] = c.stride[i] = c.dilation[i] = 1;
  return c;
}

xq_requant linear_requant(const float* scale, const float* bias) {
  xq_requant q{};
  q.mult = scale, q.bias = bias, q.hi = 255;
  return q;
}

bool linear_valid(const xq_linear& linear, int isa) {
  return linear.activation >= XQ_ACT_NONE && linear.activation <= XQ_ACT_TANH &&
         conv_valid(pointwise(linear), isa);
}

}  // namespace

int pack_shared(const xq_conv* conv, int isa, const int8_t* weight, const xq_requant* q, void* packed,
                const Share& share) {
  if (!conv || !weight || !q || !q->mult || !packed) return XQ_BAD_ARGUMENT;
  if (reinterpret_cast<uintptr_t>(packed) % kAlign) return XQ_BAD_ARGUMENT;
  if (!conv_valid(*conv, isa)) return XQ_UNSUPPORTED;
  if (!byte_range(q->in_zp) || !byte_range(q->out_zp) || !byte_range(q->lo) || !byte_range(q->hi) ||
      !byte_range(q->res_zp) || q->lo > q->hi)
    return XQ_BAD_ARGUMENT;
  if (!finite(q->mult, conv->out_channels) || !finite(q->bias, conv->out_channels) || !finite(&q->res_mult, 1) ||
      !finite(q->slopes, conv->out_channels))
    return XQ_NOT_FINITE;
  const Layout l = layout_of(*conv, isa);
  if (l.head.algo != XQ_ALGO_WINOGRAD4) {
    (l.head.phases ? pack_phases : pack_blob)(l, weight, *q, packed, share);
    return XQ_OK;
  }
  const Layout other = layout_of(without_winograd4(*conv, isa), isa);
  if (!within_winograd_reach(*conv, weight)) {
    const auto used = static_cast<size_t>(other.head.size), all = xq_conv_packed_size(conv, isa);
    if (used < all) memset(static_cast<char*>(packed) + used, 0, all - used);
    pack_blob(other, weight, *q, packed, share);
    return XQ_OK;
  }
  pack_blob(l, weight, *q, packed, share);
  if (conv->algo == XQ_ALGO_AUTO) {
    static_cast<Packed*>(packed)->for_few = l.head.size;
    pack_blob(other, weight, *q, static_cast<char*>(packed) + l.head.size, share);
  }
  return XQ_OK;
}

bool is_packed_for(const xq_conv* conv, int isa, const xq_requant* q, const void* packed) {
  const Layout l = layout_of(*conv, isa);
  if (l.head.phases) return are_phases_of(l, *q, packed);
  if (l.head.algo != XQ_ALGO_WINOGRAD4) return is_blob_of(l, *q, 0, 0, packed);
  const Layout other = layout_of(without_winograd4(*conv, isa), isa);
  if (is_blob_of(other, *q, 0, 0, packed)) return true;  // as of weights whose sums are too large for it
  const bool two = conv->algo == XQ_ALGO_AUTO;
  return is_blob_of(l, *q, 0, two ? l.head.size : 0, packed) &&
         (!two || is_blob_of(other, *q, 0, 0, static_cast<const char*>(packed) + l.head.size));
}

bool is_linear_packed_for(const xq_linear* linear, int isa, const void* packed) {
  return is_blob_of(layout_of(pointwise(*linear), isa, true), linear_requant(nullptr, nullptr), linear->activation, 0, packed);
}

int pack_linear_shared(const xq_linear* linear, int isa, const int8_t* weight, const float* scale, const float* bias,
                       void* packed, const Share& share) {
  if (!linear || !weight || !scale || !packed) return XQ_BAD_ARGUMENT;
  if (reinterpret_cast<uintptr_t>(packed) % kAlign) return XQ_BAD_ARGUMENT;
  if (!linear_valid(*linear, isa)) return XQ_UNSUPPORTED;
  pack_blob(layout_of(pointwise(*linear), isa, true), weight, linear_requant(scale, bias), packed, share);
  static_cast<Packed*>(packed)->activation = linear->activation;
  return XQ_OK;
}

}  // namespace xq

int xq_conv_pack(const xq_conv* conv, int isa, const int8_t* weight, const xq_requant* q, void* packed) {
  return xq::pack_shared(conv, isa, weight, q, packed, xq::kAlone);
}

size_t xq_linear_packed_size(const xq_linear* linear, int isa) {
  if (!linear || !xq::linear_valid(*linear, isa)) return 0;
  return static_cast<size_t>(xq::layout_of(xq::pointwise(*linear), isa, true).head.size);
}

int xq_linear_pack(const xq_linear* linear, int isa, const int8_t* weight, const float* scale,
                   const float* bias, void* packed) {
  return xq::pack_linear_shared(linear, isa, weight, scale, bias, packed, xq::kAlone);
}

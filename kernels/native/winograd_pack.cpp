#include "winograd_pack.h"

namespace xq {
namespace {

constexpr int kTaps = 3, kMostChannels = 2 * kMaxLanes;

// One number for each output channel of a block.
struct Lanes {
  int16_t v[kMostChannels];
};

template <class F>
void each(Lanes& to, F f) {
  for (int i = 0; i < kMostChannels; ++i) to.v[i] = static_cast<int16_t>(f(i));
}

// What winograd_forms.h says of weights along one axis: `by` from one tap, and from one result, to the next.
void transform2(const Lanes* taps, int by, Lanes* to, int to_by) {
  const int16_t *a = taps[0].v, *b = taps[by].v, *c = taps[2 * by].v;
  each(to[0], [=](int i) { return 2 * a[i]; });
  each(to[to_by], [=](int i) { return a[i] + b[i] + c[i]; });
  each(to[2 * to_by], [=](int i) { return a[i] - b[i] + c[i]; });
  each(to[3 * to_by], [=](int i) { return 2 * c[i]; });
}

void transform4(const Lanes* taps, int by, Lanes* to, int to_by) {
  const int16_t *a = taps[0].v, *b = taps[by].v, *c = taps[2 * by].v;
  each(to[0], [=](int i) { return 6 * a[i]; });
  each(to[to_by], [=](int i) { return -4 * (a[i] + b[i] + c[i]); });
  each(to[2 * to_by], [=](int i) { return -4 * (a[i] - b[i] + c[i]); });
  each(to[3 * to_by], [=](int i) { return a[i] + 2 * b[i] + 4 * c[i]; });
  each(to[4 * to_by], [=](int i) { return a[i] - 2 * b[i] + 4 * c[i]; });
  each(to[5 * to_by], [=](int i) { return 12 * c[i]; });
}

}  // namespace

bool within_winograd_reach(const xq_conv& c, const int8_t* weight) {
  const int64_t per = int64_t{c.in_channels} / c.groups * kTaps * kTaps;
  for (int64_t oc = 0; oc < c.out_channels; ++oc, weight += per) {
    int64_t positive = 0, negative = 0;
    for (int64_t i = 0; i < per; ++i) (weight[i] > 0 ? positive : negative) += weight[i];
    if (255 * max64(positive, -negative) > kWinogradReach) return false;
  }
  return true;
}

void pack_winograd(const Packed& h, const Block* first, const Block* end, const int8_t* weight, int8_t* to) {
  const int64_t in = h.conv.in_channels / h.conv.groups;
  const int across = h.winograd + 2;
  const auto transform = h.winograd == 4 ? transform4 : transform2;
  for (const Block* block = first; block < end; ++block) {
    auto* at = reinterpret_cast<int16_t*>(to + block->w_off);
    const int64_t width = int64_t{block->vecs} * h.lanes * 2, step = in / 2 * width;
    for (int64_t ic = 0; ic < in; ++ic) {
      Lanes taps[kTaps * kTaps] = {}, half[6 * kTaps], all[6 * 6];
      for (int vec = 0; vec < block->vecs; ++vec)
        for (int lane = 0; lane < h.lanes; ++lane)
          if (const int64_t oc = channel_of(block->vecs, vec, lane); oc < block->count)
            for (int i = 0; i < kTaps * kTaps; ++i)
              taps[i].v[vec * h.lanes + lane] = weight[((block->out_c + oc) * in + ic) * kTaps * kTaps + i];
      for (int x = 0; x < kTaps; ++x) transform(taps + x, kTaps, half + x, kTaps);
      for (int y = 0; y < across; ++y) transform(half + kTaps * y, 1, all + across * y, 1);
      for (int i = 0; i < across * across; ++i)
        for (int lane = 0; lane < block->vecs * h.lanes; ++lane)
          at[i * step + ic / 2 * width + 2 * lane + ic % 2] = all[i].v[lane];
    }
  }
}

}  // namespace xq

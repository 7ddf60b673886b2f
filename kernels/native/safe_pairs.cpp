// Where weights must lie for their products to be summed in 16 bits without saturating; see safe_pairs.h.
//
// vpmaddubsw adds two products in a lane of 16 bits. 255 * 128 fits there, 255 * 129 does not: so a lane is safe
// if its positive weights add up to at most 128, and its negative ones to at least -128.
#include "safe_pairs.h"

#include <emmintrin.h>

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

namespace xq {
namespace {

// Whether all lanes of two weights are safe.
bool pairs_safe(const int8_t* w, int64_t count) {
  for (int64_t i = 0; i < count; i += 2) {
    const int up = std::max<int>(w[i], 0) + std::max<int>(w[i + 1], 0);
    const int down = std::min<int>(w[i], 0) + std::min<int>(w[i + 1], 0);
    if (up > 128 || down < -128) return false;
  }
  return true;
}

// Sums of the positive and of the negative weights that meet in each lane of each quad: whatever the input, the
// lane's sum lies between 255 times the one and 255 times the other.
class LaneSums {
 public:
  LaneSums(const int8_t* w, int64_t quads, int64_t quad_bytes)
      : lanes_(quad_bytes / 2), up_(static_cast<size_t>(quads * lanes_)), down_(up_.size()) {
    for (size_t i = 0; i < up_.size(); ++i) {
      up_[i] = static_cast<int16_t>(std::max<int>(w[2 * i], 0) + std::max<int>(w[2 * i + 1], 0));
      down_[i] = static_cast<int16_t>(std::min<int>(w[2 * i], 0) + std::min<int>(w[2 * i + 1], 0));
    }
  }
  bool safe(int64_t quad, int64_t other) const {
    const int16_t *up = up_.data() + quad * lanes_, *down = down_.data() + quad * lanes_;
    const int64_t step = (other - quad) * lanes_;
    for (int64_t i = 0; i < lanes_; ++i)
      if (up[i] + up[i + step] > 128 || down[i] + down[i + step] < -128) return false;
    return true;
  }

 private:
  int64_t lanes_;
  std::vector<int16_t> up_, down_;
};

// For each channel of a block the sum of its positive weights, and of its negative ones without their sign, at some
// places of K. Sums stay at 255 once they are too big for a byte, which is far beyond what is safe.
template <int VECTORS>
struct ChannelSums {
  __m128i up[VECTORS], down[VECTORS];  // of 16 channels each
  ChannelSums operator+(const ChannelSums& other) const {
    ChannelSums sum;
    for (int i = 0; i < VECTORS; ++i)
      sum.up[i] = _mm_adds_epu8(up[i], other.up[i]), sum.down[i] = _mm_adds_epu8(down[i], other.down[i]);
    return sum;
  }
  ChannelSums flipped() const {
    ChannelSums other = *this;
    std::swap(other.up, other.down);
    return other;
  }
  bool safe() const {
    __m128i worst = _mm_max_epu8(up[0], down[0]);
    for (int i = 1; i < VECTORS; ++i) worst = _mm_max_epu8(worst, _mm_max_epu8(up[i], down[i]));
    const __m128i beyond = _mm_subs_epu8(worst, _mm_set1_epi8(static_cast<char>(128)));
    return _mm_movemask_epi8(_mm_cmpeq_epi8(beyond, _mm_setzero_si128())) == 0xffff;
  }
};

// How the bytes of a window are to lie: from where each comes, and whether it is flipped.
struct Arrangement {
  uint8_t from[16];
  bool flip[16];
};

// Up to 16 places of K, and which of them are safe together for all channels of a block. A place may be flipped:
// its weights change their signs and its input becomes 255 minus what it was, which balances sums that would
// otherwise grow in one direction. Places are numbered from the one with the biggest weight on.
template <int VECTORS>
class Window {
  using Sums = ChannelSums<VECTORS>;

 public:
  Window(const int8_t* w, int64_t quad_bytes, int places) : places_(places) {
    int biggest[16] = {};
    Sums found[16];
    bool fixed[16] = {};
    for (int i = 0; i < places; ++i) {
      uint8_t sums[2][16 * VECTORS] = {};
      for (int64_t c = 0; c < quad_bytes / 4; ++c) {
        const int weight = w[i / 4 * quad_bytes + c * 4 + i % 4];
        sums[0][c] = static_cast<uint8_t>(std::max(weight, 0)), sums[1][c] = static_cast<uint8_t>(std::max(-weight, 0));
        biggest[i] = std::max(biggest[i], std::abs(weight));
        fixed[i] |= weight == -128;  // has no int8 of the other sign
      }
      memcpy(found[i].up, sums[0], sizeof found[i].up), memcpy(found[i].down, sums[1], sizeof found[i].down);
      place_[i] = static_cast<uint8_t>(i);
    }
    std::stable_sort(place_, place_ + places, [&](int a, int b) { return biggest[a] > biggest[b]; });
    for (int i = 0; i < places; ++i) {
      fixed_ |= uint32_t{fixed[place_[i]]} << i;
      for (int j = 0; j < i; ++j)
        for (const bool flip : {false, true}) {
          const Sums& other = found[place_[j]];
          Sums& both = pair(i, j, flip);
          both = found[place_[i]] + (flip ? other.flipped() : other);
          if (both.safe() && flips_allowed(1u << i | 1u << j, flip ? 1u << j : 0) != kNoFlips)
            partners_[i] |= 1u << j, partners_[j] |= 1u << i;
        }
    }
  }

  // An order of the places in which as many as are found are safe with their neighbours: two fours at a time,
  // which make a couple of quads, then pairs.
  Arrangement arrange() const {
    constexpr int kBudget = 500;  // fours that are tried; four times as many make one product in a hundred quicker
    Four best[4];
    int budget = kBudget, count = places_ / 8 * 2;
    if (!(places_ % 8 == 0 && cover(everything(), best, budget)) && !two_fours(best, &count)) count = 0;
    Arrangement result;
    int at = 0;
    uint32_t left = everything();
    const auto put = [&](int place, bool flip) { result.from[at] = place_[place], result.flip[at++] = flip; };
    for (int i = 0; i < count; i += 2) {
      uint32_t four[2] = {best[i].places, best[i + 1].places};
      left &= ~(four[0] | four[1]);
      for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 2; ++k)
          for (int n = 0; n < 2; ++n) {
            const int place = __builtin_ctz(four[k]);
            four[k] &= four[k] - 1;
            put(place, best[i + k].flips >> place & 1);
          }
    }
    int mate[16];
    match(left, mate);
    for (const bool wanted : {true, false})
      for (int i = 0; i < places_; ++i) {
        if (!(left >> i & 1) || (mate[i] != kNone) != wanted || mate[i] > i) continue;
        const uint32_t flips = wanted ? pair_flips(i, mate[i]) : 0;
        put(i, flips >> i & 1);
        if (wanted) put(mate[i], flips >> mate[i] & 1);
      }
    return result;
  }

 private:
  static constexpr int kNone = -1;
  static constexpr uint32_t kNoFlips = ~0u;
  struct Four {
    uint32_t places = 0, flips = 0;
  };

  uint32_t everything() const { return (1u << places_) - 1; }
  Sums& pair(int i, int j, bool flip) { return pairs_[i * (i - 1) / 2 + j][flip]; }
  const Sums& pair(int i, int j, bool flip) const { return pairs_[i * (i - 1) / 2 + j][flip]; }

  // The same flips, or all others instead, of which none is of a fixed place.
  uint32_t flips_allowed(uint32_t places, uint32_t flips) const {
    if (!(flips & fixed_)) return flips;
    return (places ^ flips) & fixed_ ? kNoFlips : places ^ flips;
  }

  uint32_t pair_flips(int i, int j) const {
    return pair(i, j, false).safe() ? 0 : flips_allowed(1u << i | 1u << j, 1u << j);
  }

  // Flips with which the four are safe; d > c > b > a.
  uint32_t four_flips(int d, int c, int b, int a) const {
    const uint32_t all = 1u << a | 1u << b | 1u << c | 1u << d;
    for (const bool flip_c : {false, true})
      for (const bool flip_a : {false, true}) {
        const Sums &high = pair(d, c, flip_c), &low = pair(b, a, flip_a);
        const uint32_t flips = uint32_t{flip_c} << c | uint32_t{flip_a} << a;
        for (const bool flip_low : {false, true}) {
          if (!(high + (flip_low ? low.flipped() : low)).safe()) continue;
          const uint32_t allowed = flips_allowed(all, flip_low ? flips ^ (1u << a | 1u << b) : flips);
          if (allowed != kNoFlips) return allowed;
        }
      }
    return kNoFlips;
  }

  // Calls f with each safe four of the given places that has place `a`, until it answers true or the budget ends.
  template <class F>
  bool any_four(uint32_t places, int a, int& budget, F f) const {
    for (int d = places_ - 1; d > a; --d) {
      if (!(places & partners_[a] & 1u << d)) continue;
      const uint32_t with_d = places & partners_[a] & partners_[d];
      for (int c = d - 1; c > a; --c) {
        if (!(with_d >> c & 1)) continue;
        const uint32_t with_c = with_d & partners_[c];
        for (int b = c - 1; b > a; --b) {
          if (!(with_c >> b & 1)) continue;
          if (--budget < 0) return false;
          const uint32_t flips = four_flips(d, c, b, a);
          if (flips != kNoFlips && f(Four{1u << a | 1u << b | 1u << c | 1u << d, flips})) return true;
        }
      }
    }
    return false;
  }

  // Fours for all of the given places. The first of them has the biggest weight, and is joined with the smallest
  // that will do.
  bool cover(uint32_t places, Four* chosen, int& budget) const {
    if (places == 0) return true;
    return any_four(places, __builtin_ctz(places), budget, [&](const Four& four) {
      *chosen = four;
      return cover(places & ~four.places, chosen + 1, budget);
    });
  }

  // Two fours that leave places of which as many as are found can be paired.
  bool two_fours(Four chosen[2], int* count) const {
    constexpr int kBudget = 250, kPairings = 16;
    int most = -1, pairings = kPairings, budget = kBudget;
    *count = 2;
    for (int a = 0; a + 8 <= places_; ++a)
      any_four(everything(), a, budget, [&](const Four& first) {
        const uint32_t left = everything() & ~first.places;
        for (int b = a + 1; b + 4 <= places_; ++b) {
          if (!(left >> b & 1)) continue;
          const bool done = any_four(left, b, budget, [&](const Four& second) {
            if (const int worth = paired(left & ~second.places); worth > most)
              most = worth, chosen[0] = first, chosen[1] = second;
            return most == places_ - 8 || --pairings == 0;
          });
          if (done) return true;
        }
        return false;
      });
    return most >= 0;
  }

  // Pairs of the given places: first those with the fewest partners, then by exchanges.
  void match(uint32_t places, int mate[16]) const {
    std::fill(mate, mate + 16, kNone);
    uint32_t free = places;
    const auto join = [&](int a, int b) { mate[a] = b, mate[b] = a, free &= ~(1u << a | 1u << b); };
    const auto rarest = [&](uint32_t among) {
      int best = kNone, fewest = 17;
      for (int i = 0; i < 16; ++i) {
        const int partners = __builtin_popcount(partners_[i] & free);
        if (among >> i & 1 && partners && partners < fewest) best = i, fewest = partners;
      }
      return best;
    };
    for (int a; (a = rarest(free)) != kNone;) join(a, rarest(free & partners_[a]));
    for (int u = 0; u < 16; ++u)
      for (int v = 0; v < 16; ++v)
        for (int a = 0; a < 16 && u != v && free >> u & free >> v & 1; ++a)
          if (const int b = mate[a]; b != kNone && partners_[u] >> a & partners_[v] >> b & 1) join(u, a), join(v, b);
  }

  int paired(uint32_t places) const {
    int mate[16];
    match(places, mate);
    return static_cast<int>(std::count_if(mate, mate + 16, [](int m) { return m != kNone; }));
  }

  int places_;
  uint8_t place_[16];
  uint32_t fixed_ = 0;  // places that cannot be flipped
  uint32_t partners_[16] = {};
  Sums pairs_[120][2];
};

// A run's weights and their part of Packed::order.
struct Ordered {
  std::vector<int8_t> weights;
  std::vector<int32_t> order;
  static constexpr int64_t kCoupled = 20;
  static int64_t least_cost(int64_t quads) { return kCoupled * quads; }
  // Instructions, with two vectors of channels and four rows.
  int64_t cost() const {
    const int64_t quads = static_cast<int64_t>(order.size()) - kClasses, coupled = 2 * order[0], plain = order[1];
    int64_t paired = 0;
    for (size_t pairing = 1; pairing < kPairings; ++pairing) paired += order[1 + pairing];
    return kCoupled * coupled + 24 * plain + 28 * paired + 46 * (quads - coupled - plain - paired);
  }
};

// Couples of quads that are safe together, then quads that are safe in some pairing, their bytes so ordered that
// pairs are adjacent, then the others.
Ordered ordered(const std::vector<int8_t>& was, int64_t quads, int64_t quad_bytes) {
  constexpr int64_t kReach = 64;  // how far partners are looked for
  Ordered result{{}, std::vector<int32_t>(kClasses)};
  result.weights.reserve(was.size());
  std::vector<int8_t> quad(static_cast<size_t>(quad_bytes));
  std::vector<bool> placed(static_cast<size_t>(quads));
  auto place = [&](int64_t q, const int8_t* from) {
    result.weights.insert(result.weights.end(), from, from + quad_bytes);
    result.order.push_back(static_cast<int32_t>(q)), placed[static_cast<size_t>(q)] = true;
  };
  const LaneSums sums(was.data(), quads, quad_bytes);
  for (int64_t first = 0; first < quads; ++first) {
    const auto f = static_cast<size_t>(first);
    for (int64_t second = first + 1; second < min64(quads, first + kReach) && !placed[f]; ++second) {
      if (placed[static_cast<size_t>(second)] || !sums.safe(first, second)) continue;
      place(first, was.data() + first * quad_bytes), place(second, was.data() + second * quad_bytes);
      ++result.order[0];
    }
  }
  for (size_t pairing = 0; pairing < kPairings; ++pairing)
    for (int64_t q = 0; q < quads; ++q) {
      if (placed[static_cast<size_t>(q)]) continue;
      const int8_t* from = was.data() + q * quad_bytes;
      for (int64_t i = 0; i < quad_bytes; ++i)
        quad[static_cast<size_t>(i)] = from[i / 4 * 4 + kPairing[pairing][i % 4]];
      if (pairs_safe(quad.data(), quad_bytes)) place(q, quad.data()), ++result.order[1 + pairing];
    }
  for (int64_t q = 0; q < quads; ++q)
    if (!placed[static_cast<size_t>(q)]) place(q, was.data() + q * quad_bytes);
  return result;
}

// The same with the bytes of every window arranged.
std::vector<int8_t> regrouped(const std::vector<int8_t>& was, const Run& run, int64_t quad_bytes, const Regroup& to) {
  std::vector<int8_t> grouped = was;
  for (int64_t first = 0; first < run.bytes; first += 16) {
    const int places = static_cast<int>(min64(16, run.quads * 4 - first));
    // The last window is read so that it ends with the run.
    const int64_t shift = max64(0, first + 16 - run.bytes);
    const int8_t* old = was.data() + first / 4 * quad_bytes;
    int8_t* now = grouped.data() + first / 4 * quad_bytes;
    const Arrangement order = quad_bytes <= 64 ? Window<1>(old, quad_bytes, places).arrange()
                                               : Window<2>(old, quad_bytes, places).arrange();
    for (int k = 0; k < places; ++k) {
      const int from = order.from[k];
      to.from[first + k] = static_cast<uint8_t>(min64(from + shift, 15));
      to.flip[first + k] = order.flip[k] ? 255 : 0;
      for (int64_t c = 0; c < quad_bytes; c += 4) {
        const int8_t weight = old[from / 4 * quad_bytes + c + from % 4];
        now[k / 4 * quad_bytes + c + k % 4] = static_cast<int8_t>(order.flip[k] ? -weight : weight);
        to.more[c / 4] += order.flip[k] ? 255 * weight : 0;
      }
    }
  }
  return grouped;
}

}  // namespace

bool order_block(int8_t* w, const Run* runs, int32_t n_runs, int64_t quad_bytes, int32_t* order, const Regroup* to) {
  std::vector<std::vector<int8_t>> was;
  std::vector<Ordered> as_it_is, arranged;
  const auto copying = [](const Run& run) { return 5 * int64_t{run.quads} / 2 + 32; };
  int64_t cost = 0, other_cost = 0, least = 0;
  const int8_t* at = w;
  for (int32_t i = 0; i < n_runs; at += runs[i++].quads * quad_bytes) {
    was.emplace_back(at, at + runs[i].quads * quad_bytes);
    as_it_is.push_back(ordered(was.back(), runs[i].quads, quad_bytes));
    cost += as_it_is.back().cost(), least += Ordered::least_cost(runs[i].quads) + copying(runs[i]);
  }
  const bool promising = to && least < cost;  // weights that have a normal spread are safe as they lie
  if (promising) {
    std::fill(to->more, to->more + quad_bytes / 4, 0);
    for (int32_t i = 0; i < n_runs; ++i) {
      const int64_t first = i * regrouped_bytes(runs[i]);
      const Regroup here{to->from + first, to->flip + first, to->more};
      const auto& run = was[static_cast<size_t>(i)];
      arranged.push_back(ordered(regrouped(run, runs[i], quad_bytes, here), runs[i].quads, quad_bytes));
      other_cost += arranged.back().cost() + copying(runs[i]);
    }
  }
  const bool regroup = promising && other_cost < cost;
  for (const Ordered& run : regroup ? arranged : as_it_is) {
    memcpy(w, run.weights.data(), run.weights.size()), w += run.weights.size();
    memcpy(order, run.order.data(), run.order.size() * sizeof(int32_t)), order += run.order.size();
  }
  return regroup;
}

bool order_lanes(int8_t* w, int64_t lanes, uint8_t* places) {
  std::vector<int8_t> ordered(w, w + lanes * 4);
  std::vector<uint8_t> from(places, places + lanes * 4);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    int8_t* quad = ordered.data() + lane * 4;
    bool safe = false;
    for (int i = 0; i < kPairings && !safe; ++i) {
      for (int k = 0; k < 4; ++k) {
        quad[k] = w[lane * 4 + kPairing[i][k]];
        from[static_cast<size_t>(lane * 4 + k)] = places[lane * 4 + kPairing[i][k]];
      }
      safe = pairs_safe(quad, 4);
    }
    if (!safe) return false;
  }
  memcpy(w, ordered.data(), ordered.size());
  memcpy(places, from.data(), from.size());
  return true;
}

}  // namespace xq

// Where weights must lie for their products to be summed in 16 bits without saturating; see safe_pairs.h.
//
// vpmaddubsw adds two products in a lane of 16 bits. 255 * 128 fits there, 255 * 129 does not: so a lane is safe
// if its positive weights add up to at most 128, and its negative ones to at least -128.
#include "safe_pairs.h"

#include <algorithm>
#include <utility>
#include <vector>

// Every level that has no VNNI has these.
#define XQ_TARGET "avx2,popcnt"
#include "target.h"

namespace xq {
namespace {

// Whether both pairs of four neighbouring weights are safe.
bool pairs_safe(const int8_t w[4]) {
  for (int i = 0; i < 4; i += 2) {
    const int up = std::max<int>(w[i], 0) + std::max<int>(w[i + 1], 0);
    const int down = std::min<int>(w[i], 0) + std::min<int>(w[i + 1], 0);
    if (up > 128 || down < -128) return false;
  }
  return true;
}

// For each channel of a block the sum of its positive weights, and of its negative ones without their sign, at some
// places of K. Sums stay at 255 once they are too big for a byte, which is far beyond what is safe.
template <int VECTORS>
class ChannelSums {
 public:
  ChannelSums operator+(const ChannelSums& other) const {
    ChannelSums sum;
    for (int i = 0; i < VECTORS; ++i) sum.set(i, _mm256_adds_epu8(both(i), other.both(i)));
    return sum;
  }
  ChannelSums flipped() const {
    ChannelSums other;
    for (int i = 0; i < VECTORS; ++i) other.set(i, _mm256_permute2x128_si256(both(i), both(i), 1));
    return other;
  }
  bool safe() const {
    const __m256i beyond = _mm256_subs_epu8(worst(), _mm256_set1_epi8(static_cast<char>(128)));
    return _mm256_testz_si256(beyond, beyond);
  }
  // What may be added to each sum; nothing where it is not safe already.
  ChannelSums room() const {
    ChannelSums left;
    for (int i = 0; i < VECTORS; ++i) left.set(i, _mm256_subs_epu8(_mm256_set1_epi8(static_cast<char>(128)), both(i)));
    return left;
  }
  bool within(const ChannelSums& room) const {
    __m256i beyond = _mm256_subs_epu8(both(0), room.both(0));
    for (int i = 1; i < VECTORS; ++i) beyond = _mm256_or_si256(beyond, _mm256_subs_epu8(both(i), room.both(i)));
    return _mm256_testz_si256(beyond, beyond);
  }
  // The largest of all sums.
  int biggest() const {
    const __m256i all = worst();
    __m128i most = _mm_max_epu8(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    most = _mm_max_epu8(most, _mm_srli_si128(most, 8)), most = _mm_max_epu8(most, _mm_srli_si128(most, 4));
    most = _mm_max_epu8(most, _mm_srli_si128(most, 2)), most = _mm_max_epu8(most, _mm_srli_si128(most, 1));
    return _mm_cvtsi128_si32(most) & 0xff;
  }
  // Of one place, weights of 16 channels.
  void set_weights(int i, __m128i x) {
    const __m128i zero = _mm_setzero_si128(), negative = _mm_cmpgt_epi8(zero, x);
    const __m128i up = _mm_andnot_si128(negative, x), down = _mm_and_si128(negative, _mm_sub_epi8(zero, x));
    set(i, _mm256_set_m128i(down, up));
  }
  __m128i weights(int i) const { return _mm_sub_epi8(sums_[i].up, sums_[i].down); }

 private:
  __m256i both(int i) const { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums_ + i)); }
  void set(int i, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums_ + i), x); }
  __m256i worst() const {
    __m256i most = both(0);
    for (int i = 1; i < VECTORS; ++i) most = _mm256_max_epu8(most, both(i));
    return most;
  }

  // Of 16 channels each. Not one __m256i: a standard vector would not lay it where that may be.
  struct {
    __m128i up, down;
  } sums_[VECTORS];
};

// The weights of a run, place by place along K: the positive part of each channel's weight, and the negative one.
template <int VECTORS>
using Places = std::vector<ChannelSums<VECTORS>>;

template <int VECTORS>
Places<VECTORS> places_of(const int8_t* w, int64_t quads, int64_t quad_bytes) {
  Places<VECTORS> places(static_cast<size_t>(quads) * 4);
  const __m128i low = _mm_set1_epi32(0xff);
  alignas(16) int8_t whole[64 * VECTORS] = {};
  for (int64_t q = 0; q < quads; ++q) {
    memcpy(whole, w + q * quad_bytes, static_cast<size_t>(quad_bytes));
    for (int v = 0; v < VECTORS; ++v) {
      const auto* from = reinterpret_cast<const __m128i*>(whole + 64 * v);
      for (int k = 0; k < 4; ++k) {
        const auto bytes = [&](int i) { return _mm_and_si128(_mm_srli_epi32(_mm_load_si128(from + i), 8 * k), low); };
        const __m128i x = _mm_packus_epi16(_mm_packs_epi32(bytes(0), bytes(1)), _mm_packs_epi32(bytes(2), bytes(3)));
        places[static_cast<size_t>(q * 4 + k)].set_weights(v, x);
      }
    }
  }
  return places;
}

// Four places as a quad of weights.
template <int VECTORS>
void write_quad(const ChannelSums<VECTORS>* const place[4], int64_t quad_bytes, int8_t* to) {
  alignas(16) int8_t whole[64 * VECTORS];
  for (int v = 0; v < VECTORS; ++v) {
    __m128i x[4];
    for (int k = 0; k < 4; ++k) x[k] = place[k]->weights(v);
    const __m128i a = _mm_unpacklo_epi8(x[0], x[1]), b = _mm_unpackhi_epi8(x[0], x[1]);
    const __m128i c = _mm_unpacklo_epi8(x[2], x[3]), d = _mm_unpackhi_epi8(x[2], x[3]);
    auto* at = reinterpret_cast<__m128i*>(whole + 64 * v);
    _mm_store_si128(at, _mm_unpacklo_epi16(a, c)), _mm_store_si128(at + 1, _mm_unpackhi_epi16(a, c));
    _mm_store_si128(at + 2, _mm_unpacklo_epi16(b, d)), _mm_store_si128(at + 3, _mm_unpackhi_epi16(b, d));
  }
  memcpy(to, whole, static_cast<size_t>(quad_bytes));
}

// Whether two pairs of places are safe together, in any of the eight ways to flip them. None of these is a branch:
// half of them would be foreseen wrongly.
template <int VECTORS>
class Beside {
 public:
  Beside(const ChannelSums<VECTORS>& pair, const ChannelSums<VECTORS>& flipped_against)
      : left_{pair.room(), pair.flipped().room(), flipped_against.room(), flipped_against.flipped().room()},
        first_(pair.safe()), second_(flipped_against.safe()) {}
  bool safe(const ChannelSums<VECTORS>& x, const ChannelSums<VECTORS>& y) const {
    const bool first = x.within(left_[0]) | x.within(left_[1]) | y.within(left_[0]) | y.within(left_[1]);
    const bool second = x.within(left_[2]) | x.within(left_[3]) | y.within(left_[2]) | y.within(left_[3]);
    return (first & first_) | (second & second_);
  }

 private:
  ChannelSums<VECTORS> left_[4];
  bool first_, second_;
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
  Window(const Sums* found, int places) : places_(places) {
    // Sorted by counting, which has no branch that depends on weights.
    int16_t order[16];
    for (int i = 0; i < 16; ++i) order[i] = static_cast<int16_t>(i < places ? i - 16 * found[i].biggest() : i);
    for (int i = 0; i < places; ++i) {
      int before = 0;
      for (int j = 0; j < 16; ++j) before += order[j] < order[i];
      place_[before] = static_cast<uint8_t>(i);
      fixed_ |= uint32_t{order[i] == i - 16 * 128} << before;  // -128 has no int8 of the other sign
    }
    Sums flipped[16];
    for (int i = 0; i < places; ++i) {
      const Sums& here = found[place_[i]];
      flipped[i] = here.flipped();
      for (int j = 0; j < i; ++j) {
        Sums &as_they_are = pair(i, j, false), &against = pair(i, j, true);
        as_they_are = here + found[place_[j]], against = here + flipped[j];
        const uint32_t safe = as_they_are.safe() | (against.safe() & !(fixed_ >> i & fixed_ >> j & 1));
        partners_[i] |= safe << j, partners_[j] |= safe << i;
      }
    }
  }

  // An order of the places in which as many as are found are safe with their neighbours: two fours at a time,
  // which make a couple of quads, then pairs.
  Arrangement arrange() const {
    constexpr int kBudget = 100;  // fours that are tried; five times as many make one product in a hundred quicker
    Four best[4];
    int budget = kBudget, count = places_ / 8 * 2;
    Four two[2];
    if (places_ % 8 != 0 || !cover(everything(), best, budget, places_ == 16 ? two : nullptr)) {
      count = 2;
      if (two[0].places) std::copy(two, two + 2, best);
      else if (!two_fours(best, &count)) count = 0;
    }
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
    if (left) match(left, mate);
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

  static int last(uint32_t places) { return 31 - __builtin_clz(places); }
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

  // Flips with which the four are safe; d > c, b > a.
  uint32_t four_flips(int d, int c, int b, int a) const {
    for (int choice = 0; choice < 8; ++choice) {
      const bool flip_c = choice & 4, flip_a = choice & 2, flip_low = choice & 1;
      const Sums &high = pair(d, c, flip_c), &low = pair(b, a, flip_a);
      if (!(high + (flip_low ? low.flipped() : low)).safe()) continue;
      const uint32_t flips = uint32_t{flip_c} << c | uint32_t{flip_a} << a;
      const uint32_t all = 1u << a | 1u << b | 1u << c | 1u << d;
      const uint32_t allowed = flips_allowed(all, flip_low ? flips ^ (1u << a | 1u << b) : flips);
      if (allowed != kNoFlips) return allowed;
    }
    return kNoFlips;
  }

  // Calls f with each safe four of the given places that has place `a`, until it answers true or the budget ends.
  template <class F>
  bool any_four(uint32_t places, int a, int& budget, F f) const {
    const auto below = [](int i) { return (1u << i) - 1; };
    const uint32_t with_a = places & partners_[a] & ~below(a + 1);
    for (uint32_t ds = with_a; ds;) {
      const int d = last(ds);
      ds &= below(d);
      const Beside<VECTORS> beside(pair(d, a, false), pair(d, a, true));
      for (uint32_t cs = with_a & partners_[d] & below(d); cs;) {
        const int c = last(cs);
        cs &= below(c);
        for (uint32_t bs = cs & partners_[c]; bs;) {
          const int b = last(bs);
          bs &= below(b);
          if (--budget < 0) return false;
          if (!beside.safe(pair(c, b, false), pair(c, b, true))) continue;
          const uint32_t flips = four_flips(d, a, c, b);
          if (flips != kNoFlips && f(Four{1u << a | 1u << b | 1u << c | 1u << d, flips})) return true;
        }
      }
    }
    return false;
  }

  // Fours for all of the given places. The first of them has the biggest weight, and is joined with the smallest
  // that will do. On the way the first two are kept, where `two` is given, that leave places which can be paired.
  bool cover(uint32_t places, Four* chosen, int& budget, Four* two) const {
    if (places == 0) return true;
    if (int mate[16]; two && !two->places && __builtin_popcount(places) == 8 && can_pair(places, mate))
      two[0] = chosen[-2], two[1] = chosen[-1];
    return any_four(places, __builtin_ctz(places), budget, [&](const Four& four) {
      *chosen = four;
      return cover(places & ~four.places, chosen + 1, budget, two);
    });
  }

  // Whether all of the given places can be paired at once; then how.
  bool can_pair(uint32_t places, int mate[16]) const {
    if (places == 0) return true;
    const int a = __builtin_ctz(places);
    places &= places - 1;
    for (uint32_t bs = places & partners_[a]; bs; bs &= bs - 1) {
      const int b = __builtin_ctz(bs);
      mate[a] = b, mate[b] = a;
      if (can_pair(places & ~(1u << b), mate)) return true;
    }
    return false;
  }

  // Two fours that leave places of which as many as are found can be paired.
  bool two_fours(Four chosen[2], int* count) const {
    constexpr int kBudget = 60, kPairings = 2;
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
    if (__builtin_popcount(places) <= 8 && can_pair(places, mate)) return;
    std::fill(mate, mate + 16, kNone);
    uint32_t free = places;
    const auto join = [&](int a, int b) { mate[a] = b, mate[b] = a, free &= ~(1u << a | 1u << b); };
    const auto rarest = [&](uint32_t among) {
      int best = kNone, fewest = 17;
      for (uint32_t rest = among; rest; rest &= rest - 1) {
        const int i = __builtin_ctz(rest), partners = __builtin_popcount(partners_[i] & free);
        if (partners && partners < fewest) best = i, fewest = partners;
      }
      return best;
    };
    for (int a; (a = rarest(free)) != kNone;) join(a, rarest(free & partners_[a]));
    if ((free & (free - 1)) == 0) return;
    const uint32_t lonely = free;
    for (uint32_t us = lonely; us; us &= us - 1)
      for (uint32_t vs = lonely; vs; vs &= vs - 1) {
        const int u = __builtin_ctz(us), v = __builtin_ctz(vs);
        if (u == v || !(free >> u & free >> v & 1)) continue;
        for (uint32_t as = partners_[u] & places & ~free; as; as &= as - 1) {
          const int a = __builtin_ctz(as), b = mate[a];
          if (!(partners_[v] >> b & 1)) continue;
          join(u, a), join(v, b);
          break;
        }
      }
  }

  int paired(uint32_t places) const {
    int mate[16];
    match(places, mate);
    return static_cast<int>(std::count_if(mate, mate + 16, [](int m) { return m != kNone; }));
  }

  int places_;
  uint8_t place_[16];
  uint32_t fixed_ = 0;  // places that cannot be flipped
  uint32_t partners_[16] = {};  // the same with any flips that are allowed
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
template <int VECTORS>
Ordered ordered(const Places<VECTORS>& places, int64_t quad_bytes) {
  constexpr int64_t kReach = 8;  // how far partners are looked for; few are found farther on
  const auto quads = static_cast<int64_t>(places.size() / 4);
  Ordered result{std::vector<int8_t>(static_cast<size_t>(quads * quad_bytes)), std::vector<int32_t>(kClasses)};
  std::vector<bool> placed(static_cast<size_t>(quads));
  int8_t* to = result.weights.data();
  const auto at = [&](int64_t q, int k) { return &places[static_cast<size_t>(q * 4 + k)]; };
  const auto place = [&](int64_t q, const int* pairing) {
    const ChannelSums<VECTORS>* const four[4] = {at(q, pairing[0]), at(q, pairing[1]), at(q, pairing[2]), at(q, pairing[3])};
    write_quad<VECTORS>(four, quad_bytes, to), to += quad_bytes;
    result.order.push_back(static_cast<int32_t>(q)), placed[static_cast<size_t>(q)] = true;
  };
  const auto pair = [&](int64_t q, int a, int b) { return *at(q, a) + *at(q, b); };
  constexpr int kAsTheyLie[4] = {0, 1, 2, 3};
  std::vector<ChannelSums<VECTORS>> halves(static_cast<size_t>(quads) * 2);
  for (int64_t q = 0; q < quads; ++q)
    for (int half = 0; half < 2; ++half) halves[static_cast<size_t>(q * 2 + half)] = pair(q, 2 * half, 2 * half + 1);
  const auto couple_safe = [&](int64_t a, int64_t b) {
    const auto *x = &halves[static_cast<size_t>(a * 2)], *y = &halves[static_cast<size_t>(b * 2)];
    return (x[0] + y[0]).safe() && (x[1] + y[1]).safe();
  };
  for (int64_t first = 0; first < quads; ++first) {
    const auto f = static_cast<size_t>(first);
    if (placed[f] || !halves[f * 2].safe() || !halves[f * 2 + 1].safe()) continue;
    for (int64_t second = first + 1; second < min64(quads, first + kReach) && !placed[f]; ++second) {
      if (placed[static_cast<size_t>(second)] || !couple_safe(first, second)) continue;
      place(first, kAsTheyLie), place(second, kAsTheyLie);
      ++result.order[0];
    }
  }
  for (size_t pairing = 0; pairing < kPairings; ++pairing)
    for (int64_t q = 0; q < quads; ++q) {
      if (placed[static_cast<size_t>(q)]) continue;
      const int four[4] = {kPairing[pairing][0], kPairing[pairing][1], kPairing[pairing][2], kPairing[pairing][3]};
      if (pair(q, four[0], four[1]).safe() && pair(q, four[2], four[3]).safe()) place(q, four), ++result.order[1 + pairing];
    }
  for (int64_t q = 0; q < quads; ++q)
    if (!placed[static_cast<size_t>(q)]) place(q, kAsTheyLie);
  return result;
}

// The same with the places of every window arranged.
template <int VECTORS>
Places<VECTORS> regrouped(const Places<VECTORS>& was, const Run& run, int64_t channels, const Regroup& to) {
  Places<VECTORS> grouped = was;
  for (int64_t first = 0; first < run.bytes; first += 16) {
    const int places = static_cast<int>(min64(16, run.quads * 4 - first));
    // The last window is read so that it ends with the run.
    const int64_t shift = max64(0, first + 16 - run.bytes);
    const Arrangement order = Window<VECTORS>(was.data() + first, places).arrange();
    for (int k = 0; k < places; ++k) {
      const ChannelSums<VECTORS>& place = was[static_cast<size_t>(first + order.from[k])];
      to.from[first + k] = static_cast<uint8_t>(min64(order.from[k] + shift, 15));
      to.flip[first + k] = order.flip[k] ? 255 : 0;
      grouped[static_cast<size_t>(first + k)] = order.flip[k] ? place.flipped() : place;
      if (!order.flip[k]) continue;
      alignas(16) int8_t weights[16 * VECTORS];
      for (int i = 0; i < VECTORS; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(weights) + i, place.weights(i));
      for (int64_t c = 0; c < channels; ++c) to.more[c] += 255 * weights[c];
    }
  }
  return grouped;
}

template <int VECTORS>
bool order_runs(int8_t* w, const Run* runs, int32_t n_runs, int64_t quad_bytes, int32_t* order, const Regroup* to) {
  std::vector<Places<VECTORS>> was;
  std::vector<Ordered> as_it_is, arranged;
  const auto copying = [](const Run& run) { return 5 * int64_t{run.quads} / 2 + 32; };
  int64_t cost = 0, other_cost = 0, least = 0;
  const int8_t* at = w;
  for (int32_t i = 0; i < n_runs; at += runs[i++].quads * quad_bytes) {
    was.push_back(places_of<VECTORS>(at, runs[i].quads, quad_bytes));
    as_it_is.push_back(ordered<VECTORS>(was.back(), quad_bytes));
    cost += as_it_is.back().cost(), least += Ordered::least_cost(runs[i].quads) + copying(runs[i]);
  }
  const bool promising = to && least < cost;  // weights that have a normal spread are safe as they lie
  if (promising) {
    std::fill(to->more, to->more + quad_bytes / 4, 0);
    for (int32_t i = 0; i < n_runs; ++i) {
      const int64_t first = i * regrouped_bytes(runs[i]);
      const Regroup here{to->from + first, to->flip + first, to->more};
      const auto& run = was[static_cast<size_t>(i)];
      arranged.push_back(ordered<VECTORS>(regrouped<VECTORS>(run, runs[i], quad_bytes / 4, here), quad_bytes));
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

}  // namespace

bool order_block(int8_t* w, const Run* runs, int32_t n_runs, int64_t quad_bytes, int32_t* order, const Regroup* to) {
  return quad_bytes <= 64 ? order_runs<1>(w, runs, n_runs, quad_bytes, order, to)
                          : order_runs<2>(w, runs, n_runs, quad_bytes, order, to);
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
      safe = pairs_safe(quad);
    }
    if (!safe) return false;
  }
  memcpy(w, ordered.data(), ordered.size());
  memcpy(places, from.data(), from.size());
  return true;
}

}  // namespace xq

XQ_TARGET_END

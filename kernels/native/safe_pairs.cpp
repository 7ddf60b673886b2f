// Where weights must lie for their products to be summed in 16 bits without saturating; see safe_pairs.h.
//
// vpmaddubsw adds two products in a lane of 16 bits. 255 * 128 fits there, 255 * 129 does not: so a lane is safe
// if its positive weights add up to at most 128, and its negative ones to at least -128.
#include "safe_pairs.h"

#include <algorithm>
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

// The bytes of 16 places of K, and which of them are safe together for all channels of a block.
class Window {
 public:
  Window(const int8_t* w, int64_t quad_bytes) {
    Sums single[16];
    for (int i = 0; i < 16; ++i)
      for (int64_t c = 0; c < quad_bytes / 4; ++c) {
        const int16_t weight = w[i / 4 * quad_bytes + c * 4 + i % 4];
        single[i].up[c] = std::max<int16_t>(weight, 0), single[i].down[c] = std::max<int16_t>(-weight, 0);
      }
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < i; ++j) {
        Sums& sums = pair(i, j);
        int16_t worst = 0;
        for (int c = 0; c < 32; ++c) {
          sums.up[c] = static_cast<int16_t>(single[i].up[c] + single[j].up[c]);
          sums.down[c] = static_cast<int16_t>(single[i].down[c] + single[j].down[c]);
          worst = std::max(worst, std::max(sums.up[c], sums.down[c]));
        }
        if (worst <= 128) partners_[i] |= 1u << j, partners_[j] |= 1u << i;
      }
  }

  // An order of the places in which as many as are found are safe with their neighbours: two fours at a time,
  // which make a couple of quads, then pairs.
  void arrange(uint8_t order[16]) const {
    const std::vector<uint32_t> fours = safe_fours();
    std::vector<uint32_t> best, chosen;
    int most = -1, budget = 16;
    for (size_t i = 0; i < fours.size() && most < 16 && budget; ++i)
      for (size_t j = i + 1; j < fours.size() && most < 16 && budget; ++j) {
        if (fours[i] & fours[j]) continue;
        --budget;
        chosen = {fours[i], fours[j]};
        const uint32_t left = 0xffff & ~(fours[i] | fours[j]);
        for (const uint32_t four : fours)
          if ((four & left) == four && std::binary_search(fours.begin(), fours.end(), left & ~four)) {
            chosen.push_back(four), chosen.push_back(left & ~four);
            break;
          }
        // 8 places of couples are worth more than 8 of pairs.
        const int worth = chosen.size() == 4 ? 16 : paired(left);
        if (worth > most) most = worth, best = chosen;
      }
    uint32_t left = 0xffff;
    for (size_t i = 0; i + 1 < best.size(); i += 2) {
      uint32_t a = best[i], b = best[i + 1];
      left &= ~(a | b);
      for (int half = 0; half < 2; ++half)
        for (uint32_t* four : {&a, &b})
          for (int k = 0; k < 2; ++k) *order++ = lowest(four);
    }
    int mate[16];
    match(left, mate);
    for (const bool wanted : {true, false})
      for (int i = 0; i < 16; ++i) {
        if (!(left >> i & 1) || (mate[i] != kNone) != wanted || mate[i] > i) continue;
        *order++ = static_cast<uint8_t>(i);
        if (wanted) *order++ = static_cast<uint8_t>(mate[i]);
      }
  }

 private:
  static constexpr int kNone = -1;
  struct Sums {
    int16_t up[32] = {}, down[32] = {};  // of positive weights, and of negative ones
  };

  Sums& pair(int i, int j) { return pairs_[i * (i - 1) / 2 + j]; }
  const Sums& pair(int i, int j) const { return pairs_[i * (i - 1) / 2 + j]; }

  static bool safe(const Sums& a, const Sums& b) {
    int16_t worst = 0;
    for (int c = 0; c < 32; ++c) {
      worst = std::max<int16_t>(worst, static_cast<int16_t>(a.up[c] + b.up[c]));
      worst = std::max<int16_t>(worst, static_cast<int16_t>(a.down[c] + b.down[c]));
    }
    return worst <= 128;
  }

  static uint8_t lowest(uint32_t* places) {
    const int i = __builtin_ctz(*places);
    *places &= *places - 1;
    return static_cast<uint8_t>(i);
  }

  // In ascending order.
  std::vector<uint32_t> safe_fours() const {
    std::vector<uint32_t> found;
    for (int d = 3; d < 16; ++d)
      for (int c = 2; c < d; ++c) {
        if (!(partners_[d] >> c & 1)) continue;
        const uint32_t with = partners_[c] & partners_[d];
        for (int b = 1; b < c; ++b)
          for (int a = 0; a < b; ++a)
            if (with >> a & 1 && with >> b & 1 && safe(pair(d, c), pair(b, a)))
              found.push_back(1u << a | 1u << b | 1u << c | 1u << d);
      }
    std::sort(found.begin(), found.end());
    return found;
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

  uint32_t partners_[16] = {};
  Sums pairs_[120];
};

// A run's weights and their part of Packed::order.
struct Ordered {
  std::vector<int8_t> weights;
  std::vector<int32_t> order;
  // Instructions, with two vectors of channels and four rows.
  int64_t cost() const {
    const int64_t quads = static_cast<int64_t>(order.size()) - kClasses, coupled = 2 * order[0], plain = order[1];
    int64_t paired = 0;
    for (size_t pairing = 1; pairing < kPairings; ++pairing) paired += order[1 + pairing];
    return 20 * coupled + 24 * plain + 28 * paired + 46 * (quads - coupled - plain - paired);
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

// The same with the bytes of every whole window arranged.
std::vector<int8_t> regrouped(const std::vector<int8_t>& was, int64_t windows, int64_t quad_bytes, uint8_t* from) {
  std::vector<int8_t> grouped = was;
  for (int64_t i = 0; i < windows; ++i, from += 16) {
    const int8_t* old = was.data() + 4 * i * quad_bytes;
    int8_t* now = grouped.data() + 4 * i * quad_bytes;
    Window(old, quad_bytes).arrange(from);
    for (int64_t k = 0; k < 16; ++k)
      for (int64_t c = 0; c < quad_bytes; c += 4)
        now[k / 4 * quad_bytes + c + k % 4] = old[from[k] / 4 * quad_bytes + c + from[k] % 4];
  }
  return grouped;
}

}  // namespace

bool order_run(int8_t* w, const Run& run, int64_t quad_bytes, int32_t* order, uint8_t* from) {
  const std::vector<int8_t> was(w, w + run.quads * quad_bytes);
  Ordered best = ordered(was, run.quads, quad_bytes);
  bool regroup = false;
  if (from) {
    const int64_t copying = 2 * run.quads + 32;
    Ordered other = ordered(regrouped(was, run.bytes / 16, quad_bytes, from), run.quads, quad_bytes);
    regroup = other.cost() + copying < best.cost();
    if (regroup) best = std::move(other);
  }
  memcpy(w, best.weights.data(), best.weights.size());
  memcpy(order, best.order.data(), best.order.size() * sizeof(int32_t));
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

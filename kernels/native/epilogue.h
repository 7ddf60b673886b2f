// From int32 sums to output bytes: multiply, bias, residual, slopes, zero point, clamp, table.
#pragma once

#include "internal.h"
#include "unroll.h"

namespace {

template <class V>
struct Epilogue {
  using I = typename V::I;
  using F = typename V::F;
  static constexpr bool kBytes = true;

  I zp16, lo, hi, res_zp;
  F res_mult, limit, res_offset;
  const uint8_t* lut;
  int64_t to_slopes;  // from a channel's bias to its slope, in floats; 0 where there are none
  bool clamp_float, clamp_hi, from_zero;

  explicit Epilogue(const xq::Packed& p)
      : zp16(V::set16(p.out_zp)), lo(V::set8(p.lo)), hi(V::set8(p.hi)), res_zp(V::set32(p.res_zp)),
        res_mult(V::setf(p.res_mult)), limit(V::setf(static_cast<float>(p.hi - p.out_zp))),
        res_offset(V::setf(static_cast<float>(V::kByteFloats + p.res_zp))),
        lut(p.has_lut ? p.at<uint8_t>(p.lut) : nullptr),
        to_slopes(p.has_slopes ? (p.slopes - p.bias) / int64_t{sizeof(float)} : 0), clamp_float(p.clamp_float != 0),
        clamp_hi(p.hi < 255), from_zero(p.out_zp == 0 && p.lo == 0) {}

  // Without table and slopes: most layers.
  bool plain() const { return !lut && !clamp_float && !to_slopes; }

  // What belongs to the channels of some vectors.
  template <int VECS>
  struct Channels {
    F mult[VECS], bias[VECS], slope[VECS];
  };

  template <int VECS>
  XQ_INLINE inline Channels<VECS> channels(const float* mult, const float* bias) const {
    Channels<VECS> found;
    unroll<VECS>([&](int i) XQ_INLINE {
      found.mult[i] = V::loadf(mult + i * V::kLanes), found.bias[i] = V::loadf(bias + i * V::kLanes);
      found.slope[i] = V::loadf(bias + to_slopes + i * V::kLanes);
    });
    return found;
  }

  static F sloped(F v, F slope) { return V::fma(V::min(v, V::setf(0)), slope, V::max(v, V::setf(0))); }

  // What `apply` does where no float must be clamped, in as few instructions as it takes: with VNNI they wait for the
  // same ports as products. ZERO promises from_zero, TABLE and SLOPES say whether there are such.
  template <int VECS, bool RES, bool ZERO, bool TABLE = false, bool SLOPES = false>
  XQ_INLINE inline void apply_plain(I sums[4], const Channels<VECS>& c, uint8_t* out, int64_t stride,
                                    const uint8_t* res, int64_t res_stride, int pixels, int count) const {
    F r[4];
    if constexpr (RES) V::template bytes_to_floats<VECS>(res, res_stride, pixels, count, res_offset, r);
    unroll<4>([&](int i) XQ_INLINE {
      F v = V::fma(V::to_float(sums[i]), c.mult[i % VECS], c.bias[i % VECS]);
      if constexpr (RES) v = V::fma(r[i], res_mult, v);
      if constexpr (SLOPES) v = sloped(v, c.slope[i % VECS]);
      sums[i] = V::to_int(v);
    });
    I bytes = ZERO ? V::narrow_from_zero(sums) : V::max8(V::narrow(sums, zp16), lo);
    if (clamp_hi) bytes = V::min8(bytes, hi);
    if constexpr (TABLE) bytes = V::look_up(lut, bytes);
    V::template store_pixels<VECS>(out, stride, V::template pixels_apart<VECS>(bytes), pixels, count);
  }

  // sums: 4 vectors, of 4 / VECS pixels.
  template <int VECS>
  XQ_INLINE void apply(I sums[4], const Channels<VECS>& c, uint8_t* out, int64_t stride, const uint8_t* res,
                       int64_t res_stride, int pixels, int count) const {
    I r[4];
    if (res) V::widen(V::template pixels_woven<VECS>(V::template load_pixels<VECS>(res, res_stride, pixels, count)), r);
    for (int i = 0; i < 4; ++i) {
      F v = V::fma(V::to_float(sums[i]), c.mult[i % VECS], c.bias[i % VECS]);
      if (res) v = V::fma(V::to_float(V::sub32(r[i], res_zp)), res_mult, v);
      if (to_slopes) v = sloped(v, c.slope[i % VECS]);
      if (clamp_float) v = V::min(limit, v);  // in this order NaN stays NaN: the lower bound
      sums[i] = V::to_int(v);
    }
    I bytes = V::max8(V::narrow(sums, zp16), lo);
    if (clamp_hi) bytes = V::min8(bytes, hi);
    if (lut) bytes = V::look_up(lut, bytes);
    V::template store_pixels<VECS>(out, stride, V::template pixels_apart<VECS>(bytes), pixels, count);
  }

  // Adjacent output pixels: where their sums lie, `lds` elements apart, and where they go.
  struct Pixels {
    const int32_t* sums;
    int64_t lds;
    const float *mult, *bias;
    uint8_t* out;
    int64_t stride;
    const uint8_t* res;
    int64_t res_stride;
    int count;
  };

  enum Way { kGeneral, kSums, kResidual, kSlopes };

  template <int VECS, Way WAY, bool ZERO, bool TABLE>
  static void rows_of(const Epilogue& all, const Pixels& pixels, int64_t rows) {
    // Copies, of which only what is used is made, and scalars in local vectors: a store of bytes could otherwise
    // change them.
    const Epilogue e = all;
    Pixels p = pixels;
    const Channels<VECS> c = e.template channels<VECS>(p.mult, p.bias);
    constexpr int kPixels = 4 / VECS;
    const auto put = [&](int here) XQ_INLINE {
      I v[4];
      unroll<4>([&](int k) XQ_INLINE {
        v[k] = V::load(p.sums + (k / VECS < here ? k / VECS : 0) * p.lds + k % VECS * V::kLanes);
      });
      e.template apply_by<VECS, WAY, ZERO, TABLE>(v, c, p.out, p.stride, p.res, p.res_stride, here, p.count);
    };
    for (; rows >= kPixels; rows -= kPixels) {
      put(kPixels);
      p.sums += kPixels * p.lds, p.out += kPixels * p.stride;
      if (WAY == kResidual || (WAY == kGeneral && p.res)) p.res += kPixels * p.res_stride;
    }
    if (rows > 0) put(static_cast<int>(rows));
  }

  // `f` for the way that serves, whether the output begins at 0, and whether there is a table.
  template <class F>
  auto by_way(bool residual, F f) const {
    if (clamp_float || (to_slopes && (lut || residual))) return f.template operator()<kGeneral, false, false>();
    if (to_slopes) return f.template operator()<kSlopes, false, false>();
    if (lut && residual) return f.template operator()<kResidual, false, true>();
    if (lut) return f.template operator()<kSums, false, true>();
    if (residual && from_zero) return f.template operator()<kResidual, true, false>();
    if (residual) return f.template operator()<kResidual, false, false>();
    if (from_zero) return f.template operator()<kSums, true, false>();
    return f.template operator()<kSums, false, false>();
  }

  // Sums to bytes by a way.
  template <int VECS, Way WAY, bool ZERO, bool TABLE>
  XQ_INLINE inline void apply_by(I sums[4], const Channels<VECS>& c, uint8_t* out, int64_t stride, const uint8_t* res,
                                 int64_t res_stride, int pixels, int count) const {
    if constexpr (WAY == kGeneral) apply<VECS>(sums, c, out, stride, res, res_stride, pixels, count);
    else
      apply_plain<VECS, WAY == kResidual, ZERO, TABLE, WAY == kSlopes>(sums, c, out, stride, res, res_stride, pixels, count);
  }

  // What makes `rows` pixels of sums bytes.
  using PutRows = void (*)(const Epilogue& all, const Pixels& pixels, int64_t rows);

  template <int VECS>
  PutRows put_rows_way(bool residual) const {
    return by_way(residual, []<Way WAY, bool ZERO, bool TABLE>() -> PutRows { return rows_of<VECS, WAY, ZERO, TABLE>; });
  }

  // `rows` adjacent output pixels whose sums lie `lds` elements apart.
  template <int VECS>
  void rows(const int32_t* sums, int64_t lds, int64_t rows, const float* mult, const float* bias,
            uint8_t* out, int64_t stride, const uint8_t* res, int64_t res_stride, int count) const {
    put_rows_way<VECS>(res)(*this, {sums, lds, mult, bias, out, stride, res, res_stride, count}, rows);
  }
};

// The same for ROWS rows whose sums are still in registers, if they are adjacent pixels; else false. What small
// products cost is mostly this.
template <int ROWS, int VECS, class V>
XQ_INLINE inline bool put_vectors(const Epilogue<V>& all, const xq::DenseTask& t, const xq::Block& b, int64_t segment,
                                  int64_t begin, const typename V::I acc[ROWS * VECS]) {
  using I = typename V::I;
  const int64_t y = begin < t.row_len ? 0 : begin / t.row_len, x = begin - y * t.row_len;
  if (x + ROWS > t.row_valid) return false;
  const xq::Packed& p = *t.packed;
  const auto c = all.template channels<VECS>(p.at<float>(p.mult) + b.s_off, p.at<float>(p.bias) + b.s_off);
  uint8_t* out = t.out + segment * t.out_segment + b.out_c + y * t.out_row + x * t.out_pixel;
  const uint8_t* res = t.res ? t.res + segment * t.res_segment + b.out_c + y * t.res_row + x * t.res_pixel : nullptr;
  const auto put = [&](auto apply) XQ_INLINE {
    const Epilogue<V> e = all;
    constexpr int kPixels = 4 / VECS;
    unroll<(ROWS + kPixels - 1) / kPixels>([&](int i) XQ_INLINE {
      I v[4];
      unroll<4>([&](int k) XQ_INLINE { v[k] = acc[xq::min64(4 * i + k, ROWS * VECS - VECS + k % VECS)]; });
      const int pixels = ROWS - kPixels * i < kPixels ? ROWS - kPixels * i : kPixels;
      const uint8_t* more = res ? res + kPixels * i * t.res_pixel : nullptr;
      apply(e, v, out + kPixels * i * t.out_pixel, more, pixels);
    });
  };
  const auto put_plain = [&]<bool RES, bool ZERO, bool SLOPES = false>() XQ_INLINE {
    put([&](const Epilogue<V>& e, I v[4], uint8_t* to, const uint8_t* more, int pixels) XQ_INLINE {
      e.template apply_plain<VECS, RES, ZERO, false, SLOPES>(v, c, to, t.out_pixel, more, t.res_pixel, pixels, b.count);
    });
  };
  if (all.to_slopes && !all.lut && !all.clamp_float && !res) {
    put_plain.template operator()<false, false, true>();
  } else if (!all.plain()) {
    put([&](const Epilogue<V>& e, I v[4], uint8_t* to, const uint8_t* more, int pixels) XQ_INLINE {
      e.template apply<VECS>(v, c, to, t.out_pixel, more, t.res_pixel, pixels, b.count);
    });
  } else if (res) {
    if (all.from_zero) put_plain.template operator()<true, true>();
    else put_plain.template operator()<true, false>();
  } else {
    if (all.from_zero) put_plain.template operator()<false, true>();
    else put_plain.template operator()<false, false>();
  }
  return true;
}

// Rows [begin, begin + count) of a task's segment, whose sums lie in a tile: the valid ones go out.
template <class V, int VECS>
void put_rows(const Epilogue<V>& e, const xq::DenseTask& t, const xq::Block& b, int64_t segment,
              int64_t begin, int64_t count, const int32_t* sums, int64_t lds) {
  const xq::Packed& p = *t.packed;
  const float *mult = p.at<float>(p.mult) + b.s_off, *bias = p.at<float>(p.bias) + b.s_off;
  uint8_t* out = t.out + segment * t.out_segment + b.out_c;
  const uint8_t* res = t.res ? t.res + segment * t.res_segment + b.out_c : nullptr;
  // The division is worth avoiding: flat tensors are one long row.
  int64_t y = begin < t.row_len ? 0 : begin / t.row_len, x = begin - y * t.row_len;
  for (int64_t m = 0; m < count;) {
    const int64_t here = xq::min64(t.row_valid - x, count - m);
    if (here > 0)
      e.template rows<VECS>(sums + m * lds, lds, here, mult, bias, out + y * t.out_row + x * t.out_pixel,
                            t.out_pixel, res ? res + y * t.res_row + x * t.res_pixel : nullptr,
                            t.res_pixel, b.count);
    m += t.row_len - x, x = 0, ++y;
  }
}

// Rows of a segment that become output together.
template <class Out>
struct Tile {
  const Out& epilogue;
  const xq::DenseTask& task;
  const xq::Block& block;
  int64_t segment, first, rows;
  int64_t passed = 0;  // rows of sums before the first one that is wanted
};

// Bytes of adjacent pixels come one behind another, which the CPU sees.
template <class V, int VECS>
XQ_INLINE inline void ask_for_rows(const Epilogue<V>&, const xq::DenseTask&, const xq::Block&, int64_t, int64_t) {}

// Sums of a tile in registers, of which there may be more than it has rows.
template <class V, int ROWS, int VECS, class Out>
XQ_INLINE inline void put_tile(const Tile<Out>& tile, const typename V::I acc[ROWS * VECS]) {
  if (ROWS == tile.rows && !tile.passed &&
      put_vectors<ROWS, VECS>(tile.epilogue, tile.task, tile.block, tile.segment, tile.first, acc))
    return;
  alignas(64) int32_t sums[ROWS * VECS * V::kLanes];
  unroll<ROWS * VECS>([&](int i) XQ_INLINE { V::store(sums + i * V::kLanes, acc[i]); });
  put_rows<V, VECS>(tile.epilogue, tile.task, tile.block, tile.segment, tile.first, tile.rows,
                    sums + tile.passed * VECS * V::kLanes, VECS * V::kLanes);
}

// Sums of two rows of an image, one after the other.
template <class V, int ROWS, int VECS, class Out>
XQ_INLINE inline void put_halves(const Tile<Out>& tile, const typename V::I acc[ROWS * VECS]) {
  unroll<2>([&](int half) XQ_INLINE {
    put_vectors<ROWS / 2, VECS>(tile.epilogue, tile.task, tile.block, tile.segment,
                                tile.first + half * tile.task.row_len, acc + half * ROWS / 2 * VECS);
  });
}

}  // namespace

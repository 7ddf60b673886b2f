// Plain loops for every op: the definition the vectorised files are tested against, and the
// fallback for what they leave out.
#include <algorithm>
#include <cmath>

#include "moments.h"
#include "resample.h"

namespace xq {
namespace {

struct Index {
  int64_t n, d, h;
};

Index row_index(const xq_tensor& t, int64_t row) {
  return {row / (t.d * t.h), row / t.h % t.d, row % t.h};
}

uint8_t* pixel(const xq_tensor& t, int64_t n, int64_t d, int64_t h, int64_t w) {
  return t.data + n * t.stride_n + d * t.stride_d + h * t.stride_h + w * t.stride_w;
}

uint8_t quantize(float v, int32_t zp, int32_t lo, int32_t hi) {
  // Clamped as a float first: a value beyond int32 must not wrap. NaN becomes the lower bound.
  const float limit = static_cast<float>(hi - zp);
  const float rounded = std::nearbyint(std::max(-1024.0f, std::min(v, limit)));
  return static_cast<uint8_t>(std::clamp(static_cast<int32_t>(rounded) + zp, lo, hi));
}

// The input coordinate of one axis, or -1 in the padding.
int64_t source(const Geometry& g, int axis, int64_t out, int64_t tap, int64_t size) {
  const int64_t at = out * g.stride[axis] + tap * g.dilation[axis] - g.pad[axis];
  return at < 0 || at % g.up[axis] || at / g.up[axis] >= size ? -1 : at / g.up[axis];
}

int32_t conv_sum(const xq_conv_call& call, const Packed& p, const Index& at, int64_t w, int64_t oc) {
  const Geometry& g = p.geo;
  const xq_conv& c = p.conv;
  const int64_t in = c.in_channels / c.groups, first = oc / (c.out_channels / c.groups) * in;
  const int8_t* weight = p.at<int8_t>(p.weights);
  const int64_t taps = g.kernel[0] * g.kernel[1] * g.kernel[2];
  uint32_t sum = 0;
  for (int64_t z = 0; z < g.kernel[0]; ++z)
    for (int64_t y = 0; y < g.kernel[1]; ++y)
      for (int64_t x = 0; x < g.kernel[2]; ++x) {
        const int64_t d = source(g, 0, at.d, z, call.in.d), h = source(g, 1, at.h, y, call.in.h),
                      v = source(g, 2, w, x, call.in.w);
        if (d < 0 || h < 0 || v < 0) continue;
        const uint8_t* a = pixel(call.in, at.n, d, h, v) + first;
        const int64_t tap = (z * g.kernel[1] + y) * g.kernel[2] + x;
        const int64_t stored = c.transposed ? taps - 1 - tap : tap;
        for (int64_t i = 0; i < in; ++i)
          sum += static_cast<uint32_t>((a[i] - p.in_zp) * weight[(oc * in + i) * taps + stored]);
      }
  return static_cast<int32_t>(sum);
}

}  // namespace

void conv_reference(const xq_conv_call& call, int64_t begin, int64_t end) {
  const auto& p = *static_cast<const Packed*>(call.packed);
  const float *mult = p.at<float>(p.mult), *bias = p.at<float>(p.bias);
  const float* slopes = p.has_slopes ? p.at<float>(p.slopes) : nullptr;
  const uint8_t* lut = p.at<uint8_t>(p.lut);
  for (int64_t row = begin; row < end; ++row) {
    const Index at = row_index(call.out, row);
    for (int64_t w = 0; w < call.out.w; ++w) {
      uint8_t* out = pixel(call.out, at.n, at.d, at.h, w);
      const uint8_t* res = p.residual ? pixel(call.residual, at.n, at.d, at.h, w) : nullptr;
      for (int64_t oc = 0; oc < call.out.c; ++oc) {
        float v = std::fma(static_cast<float>(conv_sum(call, p, at, w, oc)), mult[oc], bias[oc]);
        if (res) v = std::fma(static_cast<float>(res[oc] - p.res_zp), p.res_mult, v);
        if (slopes && v < 0) v *= slopes[oc];
        const uint8_t q = quantize(v, p.out_zp, p.lo, p.hi);
        out[oc] = p.has_lut ? lut[q] : q;
      }
    }
  }
}

namespace {

uint8_t max_pool(const xq_op& op, const Index& at, int64_t w, int64_t c) {
  int best = 0;
  for (int64_t z = 0; z < op.kernel[0]; ++z)
    for (int64_t y = 0; y < op.kernel[1]; ++y)
      for (int64_t x = 0; x < op.kernel[2]; ++x) {
        const int64_t d = tap_at(op, 0, at.d, z), h = tap_at(op, 1, at.h, y), v = tap_at(op, 2, w, x);
        if (d < 0 || h < 0 || v < 0 || d >= op.a.d || h >= op.a.h || v >= op.a.w) continue;
        best = std::max<int>(best, pixel(op.a, at.n, d, h, v)[c]);
      }
  return static_cast<uint8_t>(best);
}

int64_t box_sum(const xq_op& op, int64_t n, const Range win[3], int64_t c) {
  int64_t sum = 0;
  for (int64_t d = win[0].begin; d < win[0].end; ++d)
    for (int64_t h = win[1].begin; h < win[1].end; ++h)
      for (int64_t v = win[2].begin; v < win[2].end; ++v) sum += pixel(op.a, n, d, h, v)[c] - op.a_zp;
  return sum;
}

uint8_t finish(const xq_op& op, float v) {
  const uint8_t code = quantize(v, op.out_zp, op.lo, op.hi);
  return op.lut ? op.lut[code] : code;
}

uint8_t average(const xq_op& op, const Index& at, int64_t w, int64_t c) {
  const PoolBox box = pool_box(op, at.d, at.h, w);
  const float sum = static_cast<float>(box_sum(op, at.n, box.axis, c));
  return finish(op, sum * box.mult);
}

uint8_t bilinear(const xq_op& op, const Index& at, int64_t w, int64_t c) {
  const Mix y = mix_of(op, 1, at.h, op.a.h), x = mix_of(op, 2, w, op.a.w);
  auto value = [&](int64_t h, int64_t v) {
    return static_cast<float>(pixel(op.a, at.n, at.d, h, v)[c] - op.a_zp);
  };
  auto mix = [](float p, float a, float b) { return std::fma(p, b, (1 - p) * a); };
  const float top = mix(x.part, value(y.low, x.low), value(y.low, x.high));
  const float bottom = mix(x.part, value(y.high, x.low), value(y.high, x.high));
  return finish(op, mix(y.part, top, bottom) * op.a_mult);
}

uint8_t one_value(const xq_op& op, const Index& at, int64_t w, int64_t c) {
  switch (op.kind) {
    case XQ_OP_MAX_POOL: return max_pool(op, at, w, c);
    case XQ_OP_AVG_POOL:
    case XQ_OP_ADAPTIVE_POOL: return average(op, at, w, c);
    case XQ_OP_BILINEAR: return bilinear(op, at, w, c);
    case XQ_OP_NEAREST:
      return pixel(op.a, at.n, nearest_source(op.scale[0], at.d, op.a.d),
                   nearest_source(op.scale[1], at.h, op.a.h),
                   nearest_source(op.scale[2], w, op.a.w))[c];
    case XQ_OP_SHUFFLE:
      return pixel(op.a, at.n, at.d, at.h, w)[c % op.groups * (op.a.c / op.groups) + c / op.groups];
    default: break;
  }
  const uint8_t a = pixel(op.a, at.n, at.d, at.h, w)[c];
  if (op.kind == XQ_OP_COPY) return a;
  if (op.kind == XQ_OP_LUT) return op.lut[a];
  const float x = static_cast<float>(a - op.a_zp);
  if (op.kind == XQ_OP_AFFINE) return finish(op, std::fma(x, op.scale_c[c], op.shift_c[c]));
  if (op.kind == XQ_OP_REQUANT) return finish(op, x * op.a_mult);
  const uint8_t b = b_is_wide(op) ? pixel(op.b, at.n, at.d, at.h, w)[c] : pixel(op.b, at.n, 0, 0, 0)[c];
  const float y = static_cast<float>(b - op.b_zp);
  const float v = op.kind == XQ_OP_ADD ? std::fma(x, op.a_mult, y * op.b_mult) : x * y * op.a_mult;
  return finish(op, v);
}

void layer_norm(const xq_op& op, const uint8_t* a, uint8_t* out) {
  int64_t sum = 0, squares = 0;
  for (int64_t c = 0; c < op.a.c; ++c) sum += a[c], squares += a[c] * a[c];
  const Norm norm = norm_of(sum, squares, op.a.c, op.eps);
  for (int64_t c = 0; c < op.a.c; ++c) {
    const float v = std::fma(static_cast<float>(a[c]), norm.mult, norm.shift);
    const float scale = op.scale_c ? op.scale_c[c] : op.a_mult, shift = op.shift_c ? op.shift_c[c] : 0.0f;
    out[c] = finish(op, std::fma(v, scale, shift));
  }
}

void one_pixel(const xq_op& op, const Index& at, int64_t w) {
  uint8_t* out = pixel(op.out, at.n, at.d, at.h, w);
  if (op.kind == XQ_OP_LAYER_NORM) return layer_norm(op, pixel(op.a, at.n, at.d, at.h, w), out);
  for (int64_t c = 0; c < op.out.c; ++c) {
    if (op.kind == XQ_OP_QUANTIZE) {
      float v;
      memcpy(&v, pixel(op.a, at.n, at.d, at.h, w) + c * op.a_stride_c, sizeof v);
      out[c] = finish(op, v * op.a_mult);
    } else if (op.kind == XQ_OP_DEQUANTIZE || op.kind == XQ_OP_LUT_REAL) {
      const uint8_t a = pixel(op.a, at.n, at.d, at.h, w)[c];
      const float v = op.kind == XQ_OP_LUT_REAL ? op.reals[a] : static_cast<float>(a - op.a_zp) * op.a_mult;
      memcpy(out + c * op.out_stride_c, &v, sizeof v);
    } else {
      out[c] = one_value(op, at, w, c);
    }
  }
}

}  // namespace

void op_reference(const xq_op& op, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const Index at = row_index(op.out, row);
    for (int64_t w = 0; w < op.out.w; ++w) one_pixel(op, at, w);
  }
}

}  // namespace xq

// Random convolutions, linears and ops, each on heap blocks of exactly its size, compared with the plain
// loops. Meant for AddressSanitizer and UBSan: see sanitize.py.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../../kernels/native/channel_sums.h"
#include "../../../kernels/native/native.h"
#include "../../../kernels/native/native_rows.h"
#include "floats.h"
#include "groups.h"

namespace {

using Bytes = std::vector<uint8_t>;

struct Aligned {
  explicit Aligned(size_t size) : data(std::aligned_alloc(64, (size + 63) / 64 * 64)) {}
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  void* data;
};

struct Random {
  std::mt19937 engine;
  int upto(int most) { return std::uniform_int_distribution<int>(1, most)(engine); }
  int byte() { return std::uniform_int_distribution<int>(0, 255)(engine); }
  bool one_in(int n) { return upto(n) == 1; }
  Bytes bytes(size_t size) {
    Bytes b(size);
    for (uint8_t& x : b) x = static_cast<uint8_t>(byte());
    return b;
  }
};

xq_tensor view(Bytes& b, int64_t n, int64_t d, int64_t h, int64_t w, int64_t c) {
  return {b.data(), n, d, h, w, c, d * h * w * c, h * w * c, w * c, c};
}

size_t size_of(const xq_tensor& t) { return static_cast<size_t>(t.n * t.d * t.h * t.w * t.c); }

xq_conv random_conv(Random& r) {
  xq_conv c{};
  const int each = r.one_in(3) ? 4 * r.upto(2) : r.upto(20);
  c.groups = r.one_in(2) ? 1 : r.upto(20);
  const bool depthwise = r.one_in(4);
  if (depthwise) {
    c.groups = c.in_channels = c.out_channels = r.upto(150);
  } else {
    c.in_channels = c.groups * each;
    c.out_channels = c.groups * (r.one_in(2) ? each : r.upto(80));
  }
  for (int i = 0; i < 3; ++i) {
    const bool deep = i > 0 || r.one_in(depthwise ? 2 : 6);
    c.kernel[i] = deep ? r.upto(4) : 1;
    c.stride[i] = deep ? r.upto(3) : 1;
    c.dilation[i] = deep ? r.upto(2) : 1;
    c.padding[i] = r.upto(c.kernel[i]) - 1;
  }
  if (depthwise && r.one_in(3)) {  // what is not woven into strips without VNNI
    c.kernel[0] = 1, c.padding[0] = 0;
    for (int i = 1; i < 3; ++i) c.kernel[i] = 3, c.padding[i] = r.upto(3) - 1;
  }
  c.transposed = r.one_in(4);
  if (c.transposed && r.one_in(2))  // axes along which only the output padding makes a difference
    for (int i = 0; i < 3; ++i) c.kernel[i] = 1, c.padding[i] = 0, c.stride[i] = r.one_in(2) ? 1 : c.stride[i];
  if (!c.transposed && r.one_in(8)) {  // taps, or pixels, far apart
    const int i = r.upto(2);
    c.stride[i] = r.upto(500);
    if (r.one_in(2)) c.dilation[i] = r.upto(200), c.padding[i] = c.dilation[i] * (c.kernel[i] - 1);
  }
  if (!c.transposed && !depthwise && r.one_in(5)) {  // taps that miss the input for many outputs
    c.groups = r.one_in(3) ? c.groups : 1;
    c.in_channels = c.groups * r.upto(40), c.out_channels = c.groups * r.upto(40);
    for (int i = 1; i < 3; ++i) c.dilation[i] = r.upto(20), c.padding[i] = c.dilation[i] * (c.kernel[i] - 1) / r.upto(2);
  }
  if (r.one_in(5)) {  // of Winograd's kind
    c.groups = r.one_in(2) ? 1 : r.upto(4), c.transposed = 0;
    c.in_channels = c.groups * 16 * r.upto(5), c.out_channels = c.groups * r.upto(40);
    for (int i = 0; i < 3; ++i) c.kernel[i] = i ? 3 : 1, c.stride[i] = c.dilation[i] = 1, c.padding[i] = i ? r.upto(3) - 1 : 0;
    const int algos[3] = {XQ_ALGO_AUTO, XQ_ALGO_WINOGRAD, XQ_ALGO_WINOGRAD4};
    c.algo = algos[r.upto(3) - 1], c.pixels = r.one_in(2) ? 0 : 1000;
  }
  if (r.one_in(8)) {  // long rows
    c = {}, c.in_channels = r.upto(300), c.out_channels = r.upto(80), c.groups = 1;
    for (int i = 0; i < 3; ++i) c.kernel[i] = c.dilation[i] = 1, c.stride[i] = r.one_in(4) ? 2 : 1;
  }
  return c;
}

int64_t out_size(const xq_conv& c, int axis, int64_t in) {
  const int64_t reach = int64_t{c.dilation[axis]} * (c.kernel[axis] - 1) + 1;
  if (c.transposed) return (in - 1) * c.stride[axis] - 2 * c.padding[axis] + reach;
  return in + 2 * c.padding[axis] < reach ? 0 : (in + 2 * c.padding[axis] - reach) / c.stride[axis] + 1;
}

Bytes run_conv(const xq_conv& wanted, int isa, const std::vector<int8_t>& weight, const xq_requant& q,
               xq_tensor in, xq_tensor out, xq_tensor residual, int threads) {
  xq_conv conv = wanted;
  if (xq_conv_packed_size(&conv, isa) == 0) conv.algo = XQ_ALGO_AUTO;  // not all can do all
  Aligned packed(xq_conv_packed_size(&conv, isa));
  if (xq_conv_pack(&conv, isa, weight.data(), &q, packed.data) != XQ_OK) std::abort();
  Bytes result(size_of(out));
  out.data = result.data();
  const xq_conv_call call{packed.data, in, out, residual, threads};
  if (xq_conv_check(&call) != XQ_OK) std::abort();
  Aligned scratch(xq_conv_scratch(&call));
  xq_conv_run(&call, 0, xq_conv_items(&call), scratch.data);
  return result;
}

// Sizes that real cores have, and some that none has.
void draw_caches(Random& r) {
  const int64_t sizes[5][2] = {{48 << 10, 2 << 20}, {32 << 10, 512 << 10}, {32 << 10, 256 << 10}, {1, 1}, {1 << 20, 1 << 26}};
  const auto& size = sizes[r.upto(5) - 1];
  xq_set_caches(size[0], size[1]);
}

bool conv_agrees(Random& r, const std::vector<int>& isas) {
  draw_caches(r);
  const xq_conv c = random_conv(r);
  const int64_t in[3] = {c.kernel[0] > 1 ? r.upto(r.one_in(4) ? 40 : 5) : 1, r.upto(12), r.upto(30)};
  int64_t out[3];
  for (int i = 0; i < 3; ++i)
    if ((out[i] = out_size(c, i, in[i])) < 1) return true;
    else if (c.transposed) out[i] += r.upto(std::max(c.stride[i], c.dilation[i])) - 1;  // output padding
  const int n = r.upto(3);
  Bytes x_bytes = r.bytes(static_cast<size_t>(n * in[0] * in[1] * in[2] * c.in_channels)), none;
  const xq_tensor x = view(x_bytes, n, in[0], in[1], in[2], c.in_channels);
  xq_tensor y = view(none, n, out[0], out[1], out[2], c.out_channels);
  Bytes r_bytes = r.bytes(size_of(y));
  const size_t taps = static_cast<size_t>(c.kernel[0]) * c.kernel[1] * c.kernel[2];
  std::vector<int8_t> weight(static_cast<size_t>(c.out_channels) * (c.in_channels / c.groups) * taps);
  for (int8_t& w : weight) w = static_cast<int8_t>(r.byte() - 128);
  std::vector<float> mult(static_cast<size_t>(c.out_channels)), bias(mult.size());
  for (float& m : mult) m = static_cast<float>(r.byte()) * 1e-5f;
  for (float& b : bias) b = static_cast<float>(r.byte() - 128);
  std::vector<float> slopes(mult.size());
  for (float& s : slopes) s = static_cast<float>(r.byte() - 100) * 0.01f;
  Bytes lut = r.bytes(256);
  xq_requant q{mult.data(), bias.data(), r.one_in(3) ? lut.data() : nullptr, r.one_in(3) ? 0 : r.byte(), r.byte(), 0, 255, r.one_in(2), r.byte(), 0.7f, r.one_in(3) ? slopes.data() : nullptr};
  const xq_tensor residual = q.residual ? view(r_bytes, n, out[0], out[1], out[2], c.out_channels) : xq_tensor{};
  const Bytes want = run_conv(c, XQ_ISA_REFERENCE, weight, q, x, y, residual, 1);
  for (int isa : isas)
    for (int threads : {1, 3})
      if (run_conv(c, isa, weight, q, x, y, residual, threads) != want) {
        std::printf("isa %d differs: %d -> %d groups %d kernel %d %d %d\n", isa, c.in_channels,
                    c.out_channels, c.groups, c.kernel[0], c.kernel[1], c.kernel[2]);
        return false;
      }
  return true;
}

bool linear_agrees(Random& r, const std::vector<int>& isas) {
  // Activations are approximations on all but the reference: those that are exact only.
  const xq_linear l{r.one_in(4) ? r.upto(1500) : r.upto(200), r.upto(150), r.upto(2) - 1};
  const int64_t rows = r.upto(70), in_stride = l.in_features + r.upto(9) - 1, out_stride = l.out_features + r.upto(9) - 1;
  const auto floats = [&](int64_t count) {
    std::vector<float> v(static_cast<size_t>(count));
    for (float& x : v) x = static_cast<float>(r.byte() - 128) * static_cast<float>(r.byte()) * 0.01f;
    return v;
  };
  // No row and no weight longer than it must be.
  const std::vector<float> in = floats((rows - 1) * in_stride + l.in_features);
  const std::vector<float> scale = floats(l.out_features), bias = floats(l.out_features);
  std::vector<int8_t> weight(static_cast<size_t>(l.out_features) * l.in_features);
  for (int8_t& w : weight) w = static_cast<int8_t>(r.byte() - 128);
  const auto run = [&](int isa, int threads) {
    Aligned packed(xq_linear_packed_size(&l, isa));
    if (xq_linear_pack(&l, isa, weight.data(), scale.data(), bias.data(), packed.data) != XQ_OK) std::abort();
    return run_linear<Aligned>(packed.data, l.out_features, in, in_stride, rows, out_stride, threads);
  };
  const std::vector<float> want = run(XQ_ISA_REFERENCE, 1);
  for (int isa : isas)
    for (int threads : {1, 3})
      if (run(isa, threads) != want) {
        std::printf("isa %d differs: linear %d -> %d, %ld rows\n", isa, l.in_features, l.out_features, static_cast<long>(rows));
        return false;
      }
  return true;
}

bool op_agrees(Random& r, const std::vector<int>& isas) {
  xq_op op{};
  op.kind = r.upto(XQ_OP_BILINEAR + 1) - 1;
  op.groups = op.kind == XQ_OP_SHUFFLE ? r.upto(4) : 1;
  const int n = r.upto(2), d = r.upto(2), h = r.upto(9), w = r.upto(12), c = op.groups * r.upto(90);
  const bool resized = op.kind >= XQ_OP_ADAPTIVE_POOL, pooled = op.kind == XQ_OP_MAX_POOL || op.kind == XQ_OP_AVG_POOL;
  int64_t out[3] = {d, h, w};
  const int64_t in[3] = {d, h, w};
  for (int i = 0; i < 3; ++i) {
    op.kernel[i] = pooled ? r.upto(3) : 1;
    op.stride[i] = pooled ? r.upto(2) : 1;
    op.dilation[i] = op.kind == XQ_OP_MAX_POOL ? r.upto(2) : 1;
    op.padding[i] = r.upto(op.kernel[i] / 2 + 1) - 1;
    if (resized && (i > 0 || op.kind != XQ_OP_BILINEAR)) out[i] = r.upto(14);
    if (pooled) {
      const int64_t reach = op.dilation[i] * (op.kernel[i] - 1) + 1, all = in[i] + 2 * op.padding[i];
      if (all < reach) return true;
      out[i] = (all - reach) / op.stride[i] + 1;
    }
    op.scale[i] = static_cast<float>(in[i]) / static_cast<float>(out[i]);
  }
  const bool point = op.kind == XQ_OP_MUL && r.one_in(2);
  Bytes a = r.bytes(static_cast<size_t>(n) * d * h * w * c), lut = r.bytes(256);
  Bytes b = r.bytes(point ? static_cast<size_t>(n) * c : a.size());
  op.a = view(a, n, d, h, w, c);
  op.b = point ? view(b, n, 1, 1, 1, c) : view(b, n, d, h, w, c);
  op.lut = lut.data();
  op.a_mult = 0.3f, op.b_mult = 0.6f;
  op.a_zp = r.byte(), op.b_zp = r.byte(), op.out_zp = r.byte(), op.hi = 255;
  auto run = [&](int isa) {
    Bytes result(static_cast<size_t>(n * out[0] * out[1] * out[2] * c));
    op.isa = isa;
    op.out = view(result, n, out[0], out[1], out[2], c);
    if (xq_op_check(&op) != XQ_OK) std::abort();
    xq_op_run(&op, 0, xq_op_items(&op));
    return result;
  };
  const Bytes want = run(XQ_ISA_REFERENCE);
  for (int isa : isas)
    if (run(isa) != want) {
      std::printf("op %d differs on isa %d\n", op.kind, isa);
      return false;
    }
  return true;
}

// Between float and codes, and per channel. Floats lie channels-last or channels-first.
bool channel_op_agrees(Random& r, const std::vector<int>& isas) {
  xq_op op{};
  const int kinds[5] = {XQ_OP_QUANTIZE, XQ_OP_DEQUANTIZE, XQ_OP_AFFINE, XQ_OP_LAYER_NORM, XQ_OP_LUT_REAL};
  op.kind = kinds[r.upto(5) - 1];
  op.groups = 1;
  for (int i = 0; i < 3; ++i) op.kernel[i] = op.stride[i] = op.dilation[i] = 1;
  const int64_t n = r.upto(2), h = r.upto(9), w = r.upto(40), c = r.upto(150), size = n * h * w * c;
  const bool planes = r.one_in(2), quantize = op.kind == XQ_OP_QUANTIZE;
  const bool dequantize = op.kind == XQ_OP_DEQUANTIZE || op.kind == XQ_OP_LUT_REAL;
  Bytes codes = r.bytes(static_cast<size_t>(size)), lut = r.bytes(256);
  std::vector<float> reals(static_cast<size_t>(size)), scale(static_cast<size_t>(c)), shift(scale.size());
  const float odd[4] = {NAN, INFINITY, -INFINITY, 3e38f};
  for (float& x : reals) x = r.one_in(40) ? odd[r.upto(4) - 1] : static_cast<float>(r.byte() - 128) / 7.0f;
  for (float& x : scale) x = static_cast<float>(r.byte() - 128) / 90.0f;
  for (float& x : shift) x = static_cast<float>(r.byte() - 128);
  op.a_mult = 1.3f, op.a_zp = r.byte(), op.out_zp = r.byte(), op.hi = 255, op.eps = 0.1f;
  std::vector<float> table(256);
  for (float& x : table) x = static_cast<float>(r.byte() - 128) / 3.0f;
  op.reals = table.data();
  op.lut = !dequantize && r.one_in(3) ? lut.data() : nullptr;
  const bool plain = op.kind == XQ_OP_LAYER_NORM && r.one_in(3);
  op.scale_c = plain ? nullptr : scale.data();
  op.shift_c = plain && r.one_in(2) ? nullptr : shift.data();
  auto floats = [&](std::vector<float>& f) {
    Bytes none;
    xq_tensor t = view(none, n, 1, h, w, planes ? 1 : c);
    t.data = reinterpret_cast<uint8_t*>(f.data()), t.c = c;
    t.stride_n = h * w * c * 4, t.stride_d = t.stride_h * 4, t.stride_h *= 4, t.stride_w *= 4;
    return t;
  };
  op.a_stride_c = op.out_stride_c = planes ? h * w * 4 : 4;
  auto run = [&](int isa) {
    Bytes result(static_cast<size_t>(size));
    std::vector<float> real_result(dequantize ? result.size() : 0);
    op.isa = isa;
    op.a = quantize ? floats(reals) : view(codes, n, 1, h, w, c);
    op.out = dequantize ? floats(real_result) : view(result, n, 1, h, w, c);
    if (xq_op_check(&op) != XQ_OK) std::abort();
    xq_op_run(&op, 0, xq_op_items(&op));
    if (!dequantize) return result;
    Bytes bytes(real_result.size() * 4);
    std::memcpy(bytes.data(), real_result.data(), bytes.size());
    return bytes;
  };
  const Bytes want = run(XQ_ISA_REFERENCE);
  for (int isa : isas)
    if (run(isa) != want) {
      std::printf("op %d differs on isa %d\n", op.kind, isa);
      return false;
    }
  return true;
}

// Sums of channels, now and then of more pixels than a float32 adds up exactly, or of the largest codes.
bool sums_agree(Random& r, const std::vector<int>& isas) {
  const int64_t d = r.upto(2), h = r.upto(4), w = r.one_in(8) ? 200 + r.upto(700) : r.upto(40), c = r.upto(150);
  Bytes codes = r.bytes(static_cast<size_t>(d * h * w * c));
  if (r.one_in(4)) std::fill(codes.begin(), codes.end(), uint8_t{255});
  const auto run = [&](int isa) {
    std::vector<int64_t> sums(static_cast<size_t>(2 * c), 7);  // what is there is added to
    const xq_channel_sums op{view(codes, 1, d, h, w, c), sums.data(), sums.data() + c, isa};
    const int64_t cut = d * h / 2;
    xq_channel_sums_run(&op, cut, d * h);
    xq_channel_sums_run(&op, 0, cut);
    return sums;
  };
  const std::vector<int64_t> want = run(XQ_ISA_REFERENCE);
  for (int isa : isas)
    if (run(isa) != want) return std::printf("isa %d differs: sums of %d channels\n", isa, static_cast<int>(c)), false;
  return true;
}

// Floats of roughly one unit; with `denormals` now and then all or some of them are none.
std::vector<float> random_floats(Random& r, size_t size, bool denormals = false) {
  std::vector<float> f(size);
  const bool some = denormals && r.one_in(8), all = denormals && r.one_in(20);
  for (float& x : f) x = static_cast<float>(r.byte() - 128) / 60.0f * (all || (some && r.one_in(4)) ? 1e-39f : 1.0f);
  return f;
}

bool close(const std::vector<float>& a, const std::vector<float>& b, float bound) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!(std::abs(a[i] - b[i]) <= bound) && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  return true;
}

// While there is one, denormals count as zero in this thread, as some libraries have it.
class WithoutDenormals {
 public:
  explicit WithoutDenormals(bool set) : before_(_mm_getcsr()) {
    if (set) _mm_setcsr(before_ | 0x8040);
  }
  ~WithoutDenormals() { _mm_setcsr(before_); }
  WithoutDenormals(const WithoutDenormals&) = delete;
  WithoutDenormals& operator=(const WithoutDenormals&) = delete;

 private:
  unsigned before_;
};

// Products of row codes and what follows them. Without a norm all levels give the same bits.
bool rows_agree(Random& r, const std::vector<int>& isas) {
  draw_caches(r);
  const int64_t rows = r.upto(r.one_in(3) ? 140 : 40), in = r.one_in(2) ? 64 * r.upto(3) : r.upto(150), out = r.upto(150);
  const bool product = !r.one_in(4), gated = product && r.one_in(4), residual = r.one_in(2);
  const int norm = r.upto(3) - 1, threads = r.upto(9), activation = gated ? XQ_ACT_NONE : r.one_in(2) ? XQ_ACT_RELU : XQ_ACT_NONE;
  Bytes codes = r.bytes(static_cast<size_t>(rows * in));
  std::vector<int32_t> zp(static_cast<size_t>(rows));
  for (int32_t& z : zp) z = r.byte();
  std::vector<float> scale(zp.size(), 0.01f), w_scale(static_cast<size_t>(out), 0.004f);
  std::vector<int8_t> weights[2];
  for (auto& w : weights) {
    w.resize(static_cast<size_t>(out * in));
    for (int8_t& x : w) x = static_cast<int8_t>(r.byte() - 128);
  }
  const size_t cells = static_cast<size_t>(rows * out);
  std::vector<float> bias = random_floats(r, w_scale.size()), x = random_floats(r, cells, true), more = random_floats(r, cells, true);
  std::vector<float> norm_weight = random_floats(r, w_scale.size());
  struct Result {
    std::vector<float> total, normed, scale;
    Bytes codes;
    std::vector<int32_t> zp;
  };
  auto run = [&](int isa) {
    const xq_linear linear{static_cast<int32_t>(in), static_cast<int32_t>(out), activation};
    Aligned packed(xq_linear_packed_size(&linear, isa)), up(xq_linear_packed_size(&linear, isa));
    for (int i = 0; i < 2; ++i)
      if (xq_linear_pack(&linear, isa, weights[i].data(), w_scale.data(), bias.data(), (i ? up : packed).data) != XQ_OK) std::abort();
    Result got{std::vector<float>(cells), std::vector<float>(norm ? cells : 0), std::vector<float>(zp.size()), Bytes(cells), std::vector<int32_t>(zp.size())};
    xq_rows op{};
    op.isa = isa, op.rows = rows, op.features = out, op.threads = threads, op.norm = norm, op.eps = 1e-3f;
    if (product) op.packed = packed.data, op.in = {codes.data(), scale.data(), zp.data()};
    else op.x = x.data();
    if (gated) op.up = up.data;
    if (residual) op.residual = more.data();
    if (product || residual) op.total = got.total.data();
    if (norm) op.normed = got.normed.data(), op.norm_weight = norm_weight.data();
    op.out = {got.codes.data(), got.scale.data(), got.zp.data()};
    if (xq_rows_check(&op) != XQ_OK) std::abort();
    Aligned shared(xq_rows_shared(&op));
    for (int phase = 0; phase < 2; ++phase)
      for (int64_t i = 0; i < xq_rows_items(&op, phase); ++i) {
        Aligned scratch(xq_rows_scratch(&op));
        xq_rows_run(&op, phase, i, i + 1, shared.data, scratch.data);
      }
    return got;
  };
  const bool flushed = r.one_in(3);
  const WithoutDenormals of_this_thread(flushed);
  const Result want = run(XQ_ISA_REFERENCE);
  for (int isa : isas) {
    const Result got = run(isa);
    const bool same = got.total == want.total && (norm || (got.codes == want.codes && got.scale == want.scale && got.zp == want.zp));
    if (!same || !close(got.normed, want.normed, 1e-3f)) {
      std::printf("rows differ on isa %d\n", isa);
      return false;
    }
  }
  return true;
}

bool attention_agrees(Random& r, const std::vector<int>& isas) {
  xq_attention op{};
  op.batch = r.upto(2), op.queries = r.upto(70), op.keys = r.upto(r.one_in(4) ? 600 : 70), op.kv_heads = r.upto(2);
  op.heads = op.kv_heads * r.upto(2), op.size = r.upto(70), op.scale = 0.1f, op.causal = r.one_in(3), op.threads = r.upto(5);
  const size_t queries = static_cast<size_t>(op.batch * op.queries * op.heads * op.size);
  const size_t keys = static_cast<size_t>(op.batch * op.keys * op.kv_heads * op.size);
  const std::vector<float> q = random_floats(r, queries, true), k = random_floats(r, keys, true), v = random_floats(r, keys, true);
  op.q = q.data(), op.k = k.data(), op.v = v.data();
  const auto strides = [&](int64_t s[3], int64_t tokens, int64_t heads) { s[0] = tokens * heads * op.size, s[1] = heads * op.size, s[2] = op.size; };
  strides(op.q_stride, op.queries, op.heads), strides(op.k_stride, op.keys, op.kv_heads), strides(op.v_stride, op.keys, op.kv_heads);
  const size_t cells = static_cast<size_t>(op.queries * op.keys);
  Bytes seen = r.bytes(cells);
  for (uint8_t& s : seen) s &= 1;
  std::vector<float> added = random_floats(r, cells);
  if (r.one_in(2))
    for (int64_t row = 0; row < op.queries; ++row) {  // some are hidden by infinities, some rows altogether
      const bool whole = r.one_in(8);
      for (int64_t i = 0; i < op.keys; ++i)
        if (whole || r.one_in(3)) added[static_cast<size_t>(row * op.keys + i)] = -INFINITY;
    }
  const bool flushed = r.one_in(4);
  op.mask_is_bool = r.one_in(2);
  if (r.one_in(2)) op.mask = op.mask_is_bool ? static_cast<const void*>(seen.data()) : added.data(), op.mask_stride[2] = op.keys;
  if (op.causal && r.one_in(2)) op.past = r.upto(100);
  std::vector<int64_t> hidden(static_cast<size_t>(op.batch));
  for (int64_t& count : hidden) count = r.upto(static_cast<int>(op.keys) + 1) - 1;
  if (!op.mask && r.one_in(2)) op.hidden = hidden.data();
  // A cache of codes: each head's tokens one after another, and its scales.
  std::vector<int8_t> codes[2];
  std::vector<float> scales[2];
  const bool coded = op.causal && !op.mask && r.one_in(2);
  if (coded) {
    const size_t rows = keys / static_cast<size_t>(op.size);
    for (int i = 0; i < 2; ++i) codes[i].resize(keys), scales[i].resize(rows);
    for (int64_t* s : {op.k_stride, op.v_stride}) s[0] = op.kv_heads * op.keys * op.size, s[1] = op.size, s[2] = op.keys * op.size;
    for (int64_t* s : {op.k_scale_stride, op.v_scale_stride}) s[0] = op.kv_heads * op.keys, s[1] = op.keys;
    op.k = op.v = nullptr;
    op.k_codes = codes[0].data(), op.v_codes = codes[1].data(), op.k_scale = scales[0].data(), op.v_scale = scales[1].data();
    std::vector<int8_t> made(static_cast<size_t>(op.size));
    for (int i = 0; i < 2; ++i)
      for (size_t row = 0; row < rows; ++row) {
        const size_t at = row * static_cast<size_t>(op.size);
        const float* x = (i ? v : k).data() + at;
        xq_cache_codes(XQ_ISA_REFERENCE, x, op.size, codes[i].data() + at, &scales[i][row]);
        for (int isa : isas) {
          float scale = 0;
          xq_cache_codes(isa, x, op.size, made.data(), &scale);
          if (scale != scales[i][row] || !std::equal(made.begin(), made.end(), codes[i].data() + at)) {
            std::printf("codes of a cache differ on isa %d\n", isa);
            return false;
          }
        }
      }
  }
  auto run = [&](int isa) {
    std::vector<float> out(queries);
    op.isa = isa, op.out = out.data();
    if (xq_attention_check(&op) != XQ_OK) std::abort();
    for (int64_t i = 0; i < xq_attention_items(&op); ++i) {
      Aligned scratch(xq_attention_scratch(&op));
      xq_attention_run(&op, i, i + 1, scratch.data);
    }
    return out;
  };
  const std::vector<float> want = run(XQ_ISA_REFERENCE);
  const WithoutDenormals of_this_thread(flushed);
  for (int isa : isas) {
    const int64_t from = xq_attention_coded_keys(isa);
    const bool by_codes = from && op.keys >= from;
    if (!close(run(isa), want, by_codes ? 0.06f : xq_attention_in_bfloat16(isa) ? 0.03f : 1e-4f)) {
      std::printf("attention differs on isa %d\n", isa);
      return false;
    }
  }
  return true;
}

struct Family {
  const char* name;
  bool (*agrees)(Random&, const std::vector<int>& isas);
};

const Family kFamilies[] = {
    {"conv", conv_agrees}, {"op", op_agrees}, {"channel_op", channel_op_agrees}, {"linear", linear_agrees},
    {"lookup", lookup_agrees}, {"interaction", interaction_agrees}, {"gates", gates_agree}, {"rows", rows_agree},
    {"attention", attention_agrees}, {"groups", groups_agree<Aligned, Random>}, {"sums", sums_agree},
};

}  // namespace

// Arguments: first seed, last seed, a family or "all", then the ISAs as numbers.
int main(int argc, char** argv) {
  if (argc < 5) return 2;
  std::vector<int> isas;
  for (int i = 4; i < argc; ++i) isas.push_back(std::atoi(argv[i]));
  for (int isa : isas)
    if (isa == XQ_ISA_AMX_INT8 && xq_enable_amx() != XQ_OK) return 2;
  const std::string wanted = argv[3];
  const int first = std::atoi(argv[1]), last = std::atoi(argv[2]);
  int64_t compared = 0;
  for (int seed = first; seed < last; ++seed) {
    Random r{std::mt19937(static_cast<unsigned>(seed))};
    for (const Family& family : kFamilies) {
      if (wanted != "all" && wanted != family.name) continue;
      if (!family.agrees(r, isas)) return std::printf("seed %d, %s\n", seed, family.name), 1;
      ++compared;
    }
  }
  if (compared == 0) return std::printf("no family is called %s\n", argv[3]), 2;
  std::printf("%d seeds agree\n", last - first);
  return 0;
}

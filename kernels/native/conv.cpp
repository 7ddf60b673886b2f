// The convolution calls of the C interface: checks, and the way to the loops.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "conv_phases.h"
#include "internal.h"

namespace xq {
namespace {

const Packed* packed_of(const xq_conv_call& call) {
  const auto* p = static_cast<const Packed*>(call.packed);
  return p && reinterpret_cast<uintptr_t>(p) % kAlign == 0 && p->magic == kMagic ? p : nullptr;
}

// The blob that serves a call. The weights of 4 x 4 tiles are eight times as big as others, so that they come from beyond
// L2, in a network from beyond L3 as well: fewer tiles than these would wait for them, where others are multiplied as quickly
// as VNNI does. (A Xeon takes 378 us for 256 channels of 14 x 14 pixels, 16 tiles, where tiles take 495; 20 x 20, 25 tiles,
// are 723 and 618.) And tiles that reach far beyond a small image waste more than they save.
const Packed& serving(const xq_conv_call& call) {
  const auto& p = *static_cast<const Packed*>(call.packed);
  if (!p.for_few) return p;
  constexpr int64_t kLeastTiles = 4, kLeastTilesVnni = 20, kLeastPixels = 10;  // of the 16 of a tile
  const int64_t tiles = winograd_tiles(p, call.out), pixels = call.out.n * call.out.d * call.out.h * call.out.w;
  return tiles >= (has_vnni(p.isa) ? kLeastTilesVnni : kLeastTiles) && pixels >= kLeastPixels * tiles ? p : *p.at<Packed>(p.for_few);
}

// As the loops see a call.
xq_conv_call served(const xq_conv_call& call) {
  xq_conv_call own = call;
  const Packed& p = serving(call);
  own.packed = &p;
  if (p.turned)
    for (xq_tensor* t : {&own.in, &own.out, &own.residual}) std::swap(t->d, t->h), std::swap(t->stride_d, t->stride_h);
  return own;
}

// Calls `body` with the call of each phase of a transposed convolution.
template <class Body>
void each_phase(const xq_conv_call& call, const Body& body) {
  const auto& whole = *static_cast<const Packed*>(call.packed);
  const Packed* packed = whole.at<Packed>(whole.phases);
  for (int64_t i = 0; i < phases_of(whole.conv); ++i, packed = packed->at<Packed>(packed->size)) {
    const Phase phase(whole.conv, i);
    xq_conv_call own = call;
    own.packed = packed;
    own.out = phase.part_of(whole.conv, call.out);
    if (whole.residual) own.residual = phase.part_of(whole.conv, call.residual);
    if (own.out.d * own.out.h * own.out.w != 0) body(own);
  }
}

int64_t items_of_phases(const xq_conv_call& call) {
  int64_t items = 0;
  each_phase(call, [&](const xq_conv_call& phase) { items += dense_items(phase); });
  return items;
}

size_t scratch_of_phases(const xq_conv_call& call) {
  size_t bytes = 0;
  each_phase(call, [&](const xq_conv_call& phase) { bytes = std::max(bytes, dense_scratch(phase)); });
  return bytes;
}

// Items of all phases, numbered one phase after another.
void run_phases(const xq_conv_call& call, int64_t begin, int64_t end, uint8_t* scratch) {
  int64_t before = 0;
  each_phase(call, [&](const xq_conv_call& phase) {
    const int64_t items = dense_items(phase), first = max64(begin - before, 0), last = min64(end - before, items);
    if (first < last) dense_run(phase, first, last, scratch);
    before += items;
  });
}

bool same_shape(const xq_tensor& a, const xq_tensor& b) {
  return a.n == b.n && a.d == b.d && a.h == b.h && a.w == b.w && a.c == b.c;
}

bool tensor_sane(const xq_tensor& t) {
  return t.n >= 0 && t.d >= 0 && t.h >= 0 && t.w >= 0 && t.c >= 0 &&
         (t.data || t.n * t.d * t.h * t.w * t.c == 0);
}

// Whether `out` pixels are what the convolution makes of `in` pixels along one axis.
bool size_fits(const xq_conv& c, int axis, int64_t in, int64_t out) {
  const int64_t reach = int64_t{c.dilation[axis]} * (c.kernel[axis] - 1) + 1;
  const int64_t stride = c.stride[axis], pad = c.padding[axis];
  if (!c.transposed) return in + 2 * pad >= reach && out == (in + 2 * pad - reach) / stride + 1;
  const int64_t least = (in - 1) * stride - 2 * pad + reach;
  return out >= least && out >= 1 && out < least + max64(stride, c.dilation[axis]);
}

// Depthwise splits into images, groups of slices, groups of rows and blocks of channels; few rows leave blocks to share.
struct DepthwiseItems {
  int64_t slices, rows, all;

  DepthwiseItems(const Packed& p, const xq_tensor& out)
      : slices(ceil_div(out.d, depthwise_slices(p))), rows(ceil_div(out.h, p.depthwise.rows)),
        all(out.n * slices * rows * p.n_blocks) {}
};

void depthwise_run(const xq_conv_call& call, int64_t begin, int64_t end, uint8_t* scratch) {
  const Packed& p = *static_cast<const Packed*>(call.packed);
  const DepthwiseItems items(p, call.out);
  const int64_t slices = depthwise_slices(p);
  for (int64_t item = begin; item < end;) {
    const int64_t block = item % p.n_blocks, row = item / p.n_blocks % items.rows;
    const int64_t z = item / p.n_blocks / items.rows % items.slices * slices;
    const int64_t n = item / p.n_blocks / items.rows / items.slices;
    const int64_t blocks = min64(p.n_blocks - block, end - item);
    kernels_of(p.isa).depthwise({&p, &call.in, &call.out, p.residual ? &call.residual : nullptr, n, z,
                                 min64(slices, call.out.d - z), row * p.depthwise.rows, static_cast<int32_t>(block),
                                 static_cast<int32_t>(block + blocks), scratch});
    item += blocks;
  }
}

}  // namespace
}  // namespace xq

using namespace xq;

const char* xq_status_text(int status) {
  switch (status) {
    case XQ_OK: return "ok";
    case XQ_BAD_ARGUMENT: return "null, misaligned or out-of-range argument";
    case XQ_BAD_SHAPE: return "the tensors do not fit each other or the op";
    case XQ_UNSUPPORTED: return "this algorithm cannot do this op on this ISA";
    case XQ_NO_PERMISSION: return "the operating system does not let this process use AMX";
    case XQ_NOT_FINITE: return "a multiplier or a bias is not finite";
    case XQ_TOO_LARGE: return "the op would take more working memory than any computer has";
    default: return "unknown status";
  }
}

int xq_enable_amx(void) {
  if (!__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512vnni")) return XQ_UNSUPPORTED;
#ifdef XQ_EMULATED
  return XQ_OK;
#endif
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) ? XQ_NO_PERMISSION : XQ_OK;
}

int xq_conv_check(const xq_conv_call* call) {
  if (!call) return XQ_BAD_ARGUMENT;
  const Packed* p = packed_of(*call);
  if (!p || call->threads < 1) return XQ_BAD_ARGUMENT;
  const xq_tensor &in = call->in, &out = call->out;
  if (!tensor_sane(in) || !tensor_sane(out)) return XQ_BAD_ARGUMENT;
  if (in.n != out.n || in.c != p->conv.in_channels || out.c != p->conv.out_channels)
    return XQ_BAD_SHAPE;
  if (in.d < 1 || in.h < 1 || in.w < 1) return in.n == 0 || out.w * out.h * out.d == 0 ? XQ_OK : XQ_BAD_SHAPE;
  const int64_t ins[3] = {in.d, in.h, in.w}, outs[3] = {out.d, out.h, out.w};
  for (int i = 0; i < 3; ++i)
    if (!size_fits(p->conv, i, ins[i], outs[i])) return XQ_BAD_SHAPE;
  // Loops that read the input in place take an output pixel for each of its pixels.
  if (p->algo == XQ_ALGO_DENSE && p->mode == kDirect && !std::equal(ins, ins + 3, outs)) return XQ_BAD_SHAPE;
  if (out.n == 0) return XQ_OK;
  if ((in.w > 1 && in.stride_w < in.c) || (out.w > 1 && out.stride_w < out.c)) return XQ_BAD_SHAPE;
  if ((p->residual != 0) != (call->residual.data != nullptr)) return XQ_BAD_ARGUMENT;
  if (p->residual && !same_shape(call->residual, out)) return XQ_BAD_SHAPE;
  constexpr size_t kMostScratch = size_t{1} << 40;
  return xq_conv_scratch(call) > kMostScratch ? XQ_TOO_LARGE : XQ_OK;
}

int64_t xq_conv_items(const xq_conv_call* asked) {
  const xq_conv_call own = served(*asked), *call = &own;
  const Packed& p = *static_cast<const Packed*>(call->packed);
  const xq_tensor& out = call->out;
  if (out.n * out.d * out.h * out.w == 0) return 0;
  if (p.algo == XQ_ALGO_REFERENCE) return out.n * out.d * out.h;
  if (p.algo == XQ_ALGO_DEPTHWISE) return DepthwiseItems(p, out).all;
  if (p.phases) return items_of_phases(*call);
  return p.winograd ? winograd_items(*call) : dense_items(*call);
}

size_t xq_conv_scratch(const xq_conv_call* asked) {
  const xq_conv_call own = served(*asked), *call = &own;
  const Packed& p = *static_cast<const Packed*>(call->packed);
  if (p.algo == XQ_ALGO_REFERENCE) return 0;
  if (p.algo == XQ_ALGO_DEPTHWISE) {
    if (p.depthwise.by_taps) return 0;
    const int64_t columns = depthwise_strip_columns(p, depthwise_tile(p, call->out.w));
    return static_cast<size_t>(columns * depthwise_column(p) + 4 * kAlign);
  }
  if (p.phases) return scratch_of_phases(*call);
  return p.winograd ? winograd_scratch(*call) : dense_scratch(*call);
}

void xq_conv_run(const xq_conv_call* asked, int64_t begin, int64_t end, void* scratch) {
  const xq_conv_call own = served(*asked), *call = &own;
  const Packed& p = *static_cast<const Packed*>(call->packed);
  if (begin >= end) return;
  if (p.algo == XQ_ALGO_REFERENCE) return conv_reference(*call, begin, end);
  auto* bytes = static_cast<uint8_t*>(scratch);
  if (p.phases) return run_phases(*call, begin, end, bytes);
  if (p.winograd) return winograd_run(*call, begin, end, bytes);
  (p.algo == XQ_ALGO_DEPTHWISE ? depthwise_run : dense_run)(*call, begin, end, bytes);
}

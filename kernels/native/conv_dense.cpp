// Feeds the matrix-product loops: splits the work, copies input into padded planes where needed.
#include <algorithm>

#include "internal.h"

namespace xq {
namespace {

// Rows are computed up to 32 at a time.
constexpr int64_t kTileRows = 32;

// The copied input of one band: slices of depth x phases of rows x phases of columns, each a plane
// of `height` rows of `width` pixels.
struct Planes {
  int64_t height, width;       // of one phase
  int64_t used_h, used_w;      // bit p set: some tap reads phase p (strides beyond 63 use all)
  int64_t phases_h, phases_w;
  int64_t plane, slices;       // bytes of a plane; depth slices
  int64_t bytes;               // of all planes of one image's band
};

struct Shape {
  const xq_conv_call& call;
  const Packed& p;
  const xq_tensor &in, &out;
  explicit Shape(const xq_conv_call& c)
      : call(c), p(*static_cast<const Packed*>(c.packed)), in(c.in), out(c.out) {}
  int64_t rows() const { return out.n * out.d * out.h; }
  int64_t pixels() const { return rows() * out.w; }
};

// Whether all pixels lie `stride_w` apart over the whole tensor.
bool is_flat(const xq_tensor& t) {
  return (t.h == 1 || t.stride_h == t.w * t.stride_w) &&
         (t.d == 1 || t.stride_d == t.h * t.w * t.stride_w) &&
         (t.n == 1 || t.stride_n == t.d * t.h * t.w * t.stride_w);
}

int64_t used_phases(int64_t kernel, int64_t dilation, int64_t stride) {
  if (stride > 63) return -1;
  int64_t used = 0;
  for (int64_t t = 0; t < kernel; ++t) used |= int64_t{1} << (t * dilation % stride);
  return used;
}

bool phase_used(int64_t used, int64_t phase) { return used < 0 || (used >> phase & 1); }

Planes planes_for(const Shape& s, int64_t rows) {
  const Geometry& g = s.p.geo;
  const bool im2col = s.p.mode == kIm2col;
  Planes l;
  l.phases_h = im2col ? 1 : g.stride[1];
  l.phases_w = im2col ? 1 : g.stride[2];
  const int64_t reach_h = (g.kernel[1] - 1) * g.dilation[1], reach_w = (g.kernel[2] - 1) * g.dilation[2];
  l.height = im2col ? (rows - 1) * g.stride[1] + reach_h + 1 : rows + reach_h / g.stride[1];
  l.width = im2col ? (s.out.w - 1) * g.stride[2] + reach_w + 1 : s.out.w + reach_w / g.stride[2];
  l.used_h = im2col ? 1 : used_phases(g.kernel[1], g.dilation[1], g.stride[1]);
  l.used_w = im2col ? 1 : used_phases(g.kernel[2], g.dilation[2], g.stride[2]);
  l.plane = l.height * l.width * s.in.c;
  l.slices = g.kernel[0];
  l.bytes = round_up(l.plane * l.phases_h * l.phases_w * l.slices, kAlign);
  return l;
}

int64_t im2col_lda(const Packed& p) { return round_up(p.at<Run>(p.runs)->bytes, 16); }

int64_t im2col_bytes(const Shape& s, int64_t rows) {
  return round_up(rows * s.out.w * im2col_lda(s.p), kAlign);
}

// Output rows, and images, that are copied and computed together.
struct Band {
  int64_t rows, images;
};

Band band_for(const Shape& s) {
  auto bytes = [&](int64_t rows) {
    return planes_for(s, rows).bytes + (s.p.mode == kIm2col ? im2col_bytes(s, rows) : 0);
  };
  const int64_t whole = bytes(s.out.h), most = s.p.mode == kIm2col ? lines_bytes(s.p) : band_bytes(s.p);
  if (whole <= most) return {s.out.h, max64(1, most / max64(whole, 1))};
  const int64_t one = bytes(1), each = max64((whole - one) / max64(s.out.h - 1, 1), 1);
  const int64_t rows = std::clamp<int64_t>((most - one) / each + 1, 1, s.out.h);
  return {ceil_div(s.out.h, ceil_div(s.out.h, rows)), 1};  // evenly
}

// One phase row of one input row; `from` null means padding.
void fill_row(const Shape& s, uint8_t* to, const uint8_t* from, int64_t phase, const Planes& l) {
  const int64_t c = s.in.c, zp = s.p.in_zp;
  if (!from) return (void)memset(to, static_cast<int>(zp), static_cast<size_t>(l.width * c));
  const Geometry& g = s.p.geo;
  // Pixel x of the phase is at x * step + shift of the stretched input.
  const int64_t step = l.phases_w, shift = phase - g.pad[2], up = g.up[2];
  int64_t x = 0;
  if (up == 1) {
    const int64_t before = std::clamp<int64_t>(ceil_div(max64(-shift, 0), step), 0, l.width);
    const int64_t stop = s.in.w - shift <= 0 ? 0 : ceil_div(s.in.w - shift, step);
    const int64_t end = std::clamp<int64_t>(stop, before, l.width);
    memset(to, static_cast<int>(zp), static_cast<size_t>(before * c));
    const uint8_t* a = from + (before * step + shift) * s.in.stride_w;
    if (step == 1 && s.in.stride_w == c) {
      memcpy(to + before * c, a, static_cast<size_t>((end - before) * c));
    } else {
      for (int64_t i = before; i < end; ++i, a += step * s.in.stride_w)
        memcpy(to + i * c, a, static_cast<size_t>(c));
    }
    x = end;
    memset(to + x * c, static_cast<int>(zp), static_cast<size_t>((l.width - x) * c));
    return;
  }
  for (; x < l.width; ++x) {
    const int64_t at = x * step + shift;
    if (at < 0 || at % up || at / up >= s.in.w) memset(to + x * c, static_cast<int>(zp), static_cast<size_t>(c));
    else memcpy(to + x * c, from + at / up * s.in.stride_w, static_cast<size_t>(c));
  }
}

// The stretched input's row `at` of one axis as an input index, or -1.
int64_t source(int64_t at, int64_t up, int64_t size) {
  return at < 0 || at % up || at / up >= size ? -1 : at / up;
}

void fill_planes(const Shape& s, const Planes& l, int64_t n, int64_t od, int64_t row, uint8_t* to) {
  const Geometry& g = s.p.geo;
  for (int64_t z = 0; z < l.slices; ++z) {
    const int64_t d = source(od * g.stride[0] + z * g.dilation[0] - g.pad[0], g.up[0], s.in.d);
    for (int64_t py = 0; py < l.phases_h; ++py)
      for (int64_t px = 0; px < l.phases_w; ++px, to += l.plane) {
        if (!phase_used(l.used_h, py) || !phase_used(l.used_w, px)) continue;
        for (int64_t y = 0; y < l.height; ++y) {
          const int64_t h = source(row * g.stride[1] + y * l.phases_h + py - g.pad[1], g.up[1], s.in.h);
          const uint8_t* from = d < 0 || h < 0 ? nullptr
                                               : s.in.data + n * s.in.stride_n + d * s.in.stride_d +
                                                     h * s.in.stride_h;
          fill_row(s, to + y * l.width * s.in.c, from, px, l);
        }
      }
  }
}

// Adjacent taps are copied as one stretch, which the loops do in whole registers.
constexpr int64_t kMaxPiece = 256;

int64_t im2col_pieces(const Shape& s, int64_t* piece) {
  const Geometry& g = s.p.geo;
  const bool adjacent = g.dilation[2] == 1 && g.kernel[2] * s.in.c <= kMaxPiece;
  *piece = adjacent ? g.kernel[2] * s.in.c : s.in.c;
  return g.kernel[0] * g.kernel[1] * (adjacent ? 1 : g.kernel[2]);
}

void fill_im2col(const Shape& s, const Planes& l, int64_t rows, const uint8_t* planes, int64_t* offsets,
                 uint8_t* to) {
  const Geometry& g = s.p.geo;
  const int64_t c = s.in.c;
  int64_t piece = 0;
  const int64_t pieces = im2col_pieces(s, &piece), across = pieces / (g.kernel[0] * g.kernel[1]);
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t x = i % across, y = i / across % g.kernel[1], z = i / across / g.kernel[1];
    offsets[i] = z * l.plane + (y * g.dilation[1] * l.width + x * g.dilation[2]) * c;
  }
  kernels_of(s.p.isa).im2col({planes, g.stride[1] * l.width * c, g.stride[2] * c, to, im2col_lda(s.p), rows,
                              s.out.w, piece, pieces, offsets});
}

// int64s needed for offsets: of runs, or of the pieces of im2col.
int64_t offsets_bytes(const Shape& s) {
  int64_t piece = 0;
  const int64_t pieces = s.p.mode == kIm2col ? im2col_pieces(s, &piece) : 0;
  return round_up(max64(s.p.n_runs, pieces) * 8, kAlign);
}

// The output-side fields of a task that starts at image n, slice d, row h.
DenseTask task_at(const Shape& s, int64_t n, int64_t d, int64_t h) {
  DenseTask t{};
  t.packed = &s.p;
  t.segments = 1;
  auto place = [&](const xq_tensor& x) {
    return x.data + n * x.stride_n + d * x.stride_d + h * x.stride_h;
  };
  t.out = place(s.out), t.out_pixel = s.out.stride_w, t.out_row = s.out.stride_h;
  t.out_segment = s.out.stride_n;
  if (!s.p.residual) return t;
  const xq_tensor& r = s.call.residual;
  t.res = place(r), t.res_pixel = r.stride_w, t.res_row = r.stride_h, t.res_segment = r.stride_n;
  return t;
}

void run_loops(const Shape& s, const DenseTask& t) {
  const IsaKernels& k = kernels_of(s.p.isa);
  s.p.algo == XQ_ALGO_GROUPED ? k.grouped(t) : k.dense(t);
}

// How far beyond a pixel's channels the loops read, to meet zero weights.
int64_t overread(const Shape& s) {
  const Block* blocks = s.p.at<Block>(s.p.blocks);
  const Run* runs = s.p.at<Run>(s.p.runs);
  int64_t quads = 0, offset = 0;
  for (int i = 0; i < s.p.n_runs; ++i) quads = max64(quads, runs[i].quads);
  for (int i = 0; i < s.p.n_blocks; ++i) offset = max64(offset, blocks[i].a_off);
  return max64(offset + quads * 4 - s.in.c, 0);
}

// Rows after those read in place that must exist: vector loops may compute one row too many.
int64_t spare_rows(const Shape& s) {
  return ceil_div(overread(s), max64(s.in.stride_w, 1)) + (s.p.isa == XQ_ISA_AMX_INT8 ? 0 : 1);
}

// Rows that may be read whole tiles at a time without leaving the tensor.
int64_t safe_rows(const Shape& s, int64_t rows) {
  // Vector loops compute a row too many only where there is one odd tile and nothing before it.
  const bool whole = s.p.isa != XQ_ISA_AMX_INT8 && (rows > kTileRows || rows % 2 == 0 || rows == 1);
  if (whole && overread(s) == 0) return rows;
  return max64(rows - spare_rows(s), 0) / kTileRows * kTileRows;
}

int64_t tail_lda(const Shape& s) { return round_up(s.in.c + overread(s), kAlign); }

// Most rows that safe_rows can leave over, as whole tiles.
int64_t tail_rows(const Shape& s) {
  return round_up(kTileRows + spare_rows(s), kTileRows);
}

// Rows of pixels that lie `stride_w` apart, read in place, except for the last few.
void run_direct(const Shape& s, DenseTask t, const uint8_t* a, int64_t rows, uint8_t* scratch) {
  const int64_t zero = 0;
  t.a = a, t.offsets = &zero, t.lda = s.in.stride_w;
  t.rows = t.row_len = t.row_valid = rows;
  t.tail_begin = safe_rows(s, rows), t.tail_lda = tail_lda(s), t.tail = scratch;
  for (int64_t m = t.tail_begin; m < rows; ++m)
    memcpy(scratch + (m - t.tail_begin) * t.tail_lda, a + m * t.lda, static_cast<size_t>(s.in.c));
  run_loops(s, t);
}

bool whole_flat(const Shape& s) {
  return is_flat(s.in) && is_flat(s.out) && (!s.p.residual || is_flat(s.call.residual));
}

void direct_range(const Shape& s, int64_t begin, int64_t end, int32_t b0, int32_t b1, uint8_t* scratch) {
  if (whole_flat(s)) {  // units are tiles of pixels
    const int64_t first = begin * kTileRows, last = min64(end * kTileRows, s.pixels());
    DenseTask t = task_at(s, 0, 0, 0);
    t.block_begin = b0, t.block_end = b1;
    t.out += first * t.out_pixel;
    if (t.res) t.res += first * t.res_pixel;
    return run_direct(s, t, s.in.data + first * s.in.stride_w, last - first, scratch);
  }
  for (int64_t row = begin; row < end; ++row) {
    const int64_t n = row / (s.out.d * s.out.h), d = row / s.out.h % s.out.d, h = row % s.out.h;
    DenseTask t = task_at(s, n, d, h);
    t.block_begin = b0, t.block_end = b1;
    run_direct(s, t, s.in.data + n * s.in.stride_n + d * s.in.stride_d + h * s.in.stride_h, s.out.w, scratch);
  }
}

// Where each run starts within the copied planes.
void plane_offsets(const Shape& s, const Planes& l, int64_t* offsets) {
  const Geometry& g = s.p.geo;
  const Run* runs = s.p.at<Run>(s.p.runs);
  for (int i = 0; i < s.p.n_runs; ++i) {
    const int64_t y = runs[i].tap[1] * g.dilation[1], x = runs[i].tap[2] * g.dilation[2];
    const int64_t plane = (runs[i].tap[0] * l.phases_h + y % g.stride[1]) * l.phases_w + x % g.stride[2];
    offsets[i] = plane * l.plane + (y / g.stride[1] * l.width + x / g.stride[2]) * s.in.c;
  }
}

void run_band(const Shape& s, int64_t row, int64_t rows, int64_t images, int32_t b0, int32_t b1, uint8_t* scratch) {
  const int64_t n = row / (s.out.d * s.out.h), d = row / s.out.h % s.out.d, h = row % s.out.h;
  const Planes l = planes_for(s, rows);
  auto* offsets = reinterpret_cast<int64_t*>(scratch);
  uint8_t* planes = scratch + offsets_bytes(s);
  DenseTask t = task_at(s, n, d, h);
  t.segments = images, t.block_begin = b0, t.block_end = b1, t.offsets = offsets;
  t.tail_begin = INT64_MAX;
  if (s.p.mode == kIm2col) {
    const int64_t each = im2col_bytes(s, rows);
    uint8_t* lines = planes + l.bytes + kMaxPiece;
    for (int64_t i = 0; i < images; ++i) {
      fill_planes(s, l, n + i, d, h, planes);
      fill_im2col(s, l, rows, planes, offsets, lines + i * each);
    }
    offsets[0] = 0;
    t.a = lines, t.a_segment = each, t.lda = im2col_lda(s.p);
    t.rows = rows * s.out.w, t.row_len = t.row_valid = s.out.w;
  } else {
    for (int64_t i = 0; i < images; ++i) fill_planes(s, l, n + i, d, h, planes + i * l.bytes);
    plane_offsets(s, l, offsets);
    t.a = planes, t.a_segment = l.bytes, t.lda = s.in.c;
    t.rows = (rows - 1) * l.width + s.out.w, t.row_len = l.width, t.row_valid = s.out.w;
  }
  run_loops(s, t);
}

void banded_range(const Shape& s, int64_t begin, int64_t end, int32_t b0, int32_t b1, uint8_t* scratch) {
  const Band band = band_for(s);
  for (int64_t row = begin; row < end;) {
    const int64_t h = row % s.out.h;
    int64_t rows = min64(min64(band.rows, s.out.h - h), end - row), images = 1;
    if (rows == s.out.h && s.out.d == 1) images = min64(band.images, (end - row) / s.out.h);
    run_band(s, row, rows, images, b0, b1, scratch);
    row += rows * images;
  }
}

// How many parts the pixels and the output channels are split into.
struct Parts {
  int64_t units, by_unit, by_block;
};

Parts parts_of(const Shape& s) {
  const bool flat = s.p.mode == kDirect && whole_flat(s);
  const int64_t units = flat ? ceil_div(s.pixels(), kTileRows) : s.rows();
  const int64_t threads = s.call.threads;
  if (threads <= 1) return {units, 1, 1};
  const Run* runs = s.p.at<Run>(s.p.runs);
  int64_t quads = 0;
  for (int i = 0; i < s.p.n_runs; ++i) quads += runs[i].quads;
  // Sharing out channels reads the input once a thread; sharing out pixels the weights.
  const int64_t weights = 4 * quads * s.out.c;
  const int64_t input = s.in.n * s.in.d * s.in.h * s.in.w * s.in.c;
  if (weights > input && s.p.n_blocks >= threads) return {units, 1, threads};
  if (units >= threads) return {units, threads, 1};
  return {units, units, max64(1, min64(s.p.n_blocks, threads / units))};
}

}  // namespace

int64_t dense_items(const xq_conv_call& call) {
  const Parts parts = parts_of(Shape(call));
  return parts.by_unit * parts.by_block;
}

size_t dense_scratch(const xq_conv_call& call) {
  const Shape s(call);
  if (s.pixels() == 0) return 0;
  if (s.p.mode == kDirect && s.p.algo == XQ_ALGO_DENSE)
    return static_cast<size_t>(tail_rows(s) * tail_lda(s) + kAlign);
  const Band band = band_for(s);
  const Planes l = planes_for(s, band.rows);
  const bool im2col = s.p.mode == kIm2col;
  const int64_t lda = im2col ? im2col_lda(s.p) : s.in.c;
  int64_t bytes = im2col ? l.bytes + 2 * kMaxPiece + band.images * im2col_bytes(s, band.rows)
                         : band.images * l.bytes;
  bytes += offsets_bytes(s) + kTileRows * lda + overread(s) + 4 * kAlign;
  return static_cast<size_t>(bytes);
}

void dense_run(const xq_conv_call& call, int64_t begin, int64_t end, uint8_t* scratch) {
  const Shape s(call);
  const Parts parts = parts_of(s);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t u = item / parts.by_block, b = item % parts.by_block;
    const int64_t first = u * parts.units / parts.by_unit, last = (u + 1) * parts.units / parts.by_unit;
    const auto b0 = static_cast<int32_t>(b * s.p.n_blocks / parts.by_block);
    const auto b1 = static_cast<int32_t>((b + 1) * s.p.n_blocks / parts.by_block);
    if (first == last || b0 == b1) continue;
    s.p.mode == kDirect ? direct_range(s, first, last, b0, b1, scratch)
                        : banded_range(s, first, last, b0, b1, scratch);
  }
}

}  // namespace xq

// Feeds the GEMM loops: splits the work, copies input into padded planes where needed.
#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <optional>

#include "internal.h"
#include "windows.h"

namespace xq {
namespace {

// Rows are computed up to 32 at a time.
constexpr int64_t kTileRows = 32;
// Fewer rows than a set of L1 has lines do not put one another out.
constexpr int64_t kFewRows = 8;

// How one axis of the input is copied for `count` outputs in a row: as pieces, each a row of `length` elements, in which
// neighbouring outputs find theirs `step` elements apart.
struct Axis {
  enum Way {
    kWhole,   // one piece: all elements from the first to the last
    kPhases,  // a piece for each phase of the stride that a tap reads
    kTaps,    // a piece for each tap: of taps far apart, what lies between them is left out
  };
  Way way;
  int64_t kernel, stride, dilation;
  int64_t pieces, length, step;

  Axis(const Geometry& g, int i, int64_t count, bool whole)
      : way(whole ? kWhole : kPhases), kernel(g.kernel[i]), stride(g.stride[i]), dilation(g.dilation[i]) {
    const int64_t reach = (kernel - 1) * dilation;
    pieces = whole ? 1 : min64(kernel, period());
    length = whole ? (count - 1) * stride + reach + 1 : count + reach / stride;
    step = whole ? stride : 1;
    // The ways above read a stretch of the input once. This one may read it several times, and keeps to what is used.
    if (pieces * length <= kWasteful * kernel * count) return;
    way = kTaps, pieces = kernel, length = count, step = 1;
  }

  int64_t piece_of(int64_t tap) const { return way == kWhole ? 0 : way == kPhases ? tap % period() : tap; }
  // Of a tap in its piece, for the first output.
  int64_t place_of(int64_t tap) const {
    return way == kWhole ? tap * dilation : way == kPhases ? tap * dilation / stride : 0;
  }
  // Where element `at` of a piece is, from the first one that the first output reads.
  int64_t source_of(int64_t piece, int64_t at) const {
    return way == kWhole ? at : (way == kPhases ? piece * dilation % stride : piece * dilation) + at * stride;
  }

 private:
  static constexpr int64_t kWasteful = 4;

  // Taps from one to the next of the same phase.
  int64_t period() const { return stride / std::gcd(stride, dilation); }
};

// The copied input of one band: for each slice of depth, each piece of the rows and each of the columns a plane of
// `rows.length` rows of `columns.length` pixels.
struct Planes {
  Axis rows, columns;
  int64_t plane, slices;  // bytes of a plane; depth slices
  int64_t bytes;          // of all planes of one image's band; at most kMostBytes
};

// More working memory than a thread ever has. Sums of a few such sizes do not overflow.
constexpr int64_t kMostBytes = int64_t{1} << 46;

// Sizes of less than 2^63, of which none is negative.
int64_t bytes_product(std::initializer_list<int64_t> sizes) {
  int64_t bytes = 1;
  for (const int64_t size : sizes)
    if (size == 0) return 0;
  for (const int64_t size : sizes)
    if (__builtin_mul_overflow(bytes, size, &bytes) || bytes > kMostBytes) return kMostBytes;
  return bytes;
}

// `t` with its pixels as far apart as on the first axis that has several: what a single one's axis says means nothing.
xq_tensor with_pixels_apart(xq_tensor t) {
  if (t.w == 1) t.stride_w = t.h > 1 ? t.stride_h : t.d > 1 ? t.stride_d : t.n > 1 ? t.stride_n : t.stride_w;
  return t;
}

struct Shape {
  const xq_conv_call& call;
  const Packed& p;
  const xq_tensor in, out, res;
  explicit Shape(const xq_conv_call& c)
      : call(c), p(*static_cast<const Packed*>(c.packed)), in(with_pixels_apart(c.in)), out(with_pixels_apart(c.out)),
        res(with_pixels_apart(c.residual)) {}
  int64_t rows() const { return out.n * out.d * out.h; }
  int64_t pixels() const { return rows() * out.w; }
};

// Whether all pixels lie `stride_w` apart over the whole tensor.
bool is_flat(const xq_tensor& t) {
  return (t.h == 1 || t.stride_h == t.w * t.stride_w) &&
         (t.d == 1 || t.stride_d == t.h * t.w * t.stride_w) &&
         (t.n == 1 || t.stride_n == t.d * t.h * t.w * t.stride_w);
}

Planes planes_for(const Shape& s, int64_t rows) {
  const Geometry& g = s.p.geo;
  const bool whole = s.p.mode == kIm2col;
  Planes l{Axis(g, 1, rows, whole), Axis(g, 2, s.out.w, whole), 0, g.kernel[0], 0};
  l.plane = bytes_product({l.rows.length, l.columns.length, s.in.c});
  l.bytes = round_up(bytes_product({l.plane, l.rows.pieces, l.columns.pieces, l.slices}), kAlign);
  return l;
}

int64_t im2col_lda(const Packed& p) { return round_up(p.at<Run>(p.runs)->bytes, 16); }

int64_t im2col_bytes(const Shape& s, int64_t rows) {
  return round_up(bytes_product({rows, s.out.w, im2col_lda(s.p)}), kAlign);
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

// `count` pixels that lie `apart`, next to one another.
void copy_pixels(uint8_t* to, const uint8_t* from, int64_t count, int64_t apart, int64_t c) {
  if (apart == c) return (void)memcpy(to, from, static_cast<size_t>(count * c));
  for (int64_t i = 0; i < count; ++i) memcpy(to + i * c, from + i * apart, static_cast<size_t>(c));
}

// One row of a piece of columns; `from` null means padding.
void fill_row(const Shape& s, uint8_t* to, const uint8_t* from, int64_t piece, const Axis& columns) {
  const int64_t c = s.in.c, zp = s.p.in_zp, width = columns.length;
  if (!from) return (void)memset(to, static_cast<int>(zp), static_cast<size_t>(width * c));
  const Geometry& g = s.p.geo;
  // Pixel x of the piece is at x * step + shift of the stretched input.
  const int64_t shift = columns.source_of(piece, 0) - g.pad[2], up = g.up[2];
  const int64_t step = columns.source_of(piece, 1) - columns.source_of(piece, 0);
  int64_t x = 0;
  if (up == 1) {
    const int64_t before = std::clamp<int64_t>(ceil_div(max64(-shift, 0), step), 0, width);
    const int64_t stop = s.in.w - shift <= 0 ? 0 : ceil_div(s.in.w - shift, step);
    const int64_t end = std::clamp<int64_t>(stop, before, width);
    memset(to, static_cast<int>(zp), static_cast<size_t>(before * c));
    if (before < end)
      copy_pixels(to + before * c, from + (before * step + shift) * s.in.stride_w, end - before, step * s.in.stride_w, c);
    x = end;
    memset(to + x * c, static_cast<int>(zp), static_cast<size_t>((width - x) * c));
    return;
  }
  for (; x < width; ++x) {
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
    for (int64_t py = 0; py < l.rows.pieces; ++py)
      for (int64_t px = 0; px < l.columns.pieces; ++px, to += l.plane)
        for (int64_t y = 0; y < l.rows.length; ++y) {
          const int64_t h = source(row * g.stride[1] + l.rows.source_of(py, y) - g.pad[1], g.up[1], s.in.h);
          const uint8_t* from = d < 0 || h < 0 ? nullptr
                                               : s.in.data + n * s.in.stride_n + d * s.in.stride_d +
                                                     h * s.in.stride_h;
          fill_row(s, to + y * l.columns.length * s.in.c, from, px, l.columns);
        }
  }
}

// Bytes from the beginning of the planes to what the first output reads of a tap.
int64_t tap_offset(const Shape& s, const Planes& l, int64_t z, int64_t y, int64_t x) {
  const int64_t plane = (z * l.rows.pieces + l.rows.piece_of(y)) * l.columns.pieces + l.columns.piece_of(x);
  return plane * l.plane + (l.rows.place_of(y) * l.columns.length + l.columns.place_of(x)) * s.in.c;
}

// Adjacent taps are copied as one stretch, which the loops do in whole registers.
constexpr int64_t kMaxPiece = 256;

int64_t im2col_pieces(const Shape& s, int64_t* piece) {
  const Geometry& g = s.p.geo;
  const bool adjacent = g.dilation[2] == 1 && g.kernel[2] * s.in.c <= kMaxPiece && Axis(g, 2, s.out.w, true).way == Axis::kWhole;
  *piece = adjacent ? g.kernel[2] * s.in.c : s.in.c;
  return g.kernel[0] * g.kernel[1] * (adjacent ? 1 : g.kernel[2]);
}

void fill_im2col(const Shape& s, const Planes& l, int64_t rows, const uint8_t* planes, int64_t* offsets,
                 uint8_t* to) {
  const Geometry& g = s.p.geo;
  const int64_t c = s.in.c;
  int64_t piece = 0;
  const int64_t pieces = im2col_pieces(s, &piece), across = pieces / (g.kernel[0] * g.kernel[1]);
  for (int64_t i = 0; i < pieces; ++i)
    offsets[i] = tap_offset(s, l, i / across / g.kernel[1], i / across % g.kernel[1], i % across);
  kernels_of(s.p.isa).im2col({planes, l.rows.step * l.columns.length * c, l.columns.step * c, to, im2col_lda(s.p), rows,
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
  t.packed = &s.p, t.corr = s.p.at<int32_t>(s.p.corr);
  t.segments = 1;
  auto place = [&](const xq_tensor& x) {
    return x.data + n * x.stride_n + d * x.stride_d + h * x.stride_h;
  };
  t.out = place(s.out), t.out_pixel = s.out.stride_w, t.out_row = s.out.stride_h;
  t.out_segment = s.out.stride_n;
  if (!s.p.residual) return t;
  t.res = place(s.res), t.res_pixel = s.res.stride_w, t.res_row = s.res.stride_h, t.res_segment = s.res.stride_n;
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

// Whether rows are copied to where they do not collide, which takes as long as the products of some 30 outputs gain.
bool copies_rows(const Shape& s) { return rows_collide(s.p.isa, s.in.stride_w) && s.out.c >= 128; }

int64_t apart_lda(const Shape& s) { return copied_stride(s.in.c + overread(s)); }

int64_t rows_apart(const Shape& s) { return copied_rows(s.p, s.in.c, kTileRows); }

// The same as run_direct.
void run_apart(const Shape& s, DenseTask t, const uint8_t* a, int64_t rows, uint8_t* scratch) {
  const int64_t zero = 0, lda = apart_lda(s), most = rows_apart(s);
  t.offsets = &zero, t.a = scratch, t.lda = lda, t.tail_begin = INT64_MAX;
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = min64(most, rows - first);
    for (int64_t m = 0; m < count; ++m)
      memcpy(scratch + m * lda, a + (first + m) * s.in.stride_w, static_cast<size_t>(s.in.c));
    t.rows = t.row_len = t.row_valid = count;
    run_loops(s, t);
    t.out += count * t.out_pixel;
    if (t.res) t.res += count * t.res_pixel;
  }
}

bool whole_flat(const Shape& s) {
  return is_flat(s.in) && is_flat(s.out) && (!s.p.residual || is_flat(s.res));
}

void direct_range(const Shape& s, int64_t begin, int64_t end, int32_t b0, int32_t b1, uint8_t* scratch) {
  if (whole_flat(s)) {  // units are tiles of pixels
    const int64_t first = begin * kTileRows, last = min64(end * kTileRows, s.pixels());
    DenseTask t = task_at(s, 0, 0, 0);
    t.block_begin = b0, t.block_end = b1;
    t.out += first * t.out_pixel;
    if (t.res) t.res += first * t.res_pixel;
    return (copies_rows(s) && last - first >= kFewRows ? run_apart : run_direct)(
        s, t, s.in.data + first * s.in.stride_w, last - first, scratch);
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
  const Run* runs = s.p.at<Run>(s.p.runs);
  for (int i = 0; i < s.p.n_runs; ++i) offsets[i] = tap_offset(s, l, runs[i].tap[0], runs[i].tap[1], runs[i].tap[2]);
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
    t.rows = (rows - 1) * l.columns.length + s.out.w, t.row_len = l.columns.length, t.row_valid = s.out.w;
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

// The windows of a call, where they are worth it.
std::optional<Windows> windows_of(const Shape& s) {
  constexpr int64_t kMostSize = 1 << 16;
  if (!s.p.tap_corr || max64(s.out.h, s.out.w) > kMostSize) return std::nullopt;
  const Windows found(s.p.geo, s.in, s.out);
  return found.worth_it() ? std::optional(found) : std::nullopt;
}

// Rows of a window that are copied and computed together.
int64_t window_rows(const Shape& s, const Windows& windows, const OutputRange& y, const OutputRange& x) {
  const int64_t each = bytes_product({x.count(), windows.taps(y, x), s.in.c});
  const int64_t most = std::clamp<int64_t>(band_bytes(s.p) / max64(each, 1), 1, y.count());
  return ceil_div(y.count(), ceil_div(y.count(), most));  // evenly
}

// Elements of `corr`, and of `tap_corr` for each run.
int64_t scalars_of(const Packed& p) {
  const Block& last = p.at<Block>(p.blocks)[p.n_blocks - 1];
  return last.s_off + round_up(last.vecs * int64_t{p.lanes}, 16);
}

size_t window_scratch(const Shape& s, const Windows& windows) {
  int64_t bytes = 0;
  windows.each([&](const OutputRange& y, const OutputRange& x) {
    const int64_t rows = window_rows(s, windows, y, x);
    bytes = max64(bytes, bytes_product({rows, x.count(), windows.taps(y, x), s.in.c}));
  });
  bytes += offsets_bytes(s) + round_up(scalars_of(s.p) * 4, kAlign);
  return static_cast<size_t>(bytes + kTileRows * s.in.c + overread(s) + 4 * kAlign);
}

// The rows `y` of a slice by the columns `x`: of each tap that they meet what it reads, row after row.
void run_window(const Shape& s, const Windows& windows, int64_t n, int64_t od, const OutputRange& y, const OutputRange& x,
                int32_t b0, int32_t b1, uint8_t* scratch) {
  const Geometry& g = s.p.geo;
  const Meeting &rows = windows.rows, &columns = windows.columns;
  const int64_t c = s.in.c;
  const int64_t scalars = scalars_of(s.p);
  auto* offsets = reinterpret_cast<int64_t*>(scratch);
  auto* corr = reinterpret_cast<int32_t*>(scratch + offsets_bytes(s));
  uint8_t *const copied = scratch + offsets_bytes(s) + round_up(scalars * 4, kAlign), *to = copied;
  std::copy_n(s.p.at<int32_t>(s.p.corr), scalars, corr);
  for (int64_t i = 0; i < s.p.n_runs; ++i) {
    const int64_t tx = i % g.kernel[2], ty = i / g.kernel[2] % g.kernel[1], tz = i / g.kernel[2] / g.kernel[1];
    const int64_t d = source(od * g.stride[0] + tz * g.dilation[0] - g.pad[0], 1, s.in.d);
    offsets[i] = kNoInput;
    if (d < 0 || !rows.meets(y.first, ty) || !columns.meets(x.first, tx)) {
      const int32_t* more = s.p.at<int32_t>(s.p.tap_corr) + i * scalars;
      for (int64_t j = 0; s.p.in_zp && j < scalars; ++j)
        corr[j] = static_cast<int32_t>(static_cast<uint32_t>(corr[j]) + static_cast<uint32_t>(more[j]));
      continue;
    }
    offsets[i] = to - copied;
    for (int64_t h = y.first; h < y.last; ++h, to += x.count() * c) {
      const uint8_t* from = s.in.data + n * s.in.stride_n + d * s.in.stride_d + rows.read(h, ty) * s.in.stride_h +
                            columns.read(x.first, tx) * s.in.stride_w;
      copy_pixels(to, from, x.count(), columns.stride * s.in.stride_w, c);
    }
  }
  DenseTask t = task_at(s, n, od, y.first);
  t.out += x.first * t.out_pixel;
  if (t.res) t.res += x.first * t.res_pixel;
  t.block_begin = b0, t.block_end = b1, t.offsets = offsets, t.corr = corr, t.tail_begin = INT64_MAX;
  t.a = copied, t.lda = c;
  t.rows = y.count() * x.count(), t.row_len = t.row_valid = x.count();
  run_loops(s, t);
}

void windowed_range(const Shape& s, const Windows& windows, int64_t begin, int64_t end, int32_t b0, int32_t b1,
                    uint8_t* scratch) {
  for (int64_t row = begin; row < end;) {
    const int64_t n = row / (s.out.d * s.out.h), d = row / s.out.h % s.out.d, h = row % s.out.h;
    const int64_t stop = min64(s.out.h, h + end - row);
    windows.each([&](const OutputRange& y, const OutputRange& x) {
      const int64_t most = window_rows(s, windows, y, x), last = min64(y.last, stop);
      for (int64_t at = max64(y.first, h); at < last; at += most)
        run_window(s, windows, n, d, {at, min64(at + most, last)}, x, b0, b1, scratch);
    });
    row += stop - h;
  }
}

Cut cut_of(const Shape& s) {
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

int64_t dense_items(const xq_conv_call& call) { return cut_of(Shape(call)).items(); }

size_t dense_scratch(const xq_conv_call& call) {
  const Shape s(call);
  if (s.pixels() == 0) return 0;
  if (s.p.mode == kDirect && s.p.algo == XQ_ALGO_DENSE)
    return static_cast<size_t>(copies_rows(s) ? (max64(rows_apart(s), tail_rows(s)) + kTileRows) * apart_lda(s) + kAlign
                                               : tail_rows(s) * tail_lda(s) + kAlign);
  if (const auto windows = windows_of(s)) return window_scratch(s, *windows);
  const Band band = band_for(s);
  const Planes l = planes_for(s, band.rows);
  const bool im2col = s.p.mode == kIm2col;
  const int64_t lda = im2col ? im2col_lda(s.p) : s.in.c;
  int64_t bytes = im2col ? l.bytes + 2 * kMaxPiece + bytes_product({band.images, im2col_bytes(s, band.rows)})
                         : bytes_product({band.images, l.bytes});
  bytes += offsets_bytes(s) + kTileRows * lda + overread(s) + 4 * kAlign;
  return static_cast<size_t>(bytes);
}

void dense_run(const xq_conv_call& call, int64_t begin, int64_t end, uint8_t* scratch) {
  const Shape s(call);
  const Cut cut = cut_of(s);
  const auto windows = windows_of(s);
  for (int64_t item = begin; item < end; ++item) {
    const CutPiece some = piece_of(cut, item, s.p);
    if (some.is_empty()) continue;
    if (windows) windowed_range(s, *windows, some.first, some.last, some.block_begin, some.block_end, scratch);
    else (s.p.mode == kDirect ? direct_range : banded_range)(s, some.first, some.last, some.block_begin, some.block_end, scratch);
  }
}

}  // namespace xq

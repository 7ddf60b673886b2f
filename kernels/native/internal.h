// What the files of this library share: the packed blob and the tasks handed to an ISA's loops.
//
// Functions here are static: a file compiled for AVX-512 must never lend its copy of an inline
// function to a file that runs on a smaller CPU. For the same reason ISA files use no C++ headers
// but the freestanding ones.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "native.h"

namespace xq {

constexpr uint32_t kMagic = 0x5851380b;
constexpr int64_t kAlign = 64;
constexpr int kMaxLanes = 16;  // of int32 in the longest vectors
constexpr int64_t kMostGroups = 2048;  // of weights with scales for groups of input features: see groups.h

static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
static inline int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }
static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

static inline bool has_vnni(int isa) { return isa != XQ_ISA_AVX2 && isa != XQ_ISA_AVX512; }
static inline int lanes_of(int isa) { return isa >= XQ_ISA_AVX512 ? 16 : 8; }

// A convolution, transposed or not, as one formula: output position o and tap t meet the input
// stretched by `up` (zero points between its pixels) at o * stride + t * dilation - pad.
struct Geometry {
  int64_t kernel[3], stride[3], pad[3], dilation[3], up[3];
};

// Output channels that are computed together, as 1, 2 or 4 vectors of int32.
struct Block {
  int32_t a_off;   // first input channel
  int32_t out_c;   // first output channel
  int32_t count;   // output channels
  int32_t vecs;
  int32_t regroup; // whether the input's bytes must be regrouped first
  int64_t w_off;   // bytes into the weights
  int64_t w_size;  // bytes of the block's weights
  int64_t s_off;   // elements into corr, mult and bias
};

// Adjacent bytes of the input that one stretch of weights is multiplied with.
struct Run {
  int32_t tap[3];  // the first tap covered
  int32_t bytes;   // real bytes; the rest of `quads` meets zero weights
  int32_t quads;   // groups of 4 bytes
};

enum DenseMode : int32_t {
  kDirect = 0,   // a kernel of 1 without stride or padding: reads the tensor in place
  kPlanes = 1,   // reads a zero-point-padded copy, one plane for each phase of the stride
  kIm2col = 2,   // reads rows of all taps: few input channels
};

// Depthwise: `rows` output rows share `quads` groups of 4 input rows of each slice. Where `by_taps`, the groups are of 4
// taps of a pixel instead.
struct DepthwisePlan {
  int32_t rows, quads, by_taps;
};

// Taps of a pixel that are multiplied as they lie: two quads, and one that is alone.
constexpr int kNineTaps = 9;

// The deepest kernel whose slices' strips are kept beside each other.
constexpr int kMostSlices = 16;

// The ways to pair the bytes of a quad, as the order of four quads that makes the pairs adjacent.
constexpr int kPairings = 3;
constexpr uint8_t kPairing[kPairings][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                             {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15},
                                             {0, 3, 1, 2, 4, 7, 5, 6, 8, 11, 9, 10, 12, 15, 13, 14}};

// Of quads: couples, pairings.
constexpr int kClasses = 1 + kPairings;

// The longest row that is regrouped: rows of it fit the stack. One of several runs is read where it lies by
// neighbouring rows too; beyond half of that, copies that each row has for itself leave L1 too little for weights.
constexpr int64_t kMaxRegroup = 4096;

// The longest row that is widened to 16 bits instead, and what it is rounded up to.
constexpr int64_t kMostWords = 128;

// From a run of a regrouped row to the next one.
static inline int64_t regrouped_bytes(const Run& run) { return round_up(run.bytes, 16); }

// One core's data caches, in bytes: what the size of every piece of work is derived from.
struct Caches {
  int64_t l1, l2;
};

// The head of a packed blob; arrays follow at the given byte offsets.
struct Packed {
  uint32_t magic;
  int32_t isa, algo, mode;
  Caches caches;
  xq_conv conv;
  Geometry geo;
  int32_t in_zp, out_zp, lo, hi, residual, res_zp;
  float res_mult;
  int32_t has_lut, has_slopes;
  int32_t clamp_float;   // sums may leave int32 once multiplied: clamp before converting
  int32_t lanes;
  int32_t n_blocks, n_runs;
  DepthwisePlan depthwise;
  // Where there is no VNNI: a block's `order_stride` int32s say, for each run, how many couples of quads may
  // be summed in 16 bits, how many quads are safe to multiply in saturating 16-bit pairs in each pairing, then
  // the quads in the order of the weights: couples, pairing by pairing, those that no pairing makes safe.
  int64_t order, order_stride;
  // Such a block may have the 16 bytes of each window of its runs shuffled, and some of them flipped to 255
  // minus themselves, so that more products may be summed in 16 bits: half of the `regroup_stride` bytes of a block
  // say from where in the window each byte comes, the other half what it is xored with. Else 0.
  // Grouped: `order` is the number of safe quads and the run of each quad, `regroup` where each lane's bytes are.
  int64_t regroup, regroup_stride;
  int64_t blocks, runs, corr, mult, bias, slopes, lut, weights, size;
  // Of a linear with float output: the sum of each channel's weights, else 0; and what follows it.
  int64_t weight_sums;
  int32_t activation;
  int32_t winograd;      // pixels along each axis of a tile: 2 or 4
  int64_t for_few;       // where another blob begins, which serves calls of few tiles; or 0
  int64_t phases;        // of a transposed convolution: where the blobs of its phases begin, one after another; or 0
  int64_t is_phase;      // whether it is such a blob: `geo.pad` is what it wants in front, and what follows may be longer
  // Of a linear whose weights have scales for groups of input features, else 0: see groups.cpp. `weight_sums` and `mult`
  // are then both what the real weights of each output add up to.
  int32_t groups, code_bits, half_scales, has_offsets;
  int32_t narrow;        // whether no code is larger than 64 in size
  int32_t unpack_from, unpack_to;  // see groups.h
  int32_t in_words;      // dense: whether weights are 16 bits each, in pairs, and in no other order; see dense_words.h
  // Of a dense product whose taps may lie so far apart that some meet padding alone, else 0: for each run, what each output's
  // sum is corrected by where that run is left out.
  int64_t tap_corr;
  int32_t turned;        // depthwise: whether height and depth have changed places in `geo`, and must in a call

  template <class T>
  __attribute__((always_inline)) const T* at(int64_t offset) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(this) + offset);
  }
};

// The permuted position of channels in a block of `vecs` vectors. It is the order in which four
// vectors of int32, narrowed to bytes within 128-bit lanes, come out right; see vec*.h.
static inline int channel_of(int vecs, int vec, int lane) {
  return 4 * vecs * (lane / 4) + 4 * vec + lane % 4;
}

// The same for what `p` packs: floats are not narrowed, so their channels lie in order.
static inline int channel_of(const Packed& p, int vecs, int vec, int lane) {
  return p.weight_sums ? p.lanes * vec + lane : channel_of(vecs, vec, lane);
}

// Whether rows `stride` bytes apart put one another out of L1. Vector loops come back to a line of each row of a tile until
// all of its bytes are multiplied; a way of L1 is a page, so that the lines of rows that lie pages apart share the 8 to 12
// places of one set. Of AMX each line is read once.
static inline bool rows_collide(int32_t isa, int64_t stride) {
  return isa != XQ_ISA_AMX_INT8 && stride > 0 && stride % 4096 == 0;
}

// From a copied row of `bytes` to the next: whole cache lines, an odd number of them (see linear.cpp), so that they do not.
static inline int64_t copied_stride(int64_t bytes) {
  const int64_t lda = round_up(bytes, kAlign);
  return lda % (2 * kAlign) == 0 ? lda + kAlign : lda;
}

// Rows of `bytes` that are copied together, whole tiles of them: they are read from L2 while weights pass.
static inline int64_t copied_rows(const Packed& p, int64_t bytes, int64_t tile) {
  return round_up(max64(p.caches.l2 * 3 / 16 / max64(bytes, 1), 1), tile);
}

// Of a run that meets padding in all rows of a task.
constexpr int64_t kNoInput = -1;

// Where the rows of a matrix product lie and where its results go. Row m of a segment is pixel
// (m / row_len, m % row_len); those with m % row_len >= row_valid are computed and dropped.
struct DenseTask {
  const Packed* packed;
  const uint8_t* a;
  const int32_t* corr;        // what sums begin with
  const int64_t* offsets;     // a run's bytes from a row's start, or kNoInput
  int64_t lda;
  int64_t segments, a_segment, out_segment, res_segment;
  int64_t rows, row_len, row_valid;
  const uint8_t* tail;        // rows from tail_begin on lie here instead (one segment only)
  int64_t tail_begin, tail_lda;
  uint8_t* out;
  int64_t out_pixel, out_row;
  const uint8_t* res;
  int64_t res_pixel, res_row;
  int32_t block_begin, block_end;
  const float* row_scale;     // of a linear with float output, one a row
  const int32_t* row_zp;
};

// Rows of floats to be quantized one by one; strides in bytes. Whole vectors of codes are written.
struct RowsTask {
  const uint8_t* in;
  int64_t in_stride, rows, features;
  uint8_t* codes;
  int64_t lda;
  float* scale;
  int32_t* zp;
};

struct WeightOnlyTask {
  const float* in;
  float* out;
  const int8_t* weight;
  const float *scale, *bias;
  int64_t rows, in_stride, out_stride, features;
  int32_t activation;
  int64_t begin, end;         // outputs
};

// Copies `pieces` stretches of `piece` bytes, found at `offsets` from a pixel, next to one another.
struct Im2colTask {
  const uint8_t* from;
  int64_t from_row, from_pixel;
  uint8_t* to;
  int64_t lda, rows, width, piece, pieces;
  const int64_t* offsets;
};

struct DepthwiseTask {
  const Packed* packed;
  const xq_tensor* in;
  const xq_tensor* out;
  const xq_tensor* res;   // null when there is none
  int64_t n, z, slices, y;  // image, output slices, first output row
  int32_t block_begin, block_end;
  uint8_t* scratch;
};

// Tiles of output pixels, 2 x 2 or 4 x 4, numbered row by row and image by image.
struct WinogradTask {
  const Packed* packed;
  const xq_tensor *in, *out;
  const xq_tensor* res;       // null when there is none
  int64_t first, last;        // tiles
  int32_t block_begin, block_end;
  uint8_t* scratch;
};

// Places at which a Winograd tile is multiplied.
static inline int64_t winograd_positions(const Packed& p) { return (p.winograd + 2) * (p.winograd + 2); }

static inline int64_t winograd_tiles(const Packed& p, const xq_tensor& out) {
  return out.n * out.d * ceil_div(out.h, p.winograd) * ceil_div(out.w, p.winograd);
}

// The sums that come out right of 4 x 4 tiles: 64 times a sum is what is known of it in 32 bits.
constexpr int64_t kWinogradReach = (int64_t{1} << 25) - 1;

// Tiles in a register block, or in two.
constexpr int64_t winograd_rows_of(bool vnni, int64_t lanes) { return vnni && lanes == 16 ? 14 : 12; }

// Tiles whose products are summed before they are transformed back. Of each tile a block keeps the sums of two
// vectors at each position: all of them should fit L1, or L2 where even few do not. One or two of the largest register
// blocks; two are enough for each time that the weights are read.
static inline int64_t winograd_group(const Packed& p) {
  const int64_t tile = winograd_positions(p) * 2 * p.lanes * int64_t{sizeof(int32_t)};
  const int64_t rows = winograd_rows_of(has_vnni(p.isa), p.lanes);
  return max64(1, min64(p.caches.l1 / tile / rows, 2)) * rows;
}

// Elements from one tile's transformed channels to the next one's: never a power of two apart.
static inline int64_t winograd_lda(int64_t channels) { return channels % 64 ? channels : channels + 32; }

// Tiles whose input is transformed together: 16 bits a channel and position. Of 2 x 2 pixels it takes 3/16 of L2, which
// weights, input and output pass through meanwhile. The weights of 4 x 4 pixels do not stay in L2 as they are: the more
// tiles meet them each time, the better.
static inline int64_t winograd_chunk(const Packed& p, int64_t channels) {
  const int64_t tile = 2 * winograd_positions(p) * winograd_lda(channels), group = winograd_group(p);
  if (p.winograd == 4) return max64(1, min64(p.caches.l2 * 3 / 8 / tile / group, 8)) * group;
  return max64(1, min64(p.caches.l2 * 3 / 16 / tile / group, 4)) * group;
}

// Elements between the positions of a transformed tile. Loops may read two rows too many.
static inline int64_t winograd_step(const Packed& p, int64_t channels) {
  return (winograd_chunk(p, channels) + 2) * winograd_lda(channels);
}

// Whether an output pixel depends on the input pixels in its place only.
static inline bool pixelwise(const xq_op& op) {
  return op.kind <= XQ_OP_SHUFFLE || op.kind >= XQ_OP_QUANTIZE;
}

// Whether b has a value for every pixel, not one for each image.
static inline bool b_is_wide(const xq_op& op) {
  return op.b.d == op.out.d && op.b.h == op.out.h && op.b.w == op.out.w;
}

static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
static inline void prefetch_to_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// What an ISA file provides. In pixelwise ops the stride_w of a tensor with one pixel a row must have
// been settled: it is the step to the next row's.
struct IsaKernels {
  void (*dense)(const DenseTask&);
  void (*depthwise)(const DepthwiseTask&);
  void (*grouped)(const DenseTask&);
  void (*im2col)(const Im2colTask&);
  void (*op_rows)(const xq_op&, int64_t begin, int64_t end);
  void (*linear)(const DenseTask&);  // dense with float output
  void (*quantize_rows)(const RowsTask&);
  void (*weight_only)(const WeightOnlyTask&);
  void (*winograd)(const WinogradTask&);  // null where there is AMX
};

extern const IsaKernels kAvx2, kAvxVnni, kAvx512, kAvx512Vnni, kAmxInt8;

static inline const IsaKernels& kernels_of(int isa) {
  switch (isa) {
    case XQ_ISA_AVX2: return kAvx2;
    case XQ_ISA_AVX_VNNI: return kAvxVnni;
    case XQ_ISA_AVX512: return kAvx512;
    case XQ_ISA_AVX512_VNNI: return kAvx512Vnni;
    case XQ_ISA_AMX_INT8: return kAmxInt8;
  }
  __builtin_trap();  // every entry has checked the level: another one would be memory overwritten
}


// Input bytes that are copied at a time by one thread. A quarter of L2: the copy is read again for every block
// of channels, while weights, input and output pass through the rest.
static inline int64_t band_bytes(const Packed& p) { return p.caches.l2 / 4; }

// The same where every pixel's taps are copied side by side: these lines are long and meet few channels, so they
// should still be in L1. Tiles take 32 of them at a time and many bands would not be filled.
static inline int64_t lines_bytes(const Packed& p) {
  return p.isa == XQ_ISA_AMX_INT8 ? band_bytes(p) : p.caches.l1 / 3;
}

// Input bytes of depthwise's woven strips: 5/12 of L1 (20 of 48 KiB), beside sums, weights, input and output.
static inline int64_t strip_bytes(const Packed& p) { return p.caches.l1 * 5 / 12; }

// Vectors that hold four bytes of each lane of one, in strips and weights of depthwise. On AVX2 bytes are kept as
// 16 bits, the even ones in the first and the odd ones in the second, rather than widened at each product. With
// longer vectors storing twice as many bytes takes as long as it saves.
static inline int depthwise_halves(int isa) { return isa == XQ_ISA_AVX2 ? 2 : 1; }

// Quads of weights of each vector of channels, or their halves.
static inline int64_t depthwise_weights(const Packed& p) {
  const int64_t strips = int64_t{p.depthwise.rows} * p.geo.kernel[0] * p.geo.kernel[2];
  return (p.depthwise.by_taps ? 1 : strips) * p.depthwise.quads * depthwise_halves(p.isa);
}

// Bytes of a column of all strips that an output row needs.
static inline int64_t depthwise_column(const Packed& p) {
  return int64_t{p.geo.kernel[0]} * p.depthwise.quads * p.lanes * 16 * depthwise_halves(p.isa);
}

// Output slices that are computed one after the other, so that strips serve several of them. Of a kernel without depth
// each is an image of its own.
static inline int64_t depthwise_slices(const Packed& p) { return p.geo.kernel[0] == 1 ? 1 : 16; }

static inline int64_t depthwise_strip_columns(const Packed& p, int64_t width_out) {
  return (width_out - 1) * p.geo.stride[2] + (p.geo.kernel[2] - 1) * p.geo.dilation[2] + 1;
}

static inline int64_t depthwise_tile(const Packed& p, int64_t width_out) {
  int64_t columns = strip_bytes(p) / depthwise_column(p);
  int64_t fit = (columns - 1 - (p.geo.kernel[2] - 1) * p.geo.dilation[2]) / p.geo.stride[2] + 1;
  return min64(width_out, max64(fit, 6));
}

// The scale of a row of floats whose range, with 0 in it, is low to high.
struct RowRange {
  float scale, inverse;
};

static inline RowRange range_of(float low, float high, bool finite) {
  constexpr float kLeast = 1.17549435e-38f;
  const float wide = static_cast<float>((static_cast<double>(high) - static_cast<double>(low)) / 255.0);
  const float scale = wide > kLeast ? wide : kLeast;
  return {finite ? scale : __builtin_nanf(""), finite ? 1.0f / scale : 0.0f};
}

// How a GEMM is cut into items: `by_unit` parts of the units (rows, or tiles of them) times `by_block` parts of the blocks
// of output channels.
struct Cut {
  int64_t units, by_unit, by_block;

  int64_t items() const { return by_unit * by_block; }
};

struct CutPiece {
  int64_t first, last;                // units
  int32_t block_begin, block_end;

  bool is_empty() const { return first >= last || block_begin >= block_end; }
};

static inline CutPiece piece_of(const Cut& cut, int64_t item, const Packed& p) {
  // Threads that write to one cache line wait for each other: where there are blocks enough, borders are between lines.
  const int64_t line = p.weight_sums ? 1 : max64(kAlign / (2 * p.lanes), 1);
  const int64_t step = p.n_blocks >= cut.by_block * line ? line : 1, steps = ceil_div(p.n_blocks, step);
  const int64_t u = item / cut.by_block, b = item % cut.by_block;
  const auto border = [&](int64_t i) { return static_cast<int32_t>(min64(i * steps / cut.by_block * step, p.n_blocks)); };
  return {u * cut.units / cut.by_unit, (u + 1) * cut.units / cut.by_unit, border(b), border(b + 1)};
}

// reference.cpp
void conv_reference(const xq_conv_call& call, int64_t begin, int64_t end);
void op_reference(const xq_op& op, int64_t begin, int64_t end);
// conv_dense.cpp
int64_t dense_items(const xq_conv_call& call);
size_t dense_scratch(const xq_conv_call& call);
void dense_run(const xq_conv_call& call, int64_t begin, int64_t end, uint8_t* scratch);
// conv_winograd.cpp
int64_t winograd_items(const xq_conv_call& call);
size_t winograd_scratch(const xq_conv_call& call);
void winograd_run(const xq_conv_call& call, int64_t begin, int64_t end, uint8_t* scratch);
// conv_pack.cpp
bool conv_valid(const xq_conv& conv, int isa);
Caches caches_in_use();  // what xq_set_caches said last

}  // namespace xq

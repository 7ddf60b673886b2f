// The native int8 kernels: a C interface on plain pointers, with no dependency but a C++20 compiler.
//
// Numerics. Activations are affine uint8, weights symmetric int8 per output channel, sums exact
// int32 (they wrap beyond 2^31, which needs more than 65,000 products). An output is
//
//     v   = fma(float(sum), mult[c], bias[c])                  sum = Σ (x - in_zp) · w
//     v   = fma(float(r - res_zp), res_mult, v)                only with a residual r
//     out = clamp(round_half_even(v) + out_zp, lo, hi)
//     out = lut[out]                                           only with a table
//
// so mult = in_scale · w_scale / out_scale, bias = real bias / out_scale and
// res_mult = res_scale / out_scale. Every ISA gives the same bytes as XQ_ISA_REFERENCE.
//
// Layout. A tensor is channels-last with free strides, so a slice is read, and a concat written,
// in place. Only the channels of a pixel must be adjacent. Nothing outside a tensor's pixels is
// ever read or written.
//
// A multiplier, bias or residual multiplier that is not finite is refused. Where a float still becomes NaN
// (the input of QUANTIZE, say), its code is the lower bound.
//
// ISA. The caller names it; nothing is detected here. Packed weights remember theirs.
//
// Caches. Loops work on pieces of a size that fits the caches. xq_set_caches says how large these are, before
// anything is packed; packed weights remember the sizes of their time. Results do not depend on them.
//
// Threads. Every op is a number of independent items: run any split of [0, items) from any threads.
// There is no other mutable global state. Scratch memory belongs to one running thread, 64-byte aligned.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define XQ_API __attribute__((visibility("default")))
#else
#define XQ_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum xq_isa {
  XQ_ISA_REFERENCE = 0,   // plain loops: what the others are tested against
  XQ_ISA_AVX2 = 1,        // with FMA
  XQ_ISA_AVX_VNNI = 2,
  XQ_ISA_AVX512 = 3,      // F, BW, VL, DQ
  XQ_ISA_AVX512_VNNI = 4,
  XQ_ISA_AMX_INT8 = 5,    // with AVX512-VNNI and VBMI
} xq_isa;

typedef enum xq_status {
  XQ_OK = 0,
  XQ_BAD_ARGUMENT = 1,    // null or misaligned pointer, negative size, unknown enum value
  XQ_BAD_SHAPE = 2,       // the tensors do not fit each other or the op
  XQ_UNSUPPORTED = 3,     // this algorithm cannot do this op on this ISA
  XQ_NO_PERMISSION = 4,   // the operating system does not let this process use AMX
  XQ_NOT_FINITE = 5,      // a multiplier or a bias is NaN or infinite
  XQ_TOO_LARGE = 6,       // it would take more working memory than there is
} xq_status;

XQ_API const char* xq_status_text(int status);

// Asks the operating system for AMX tiles, once a process. XQ_NO_PERMISSION where it refuses, XQ_UNSUPPORTED
// where the CPU lacks something else that XQ_ISA_AMX_INT8 stands for, as a virtual machine may make it.
XQ_API int xq_enable_amx(void);

// Bytes of one core's L1 data cache and of its L2 cache; 0 where a size is unknown.
XQ_API void xq_set_caches(int64_t l1, int64_t l2);

// Channels-last (n, d, h, w, c); strides in bytes; d = 1 for images, d = h = 1 for sequences, and a
// matrix of rows is n = d = h = 1, w = rows.
typedef struct xq_tensor {
  uint8_t* data;
  int64_t n, d, h, w, c;
  int64_t stride_n, stride_d, stride_h, stride_w;
} xq_tensor;

// ---------------------------------------------------------------------------------- convolution

typedef enum xq_algo {
  XQ_ALGO_AUTO = 0,
  XQ_ALGO_REFERENCE = 1,
  XQ_ALGO_DENSE = 2,      // matrix product over taps; groups as block-diagonal blocks
  XQ_ALGO_DEPTHWISE = 3,  // one input and one output channel a group
  XQ_ALGO_GROUPED = 4,    // 4 or 8 channels a group
  XQ_ALGO_WINOGRAD = 5,   // 3 x 3, stride and dilation 1, not on AMX: tiles of 2 x 2 pixels
  XQ_ALGO_WINOGRAD4 = 6,  // the same, tiles of 4 x 4; another way with weights whose sums would be too large for it
} xq_algo;

// Arrays are in the order depth, height, width. A transposed convolution has transposed = 1; its
// weights are still (out, in / groups, kd, kh, kw), unflipped, padding as in PyTorch. Output padding
// shows only in the output tensor's size. A linear layer is a convolution with a kernel of 1.
typedef struct xq_conv {
  int32_t in_channels, out_channels, groups;
  int32_t kernel[3], stride[3], padding[3], dilation[3];
  int32_t transposed;
  int32_t algo;           // xq_algo
  int32_t pixels;         // of the output, in a usual call, of all images together; 0: unknown. Results do not depend on it
} xq_conv;

typedef struct xq_requant {
  const float* mult;      // one an output channel
  const float* bias;      // one an output channel, in output steps; may be null
  const uint8_t* lut;     // 256 entries, or null
  int32_t in_zp, out_zp, lo, hi;
  int32_t residual;       // 1: the calls will pass a residual
  int32_t res_zp;
  float res_mult;
  const float* slopes;    // one an output channel, or null: what is below zero is multiplied by it, before it is rounded
} xq_requant;

// The algorithm that XQ_ALGO_AUTO stands for.
XQ_API int xq_conv_algo(const xq_conv* conv, int isa);

// Bytes that xq_conv_pack will write, or 0 for a description it refuses.
XQ_API size_t xq_conv_packed_size(const xq_conv* conv, int isa);

// weight: (out, in / groups, kd, kh, kw), contiguous. packed: 64-byte aligned.
XQ_API int xq_conv_pack(const xq_conv* conv, int isa, const int8_t* weight, const xq_requant* requant,
                        void* packed);

typedef struct xq_conv_call {
  const void* packed;
  xq_tensor in, out;
  xq_tensor residual;     // of out's shape, data null when there is none; may be out itself
  int32_t threads;        // how many threads will share the items: 1 or more
} xq_conv_call;

XQ_API int xq_conv_check(const xq_conv_call* call);
XQ_API int64_t xq_conv_items(const xq_conv_call* call);
XQ_API size_t xq_conv_scratch(const xq_conv_call* call);  // bytes for each running thread
XQ_API void xq_conv_run(const xq_conv_call* call, int64_t begin, int64_t end, void* scratch);

// ------------------------------------------------------------------------------ dynamic linear
//
// Float32 in and out. Each row of K floats is quantized on its own:
//
//     low, high = min(row, 0), max(row, 0)
//     scale = max(float((double(high) - low) / 255), FLT_MIN), inv = 1 / scale
//     zp    = round_half_even(-low * inv)
//     code  = clamp(round_half_even(x * inv) + zp, 0, 255)
//
// and an output is activation(fma(float(sum), scale * w_scale[c], bias[c])), sum = Σ (code - zp) · w.
// A row that holds NaN or infinity gives NaN. Activations differ from their exact values by less than
// 1e-6 (1 + |x|).
//
// Order of calls: check, then quantize all rows, then run all items. Where xq_linear_by_rows says so, items
// are ranges of rows which quantize their own, and xq_linear_quantize must not be called.

typedef enum xq_activation {
  XQ_ACT_NONE = 0,
  XQ_ACT_RELU = 1,
  XQ_ACT_GELU = 2,
  XQ_ACT_GELU_TANH = 3,
  XQ_ACT_SILU = 4,
  XQ_ACT_SIGMOID = 5,
  XQ_ACT_TANH = 6,
} xq_activation;

typedef struct xq_linear {
  int32_t in_features, out_features;
  int32_t activation;     // xq_activation
} xq_linear;

// Bytes that xq_linear_pack will write, or 0 for a description it refuses.
XQ_API size_t xq_linear_packed_size(const xq_linear* linear, int isa);

// weight: (out, in), contiguous; scale: one an output; bias: the same, or null. packed: 64-byte aligned.
XQ_API int xq_linear_pack(const xq_linear* linear, int isa, const int8_t* weight, const float* scale,
                          const float* bias, void* packed);

typedef struct xq_linear_call {
  const void* packed;
  const float* in;
  float* out;
  int64_t rows, in_stride, out_stride;  // from row to row, in floats
  void* codes;            // xq_linear_codes_size bytes, 64-byte aligned, shared by all threads
  int32_t threads;        // how many threads will share the items: 1 or more
} xq_linear_call;

XQ_API int xq_linear_check(const xq_linear_call* call);
XQ_API size_t xq_linear_codes_size(const xq_linear_call* call);
XQ_API int xq_linear_by_rows(const xq_linear_call* call);
XQ_API void xq_linear_quantize(const xq_linear_call* call, int64_t row_begin, int64_t row_end);
XQ_API int64_t xq_linear_items(const xq_linear_call* call);
XQ_API void xq_linear_run(const xq_linear_call* call, int64_t begin, int64_t end);

// Float rows times int8 weights as they lie, out = activation(fma(Σ x · w, scale[c], bias[c])), in float32
// and in no particular order. Strides are in floats. Not for XQ_ISA_REFERENCE.
typedef struct xq_weight_only {
  const float* in;
  float* out;
  const int8_t* weight;   // (out, in), contiguous
  const float* scale;     // one an output
  const float* bias;      // the same, or null
  int64_t rows, in_stride, out_stride;
  int64_t in_features, out_features;
  int32_t activation, isa;
} xq_weight_only;

XQ_API int xq_weight_only_check(const xq_weight_only* op);
// Outputs [begin, end) of all rows: any split of [0, out_features) from any threads.
XQ_API void xq_weight_only_run(const xq_weight_only* op, int64_t begin, int64_t end);

// ------------------------------------------------------------------------ ops on uint8 tensors
//
// One struct for all: a and b in, out out. Below, q(v) is clamp(round_half_even(v) + out_zp, lo, hi),
// then lut[q] where lut is not null; NaN becomes lo. Ops that do not round take no table, but LUT.
//
// Items are rows (n, d, h) of out; an average over one row of windows splits into blocks of channels
// too. Rows that follow one another in memory cost no more than one long row, so a matrix of rows is
// best described as h = rows, w = 1: its rows are then items.
//
// out may be a itself (or b, where it has out's shape) in COPY, LUT, REQUANT, ADD, MUL, AFFINE and
// LAYER_NORM. Floats need no alignment.

typedef enum xq_op_kind {
  XQ_OP_COPY = 0,        // out = a (concat and slices: by views)
  XQ_OP_LUT = 1,         // out = lut[a]
  XQ_OP_REQUANT = 2,     // out = q((a - a_zp) * a_mult)
  XQ_OP_ADD = 3,         // out = q(fma(a - a_zp, a_mult, (b - b_zp) * b_mult))
  XQ_OP_MUL = 4,         // out = q((a - a_zp) * (b - b_zp) * a_mult); b may have d = h = w = 1
  XQ_OP_SHUFFLE = 5,     // channel i of group g of a becomes channel i * groups + g of out
  XQ_OP_MAX_POOL = 6,    // over a window; padding never wins
  XQ_OP_AVG_POOL = 7,    // out = q(sum of (a - a_zp) * (a_mult / count)); see count_include_pad
  XQ_OP_ADAPTIVE_POOL = 8,  // average over PyTorch's adaptive windows; global pool: out 1 × 1
  XQ_OP_NEAREST = 9,     // source index floor(dst * scale), as PyTorch's "nearest"
  XQ_OP_BILINEAR = 10,   // d = 1; align_corners as in PyTorch
  XQ_OP_QUANTIZE = 11,   // out = q(a * a_mult); a is float32, its channels a_stride_c bytes apart
  XQ_OP_DEQUANTIZE = 12, // out = (a - a_zp) * a_mult; out is float32, its channels out_stride_c apart
  XQ_OP_AFFINE = 13,     // out = q(fma(a - a_zp, scale_c[c], shift_c[c]))
  XQ_OP_LAYER_NORM = 14, // over the channels of each pixel, see below
  XQ_OP_LUT_REAL = 15,   // out = reals[a]; out is float32, its channels out_stride_c apart
} xq_op_kind;

// LAYER_NORM: with the mean and the variance (over c, not c - 1) of a pixel's codes, in float64,
//
//     rstd = 1 / sqrt(variance + eps)
//     out  = q(fma(fma(a, float(rstd), float(-mean * rstd)), scale_c[c], shift_c[c]))
//
// The variance is exact before it is rounded to float64. eps is in squared steps of a, so
// eps = real eps / x_scale²; scale_c = weight / out_scale and shift_c = bias / out_scale. Without
// scale_c every channel takes a_mult (1 / out_scale), without shift_c 0. At most 2^18 channels.
typedef struct xq_op {
  int32_t kind;
  int32_t isa;
  xq_tensor a, b, out;   // of float32 tensors, data is cast; strides are in bytes as everywhere
  const uint8_t* lut;
  float a_mult, b_mult;
  int32_t a_zp, b_zp, out_zp, lo, hi;
  int32_t groups;
  int32_t kernel[3], stride[3], padding[3], dilation[3];
  int32_t count_include_pad;
  int32_t align_corners;
  float scale[3];        // of NEAREST and BILINEAR: source pixels a destination pixel
  int64_t a_stride_c;    // of QUANTIZE, bytes: 4 for channels-last, the size of a plane for NCHW
  int64_t out_stride_c;  // of DEQUANTIZE and LUT_REAL
  const float* scale_c;  // of AFFINE and LAYER_NORM: one a channel
  const float* shift_c;
  float eps;             // of LAYER_NORM
  const float* reals;    // of LUT_REAL: 256
} xq_op;

XQ_API int xq_op_check(const xq_op* op);
XQ_API int64_t xq_op_items(const xq_op* op);
XQ_API void xq_op_run(const xq_op* op, int64_t begin, int64_t end);

#ifdef __cplusplus
}
#endif

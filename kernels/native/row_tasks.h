// What the files of rows of codes and of attention share: the tasks handed to an ISA's loops.
#pragma once

#include "internal.h"
#include "native_rows.h"

namespace xq {

constexpr int64_t kRowTile = 32;  // rows that a product of linears may read together

// What becomes of rows of floats: total = value [* up] [+ residual], normed = norm(total), codes of the last of them.
// Strides are in floats; residual, norm_weight and codes have `features` a row. total is written where up or residual
// is given, and normed where there is a norm; both may be a scratch row with a stride of 0.
struct FinishTask {
  const float *value, *up, *residual;
  int64_t value_stride, up_stride;
  float *total, *normed;
  int64_t total_stride, normed_stride;
  int64_t rows, features;
  int32_t norm;               // xq_norm
  const float *norm_weight, *norm_bias;
  float eps;
  uint8_t* codes;             // null: none
  float* scale;
  int32_t* zp;
};

// Queries whose scores are computed together, and keys of a block of scores.
constexpr int64_t kAttentionRows = 32, kAttentionKeys = 256;

// The heads of queries that share one head of keys, in one image of a batch. Strides in elements; those named after a
// head lead from one head of queries to the next.
struct HeadTask {
  const float *q, *k, *v;
  int64_t q_stride, q_head, k_stride, v_stride;
  int64_t heads, keys, size, query_begin, query_end;
  int64_t past;               // of causal: query m sees key m + past and those before; may be negative
  const void* mask;           // null: none
  int64_t mask_head, mask_query;
  int32_t mask_is_bool, causal;
  float scale;
  float* out;                 // heads follow one another
  int64_t out_stride;
};

struct AttentionKernel {
  void (*run)(const HeadTask&, void* scratch);
  size_t (*scratch)(int64_t keys, int64_t size);
};

// The same by codes, for the heads that these serve: `run` says whether it did. Fewer keys are not worth asking for.
struct CodeAttention {
  bool (*run)(const HeadTask&, void* scratch);
  size_t (*scratch)(int64_t keys, int64_t size);
  int64_t fewest_keys;
};

// One query a head, of the heads that share one head of keys, of which there is at least one. Keys and values are floats,
// or codes of 8 bits with a scale each. Strides in elements.
template <class T>
struct QueryTask {
  const float* q;
  const T *k, *v;
  const float *k_scale, *v_scale;  // of codes
  int64_t q_head, k_stride, v_stride;
  int64_t heads, keys, size;
  float scale;
  float* out;                 // heads follow one another
};

// Rows of codes with a scale each, as floats `size` apart.
struct CodeRowsTask {
  const int8_t* codes;
  const float* scale;
  int64_t stride, rows, size;
  float* out;
};

constexpr int64_t kHeadsTogether = 4;  // heads of queries that read keys and values together, each with scores of its own

struct CodeKernels {
  void (*make)(const float* x, int64_t size, int8_t* codes, float* scale);
  void (*to_floats)(const CodeRowsTask&);
  void (*query)(const QueryTask<int8_t>&, float* scores);
};

// What an ISA file provides beside its IsaKernels.
struct RowKernels {
  void (*finish_rows)(const FinishTask&);
  AttentionKernel attention;  // of float32
  void (*one_query)(const QueryTask<float>&, float* scores);
  CodeKernels codes;          // of an int8 cache
};

extern const RowKernels kAvx2Rows, kAvxVnniRows, kAvx512Rows, kAvx512VnniRows, kAmxRows;
// Of bfloat16, where AMX or AVX-512 has that.
extern const AttentionKernel kAmxBf16Attention, kAvx512Bf16Attention;
extern const CodeAttention kAvx512VnniCodeAttention;

static inline const RowKernels& row_kernels_of(int isa) {
  switch (isa) {
    case XQ_ISA_AVX2: return kAvx2Rows;
    case XQ_ISA_AVX_VNNI: return kAvxVnniRows;
    case XQ_ISA_AVX512: return kAvx512Rows;
    case XQ_ISA_AVX512_VNNI: return kAvx512VnniRows;
    case XQ_ISA_AMX_INT8: return kAmxRows;
  }
  __builtin_trap();  // every entry has checked the level: another one would be memory overwritten
}

// linear.cpp
void linear_product(const DenseTask& t);
void quantize_reference(const RowsTask& t);
float activate_reference(float x, int32_t activation);
// groups.cpp
void linear_groups(const DenseTask& t);  // of weights with scales for groups of features
// groups_*.cpp
void linear_groups_avx2(const DenseTask& t);
void linear_groups_avx_vnni(const DenseTask& t);
void linear_groups_avx512(const DenseTask& t);
void linear_groups_avx512_vnni(const DenseTask& t);

}  // namespace xq

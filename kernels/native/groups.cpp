// Weights with scales for groups of input features: packing, and plain loops for their products. See groups.h.
//
// A block of one or two vectors of outputs holds one stretch of memory a group, one behind another: its codes, its scales
// and, if there are any, its offsets. Codes of 8 bits lie as [quad][vector][lane][4]; of 4 bits two quads share their
// bytes, the first one in the low halves. What is padding of outputs is 0.
#include "groups.h"

#include <atomic>
#include <cmath>
#include <cstddef>

#include "float_loops.h"
#include "pack_shared.h"
#include "row_tasks.h"

namespace xq {
namespace {

bool valid(const xq_groups& g, int isa) {
  if (isa < XQ_ISA_REFERENCE || isa > XQ_ISA_AMX_INT8) return false;
  if (g.activation < XQ_ACT_NONE || g.activation > XQ_ACT_TANH || (g.bits != 4 && g.bits != 8)) return false;
  if (g.unpack_from < 0 || g.unpack_to < 0) return false;
  if (g.in_features < 1 || g.out_features < 1 || g.groups < 1 || g.groups > kMostGroups) return false;
  // 255 · 128 · 65536 is the most that a sum may be.
  return g.in_features % g.groups == 0 && g.in_features / g.groups % 8 == 0 && g.in_features / g.groups <= (1 << 16);
}

// Where no rules are asked, as in programs without Python: the numbers of rules/*.toml.
int32_t usual_unpack_from(int isa) { return isa == XQ_ISA_AVX2 ? 12 : isa == XQ_ISA_AVX512 ? 64 : INT32_MAX; }

// Where codes, scales and offsets of a group lie in a block.
struct Stretch {
  int64_t codes, scales, size;  // bytes of the codes, of scales and of all

  Stretch(const Packed& p, int vecs) {
    const int64_t outputs = int64_t{vecs} * p.lanes;
    codes = p.conv.in_channels / p.groups * outputs * p.code_bits / 8;
    scales = outputs * (p.half_scales ? 2 : 4);
    size = codes + scales * (p.has_offsets ? 2 : 1);
  }
};

// All but what depends on the values of weights. Blocks follow the head.
Packed head_of(const xq_groups& g, int isa) {
  Packed p;
  memset(static_cast<void*>(&p), 0, sizeof(p));
  p.magic = kMagic, p.isa = isa, p.algo = XQ_ALGO_DENSE;
  p.caches = caches_in_use();
  p.conv.in_channels = g.in_features, p.conv.out_channels = g.out_features, p.conv.groups = 1;
  for (int i = 0; i < 3; ++i) p.conv.kernel[i] = p.conv.stride[i] = p.conv.dilation[i] = 1;
  p.lanes = isa == XQ_ISA_REFERENCE ? 8 : lanes_of(isa);
  p.activation = g.activation;
  p.groups = g.groups, p.code_bits = g.bits, p.half_scales = g.half != 0, p.has_offsets = g.offsets != 0;
  p.unpack_from = g.unpack_from ? g.unpack_from : usual_unpack_from(isa), p.unpack_to = g.unpack_to;
  const int64_t vectors = ceil_div(g.out_features, p.lanes);
  p.n_blocks = static_cast<int32_t>(ceil_div(vectors, 2));
  int64_t at = round_up(sizeof(Packed), kAlign);
  const auto place = [&](int64_t bytes) {
    const int64_t here = at;
    at = round_up(at + bytes, kAlign);
    return here;
  };
  p.blocks = place(p.n_blocks * int64_t{sizeof(Block)});
  p.mult = p.weight_sums = place(vectors * p.lanes * 4);
  p.bias = place(vectors * p.lanes * 4);
  const int64_t pairs = vectors / 2, last = vectors % 2;
  p.weights = place(g.groups * (pairs * Stretch(p, 2).size + last * Stretch(p, 1).size));
  p.size = at;
  return p;
}

Block block_of(const Packed& p, int64_t index) {
  Block b;
  memset(static_cast<void*>(&b), 0, sizeof(b));
  const int64_t left = p.conv.out_channels - index * 2 * p.lanes;
  b.vecs = left > p.lanes ? 2 : 1;
  b.out_c = static_cast<int32_t>(index * 2 * p.lanes);
  b.count = static_cast<int32_t>(min64(left, int64_t{b.vecs} * p.lanes));
  b.w_off = index * p.groups * Stretch(p, 2).size;
  b.w_size = p.groups * Stretch(p, b.vecs).size;
  b.s_off = b.out_c;
  return b;
}

float scale_of(const Packed& p, const void* scales, int64_t index) {
  return p.half_scales ? float_of_half(static_cast<const uint16_t*>(scales)[index]) : static_cast<const float*>(scales)[index];
}

// Code k of a row of codes as the caller has them, less 8 where it has 4 bits.
int32_t code_at(const Packed& p, const void* row, int64_t k) {
  if (p.code_bits == 8) return static_cast<const int8_t*>(row)[k];
  const uint8_t both = static_cast<const uint8_t*>(row)[k / 2];
  return (k % 2 ? both >> 4 : both & 15) - 8;
}

// One output: returns whether all of its codes are at most 64 in size.
bool pack_output(const Packed& p, const Block& b, int64_t lane, const uint8_t* row, const uint8_t* scales, char* base) {
  const int64_t features = p.conv.in_channels / p.groups, width = int64_t{b.vecs} * p.lanes, each = p.half_scales ? 2 : 4;
  const int64_t numbers = p.has_offsets ? 2 : 1;
  const Stretch stretch(p, b.vecs);
  auto* to = reinterpret_cast<uint8_t*>(base + p.weights + b.w_off);
  bool narrow = true;
  double total = 0;
  for (int64_t g = 0; g < p.groups; ++g, to += stretch.size) {
    int64_t sum = 0;
    for (int64_t k = 0; k < features; ++k) {
      const int32_t code = code_at(p, row, g * features + k);
      sum += code, narrow = narrow && code >= -64 && code <= 64;
      if (p.code_bits == 8) {
        to[(k / 4 * width + lane) * 4 + k % 4] = static_cast<uint8_t>(code);
      } else {
        const int shift = k % 8 >= 4 ? 4 : 0;
        to[(k / 8 * width + lane) * 4 + k % 4] |= static_cast<uint8_t>((code + 8) << shift);
      }
    }
    for (int64_t i = 0; i < numbers; ++i)
      memcpy(to + stretch.codes + i * stretch.scales + lane * each, scales + (g * numbers + i) * each, static_cast<size_t>(each));
    total += static_cast<double>(scale_of(p, scales, g * numbers)) * static_cast<double>(sum);
    if (p.has_offsets) total += static_cast<double>(scale_of(p, scales, g * numbers + 1)) * static_cast<double>(features);
  }
  reinterpret_cast<float*>(base + p.mult)[b.s_off + lane] = static_cast<float>(total);
  return narrow;
}

void linear_groups_reference(const DenseTask& t) {
  const Packed& p = *t.packed;
  const int64_t features = p.conv.in_channels / p.groups;
  for (int64_t m = 0; m < t.rows; ++m)
    for (int32_t i = t.block_begin; i < t.block_end; ++i) {
      const Block& b = p.at<Block>(p.blocks)[i];
      const Stretch stretch(p, b.vecs);
      const int64_t width = int64_t{b.vecs} * p.lanes;
      for (int64_t lane = 0; lane < b.count; ++lane) {
        const uint8_t* from = p.at<uint8_t>(p.weights) + b.w_off;
        float v = 0;
        for (int64_t g = 0; g < p.groups; ++g, from += stretch.size) {
          int32_t sum = 0, codes = 0;
          for (int64_t k = 0; k < features; ++k) {
            const int32_t x = t.a[m * t.lda + g * features + k];
            const int64_t quad = p.code_bits == 8 ? k / 4 : k / 8;
            const uint8_t byte = from[(quad * width + lane) * 4 + k % 4];
            const int32_t code = p.code_bits == 8 ? static_cast<int8_t>(byte) : (k % 8 >= 4 ? byte >> 4 : byte & 15) - 8;
            sum += x * code, codes += x;
          }
          v = std::fma(static_cast<float>(sum), scale_of(p, from + stretch.codes, lane), v);
          if (p.has_offsets) v = std::fma(static_cast<float>(codes), scale_of(p, from + stretch.codes + stretch.scales, lane), v);
        }
        v = std::fma(-static_cast<float>(t.row_zp[m]), p.at<float>(p.mult)[b.s_off + lane], v);
        v = activate_reference(std::fma(v, t.row_scale[m], p.at<float>(p.bias)[b.s_off + lane]), p.activation);
        reinterpret_cast<float*>(t.out + m * t.out_pixel)[b.out_c + lane] = v;
      }
    }
}

}  // namespace

void linear_groups(const DenseTask& t) {
  switch (t.packed->isa) {
    case XQ_ISA_REFERENCE: return linear_groups_reference(t);
    case XQ_ISA_AVX2: return linear_groups_avx2(t);
    case XQ_ISA_AVX_VNNI: return linear_groups_avx_vnni(t);
    case XQ_ISA_AVX512: return linear_groups_avx512(t);
    default: return linear_groups_avx512_vnni(t);  // where there are tiles, too: their sums would pass through memory
  }
}

size_t groups_packed_size(const xq_groups& linear, int isa) {
  return valid(linear, isa) ? static_cast<size_t>(head_of(linear, isa).size) : 0;
}

bool is_groups_packed_for(const xq_groups* linear, int isa, const void* packed) {
  Packed found, wanted = head_of(*linear, isa);
  memcpy(static_cast<void*>(&found), packed, sizeof(found));
  wanted.narrow = found.narrow;
  if (memcmp(&found, &wanted, sizeof(found)) != 0) return false;
  for (int64_t i = 0; i < wanted.n_blocks; ++i) {
    const Block block = block_of(wanted, i);
    if (memcmp(static_cast<const char*>(packed) + wanted.blocks + i * int64_t{sizeof(Block)}, &block, sizeof(block)) != 0) return false;
  }
  return true;
}

int pack_groups_shared(const xq_groups* linear, int isa, const void* codes, const void* scale, const float* bias, void* packed,
                       const Share& share) {
  if (!linear || !codes || !scale || !packed || reinterpret_cast<uintptr_t>(packed) % kAlign) return XQ_BAD_ARGUMENT;
  if (!valid(*linear, isa)) return XQ_UNSUPPORTED;
  const Packed p = head_of(*linear, isa);
  auto* base = static_cast<char*>(packed);
  memset(packed, 0, static_cast<size_t>(p.weights));
  const int64_t row_bytes = int64_t{linear->in_features} * linear->bits / 8;
  const int64_t scale_bytes = int64_t{linear->groups} * (p.half_scales ? 2 : 4) * (p.has_offsets ? 2 : 1);
  std::atomic<bool> narrow{true};
  share(p.n_blocks, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const Block b = block_of(p, i);
      memcpy(base + p.blocks + i * int64_t{sizeof(Block)}, &b, sizeof(b));
      memset(base + p.weights + b.w_off, 0, static_cast<size_t>(b.w_size));
      for (int64_t lane = 0; lane < b.count; ++lane) {
        const int64_t output = b.out_c + lane;
        const auto* row = static_cast<const uint8_t*>(codes) + output * row_bytes;
        const auto* scales = static_cast<const uint8_t*>(scale) + output * scale_bytes;
        if (!pack_output(p, b, lane, row, scales, base)) narrow = false;
        if (bias) reinterpret_cast<float*>(base + p.bias)[output] = bias[output];
      }
    }
  });
  const Block last = block_of(p, p.n_blocks - 1);
  const int64_t used = p.weights + last.w_off + last.w_size;
  memset(base + used, 0, static_cast<size_t>(p.size - used));
  memcpy(packed, &p, sizeof(p));
  static_cast<Packed*>(packed)->narrow = narrow;
  return XQ_OK;
}

}  // namespace xq

size_t xq_groups_packed_size(const xq_groups* linear, int isa) { return linear ? xq::groups_packed_size(*linear, isa) : 0; }

int xq_groups_pack(const xq_groups* linear, int isa, const void* codes, const void* scale, const float* bias, void* packed) {
  return xq::pack_groups_shared(linear, isa, codes, scale, bias, packed, xq::kAlone);
}

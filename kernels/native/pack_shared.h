// Packing the weights of one layer on several threads.
#pragma once

#include <cstdint>
#include <functional>

#include "groups.h"
#include "native.h"

namespace xq {

// Calls body(first, end) for stretches of [0, blocks) that together are all of it, perhaps side by side, and
// returns when all are done.
using Share = std::function<void(int64_t blocks, const std::function<void(int64_t, int64_t)>& body)>;

// On the caller's thread alone.
const Share kAlone = [](int64_t blocks, const std::function<void(int64_t, int64_t)>& body) { body(0, blocks); };

// As xq_conv_pack, with its blocks of output channels shared by `share`: the same bytes. Throws what that throws.
// For the runtime, which may be linked to the kernels as a library.
XQ_API int pack_shared(const xq_conv* conv, int isa, const int8_t* weight, const xq_requant* requant, void* packed,
                const Share& share);

// The same of xq_linear_pack.
XQ_API int pack_linear_shared(const xq_linear* linear, int isa, const int8_t* weight, const float* scale, const float* bias,
                              void* packed, const Share& share);

// The same of xq_groups_pack.
XQ_API int pack_groups_shared(const xq_groups* linear, int isa, const void* codes, const void* scale, const float* bias,
                              void* packed, const Share& share);

// Whether memory of as many bytes as that takes holds what one of those above has packed for such a call, as far as
// its head and its tables of blocks and taps say: all but the values of weights, multipliers and biases.
XQ_API bool is_packed_for(const xq_conv* conv, int isa, const xq_requant* requant, const void* packed);
XQ_API bool is_linear_packed_for(const xq_linear* linear, int isa, const void* packed);
XQ_API bool is_groups_packed_for(const xq_groups* linear, int isa, const void* packed);

}  // namespace xq

#include "row_weights.h"

#include <limits>

namespace x86quant::dynamic {
namespace {

using runtime::Type;
using runtime::View;

bool is_number(int64_t size) { return size <= std::numeric_limits<int32_t>::max(); }

}  // namespace

runtime::RowWeights row_weights(const View& weight, const View& scale, const std::optional<View>& bias) {
  const bool nibbles = weight.type == Type::kByte, groups = scale.dims > 1, half = scale.type == Type::kHalf;
  bool fits = weight.is_cpu && scale.is_cpu && weight.is_contiguous() && scale.is_contiguous() && weight.dims == 2 &&
              scale.dims >= 1 && scale.dims <= 3 && scale.size(0) == weight.size(0) &&
              (weight.type == Type::kChar || (groups && nibbles)) && (scale.type == Type::kFloat || (groups && half)) &&
              (scale.dims < 3 || scale.size(2) == 2);
  if (bias)
    fits = fits && bias->is_cpu && bias->is_contiguous() && bias->type == Type::kFloat && bias->count() == scale.size(0);
  const int64_t in = fits ? weight.size(1) * (nibbles ? 2 : 1) : 0;
  fits = fits && is_number(in) && is_number(weight.size(0)) && (!groups || is_number(scale.size(1)));
  require(fits, "the weights of a linear do not fit each other");
  runtime::RowWeights found{weight.data, scale.data, bias ? bias->as<float>() : nullptr, in, weight.size(0)};
  if (!groups) return found;
  found.groups = static_cast<int32_t>(scale.size(1)), found.bits = nibbles ? 4 : 8;
  found.half = half, found.offsets = scale.dims == 3;
  return found;
}

}  // namespace x86quant::dynamic

// Keys and values of a decoder's cache as int8 codes with a scale for each token and head: making them, and floats again.
#pragma once

#include "one_query.h"
#include "row_tasks.h"

namespace {

template <class V>
void make_codes(const float* x, int64_t size, int8_t* codes, float* scale) {
  using F = typename V::F;
  using I = typename V::I;
  const F zero = V::setf(0);
  F most = zero, odd = zero;
  for (int64_t d = 0; d < size; d += V::kLanes) {
    const F v = V::load_floats(x + d, size - d);
    most = V::max(most, V::max(v, V::sub(zero, v)));
    odd = V::fma(v, zero, odd);  // no number once a feature is not finite
  }
  const bool finite = !V::any_nan(odd);
  const float least = 0x1p-119f, found = V::greatest(most), whole = found > least ? found : least;
  *scale = finite ? whole / 127.0f : __builtin_nanf("");
  const F inverse = V::setf(finite ? 127.0f / whole : 0.0f);
  const I middle = V::set16(128), sign = V::set32(static_cast<int32_t>(0x80808080));
  for (int64_t d = 0; d < size; d += 4 * V::kLanes) {
    I v[4];
    unroll<4>([&](int i) XQ_INLINE {
      const int64_t left = size - d - i * V::kLanes;
      v[i] = finite && left > 0 ? V::to_int(V::mul(V::load_floats(x + d + i * V::kLanes, left), inverse)) : V::set32(0);
    });
    const I signed_codes = V::exclusive_or(V::narrow_in_order(v, middle), sign);
    auto* to = reinterpret_cast<uint8_t*>(codes + d);
    if (size - d >= 4 * V::kLanes) V::store(to, signed_codes);
    else V::template store_pixels<4>(to, 0, signed_codes, 1, static_cast<int>(size - d));
  }
}

template <class V>
void codes_to_floats(const xq::CodeRowsTask& t) {
  for (int64_t row = 0; row < t.rows; ++row) {
    const int8_t* codes = t.codes + row * t.stride;
    float* out = t.out + row * t.size;
    const auto scale = V::setf(t.scale[row]);
    for (int64_t d = 0; d < t.size; d += V::kLanes)
      V::store_floats(out + d, V::mul(floats_of<V>(codes + d, t.size - d), scale), t.size - d);
  }
}

template <class V>
constexpr xq::CodeKernels kCodes = {make_codes<V>, codes_to_floats<V>, one_query<V, int8_t>};

}  // namespace
